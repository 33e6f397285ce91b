-- Releases the batches of a group that the sidecar holds, and removes the sidecar from the group. The sidecar has no
-- subscriber of the group any more. Deletes an ephemeral group if no other sidecar has a subscriber.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the sidecar
-- ARGV[3] name of the group
-- ARGV[4] maximum number of batches to release
-- Replies:
--   {'left', 0}: the sidecar has left the group
--   {'left', 1}: the maximum was reached, and the sidecar is still in the group. The caller must call again
local sidecar, group, most = ARGV[2], ARGV[3], tonumber(ARGV[4])
write_without_memory()
local freed = let_go_all(group, sidecar, most)
if freed > 0 then tell_returned() end
if freed == most then return {'left', 1} end
leave(group, sidecar)
return {'left', 0}
