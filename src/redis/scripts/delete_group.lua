-- Deletes a group, unless other sidecars have subscribers of the group.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the caller
-- ARGV[3] name of the group
-- Replies:
--   {'deleted'}
--   {'unknown'}: the group does not exist
--   {'in use', number of other sidecars that have a subscriber of the group}
local sidecar, group = ARGV[2], ARGV[3]
repair_unreported()
if not kind_of(group) then return {'unknown'} end
local others = attendance(sidecar)[group]
if others then return {'in use', others} end
leave(group, sidecar)
delete(group)
trim()
return {'deleted'}
