-- Delivers batches again that the sidecar still holds, or that were returned and not delivered since.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] group   ARGV[4..] id and epoch of each batch
-- Reply {'taken', batch as in take.lua...}, without those that are settled or dropped, or held by another sidecar
--   {'unknown'} there is no such group
local sidecar, group = ARGV[2], ARGV[3]
if not is_known(group) then return {'unknown'} end
local reply, delivery = {'taken'}, deliveries()
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  local held = redis.call('XPENDING', outbox, group, id, id, 1)[1]
  if held and (held[2] == sidecar or held[2] == nobody) and is_of(id, ARGV[i + 1]) then
    -- Empty if the entry has left the stream.
    local claimed = redis.call('XCLAIM', outbox, group, sidecar, 0, id)[1]
    if claimed then reply[#reply + 1] = delivery(claimed, held[4] + 1) end
  end
end
return reply
