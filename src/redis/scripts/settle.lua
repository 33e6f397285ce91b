-- Settles batches for a group, including batches that another sidecar holds now. A settled batch is not delivered to
-- this group again.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the group
-- ARGV[3], ARGV[5].. id of each batch
-- ARGV[4], ARGV[6].. epoch of that batch
-- Reply {'settled', number of batches settled by this call}: skips a batch that is already settled or has another epoch
local group, settled = ARGV[2], 0
if not is_known(group) then return {'settled', 0} end
for i = 3, #ARGV, 2 do
  if is_of(ARGV[i], ARGV[i + 1]) then settled = settled + redis.call('XACK', outbox, group, ARGV[i]) end
end
if settled > 0 then trim() end
return {'settled', settled}
