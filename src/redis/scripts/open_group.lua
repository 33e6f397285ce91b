-- Creates a group if it does not exist, and records that the sidecar has a subscriber of the group.
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
-- ARGV[4] maximum number of groups
-- ARGV[5] start of a new group: `0` to get all batches in the outbox, `$` to get only later ones
-- ARGV[6] kind of a new group: `e` ephemeral, `-` not
-- Replies:
--   {'open', 1 if the group is new or 0, kind of the group}
--   {'full'}: the group does not exist, and there are already as many groups as ARGV[4] says
local sidecar, group = ARGV[2], ARGV[3]
repair_unreported()
local kind = kind_of(group)
local is_new = not kind
if is_new then
  if redis.call('HLEN', groups) >= tonumber(ARGV[4]) then return {'full'} end
  kind = ARGV[6]
  -- Batches that all other groups have settled are removed first, so that the new group does not get them.
  trim()
  make(group, ARGV[5], kind)
else
  redis.call('HSET', groups, group, kind)
end
join(group, kind, sidecar)
return {'open', is_new and 1 or 0, kind}
