-- Delivers batches again: those that the sidecar still holds, and those that were returned and wait for a consumer.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] group   ARGV[4..] id and epoch of each batch
-- Reply {'taken', batch as in take.lua...}, without batches that are settled, dropped or held by another sidecar
--   {'unknown'} the group does not exist
local sidecar, group = ARGV[2], ARGV[3]
if not is_known(group) then return {'unknown'} end
local reply, delivery = {'taken'}, deliveries()
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  local held = redis.call('XPENDING', outbox, group, id, id, 1)[1]
  if held and (held[2] == sidecar or held[2] == nobody) and is_of(id, ARGV[i + 1]) then
    -- XCLAIM returns nothing if the entry has left the stream.
    local claimed = redis.call('XCLAIM', outbox, group, sidecar, 0, id)[1]
    if claimed then reply[#reply + 1] = delivery(claimed, held[4] + 1) end
  end
end
return reply
