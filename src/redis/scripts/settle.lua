-- Settles batches, even if another consumer holds them now.
--
-- KEYS as in group_functions.lua
-- ARGV[2] group   ARGV[3..] id and epoch of each batch
-- Reply {'settled', number of these batches that the group had not settled before}
local group, settled = ARGV[2], 0
if not is_known(group) then return {'settled', 0} end
for i = 3, #ARGV, 2 do
  if is_of(ARGV[i], ARGV[i + 1]) then settled = settled + redis.call('XACK', outbox, group, ARGV[i]) end
end
if settled > 0 then trim() end
return {'settled', settled}
