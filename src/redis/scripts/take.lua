-- Delivers the next batches of a group: first returned batches, oldest first, then new ones.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] group   ARGV[4] messages wanted   ARGV[5] maximum number of batches
-- ARGV[6..] ids of returned batches that are left for other sidecars
-- Reply {'taken', batch...}, without a batch only if no batch is left; a batch is {id, delivery count, epoch, added,
--   acked, storm, last, ms since its tick expired, messages}
--   {'unknown'} the group does not exist
local sidecar, group, wanted, most = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if not is_known(group) then return {'unknown'} end
-- A sidecar that holds batches needs an entry, so that it can be found dead. A sidecar that was reaped by mistake may
-- take batches before its next heartbeat.
if redis.call('HEXISTS', sidecars, sidecar) == 0 then redis.call('HSET', sidecars, sidecar, 0) end

local reply, messages, delivery = {'taken'}, 0, deliveries()
local function has_room()
  return messages < wanted and #reply - 1 < most
end
local function add(entry, delivery_count)
  local batch, count = delivery(entry, delivery_count)
  reply[#reply + 1] = batch
  messages = messages + count
end

local except = {}
for i = 6, #ARGV do except[ARGV[i]] = true end
for _, returned in ipairs(redis.call('XPENDING', outbox, group, '-', '+', most + #ARGV - 5, nobody)) do
  if not has_room() then break end
  if not except[returned[1]] then
    -- XCLAIM returns nothing if the entry has left the stream.
    local claimed = redis.call('XCLAIM', outbox, group, sidecar, 0, returned[1])[1]
    if claimed then add(claimed, returned[4] + 1) end
  end
end
while has_room() do
  local read = redis.call('XREADGROUP', 'GROUP', group, sidecar, 'COUNT', 1, 'STREAMS', outbox, '>')
  if not read then break end
  add(read[1][2][1], 1)
end
return reply
