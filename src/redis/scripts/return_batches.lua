-- Returns batches of a sidecar to the outbox. Afterwards no sidecar holds them, and any sidecar can take them.
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
-- ARGV[4], ARGV[6].. id of each batch
-- ARGV[5], ARGV[7].. epoch of that batch; empty for any epoch
-- Reply {'returned', number of batches given back}: skips a batch that the sidecar does not hold or that has
--   another epoch
local sidecar, group, ids = ARGV[2], ARGV[3], {}
if not is_known(group) then return {'returned', 0} end
for i = 4, #ARGV, 2 do
  local id, epoch = ARGV[i], ARGV[i + 1]
  local held = redis.call('XPENDING', outbox, group, id, id, 1)[1]
  if held and held[2] == sidecar and (epoch == '' or is_of(id, epoch)) then ids[#ids + 1] = id end
end
let_go(group, ids)
if #ids > 0 then tell_returned() end
return {'returned', #ids}
