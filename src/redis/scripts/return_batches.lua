-- Returns batches that the sidecar holds, so that any consumer can take them.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] group   ARGV[4..] id and epoch of each batch; an empty epoch matches any epoch
-- Reply {'returned', number of these batches that the sidecar held}
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
