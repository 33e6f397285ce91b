-- Applies Acks again that Redis had answered and then lost. Skips messages that were added again since.
--
-- KEYS[3] messages   KEYS[4] ticks   KEYS[5..] the lists of deadlines: D lies in KEYS[5 + D mod lists]
-- ARGV[2] a letter for each message: `k` acknowledged, `w` withdrawn
-- ARGV[3..] for each message its name, and the time in ms at which it was added
-- Reply {'reapplied', messages removed from flight}
local pointer, lists, in_flight = numbers(KEYS[1], 'pointer', 'lists', 'in_flight')
local names = {}
for i = 3, #ARGV, 2 do names[#names + 1] = ARGV[i] end

local left, removed, acked = {}, {}, {}
for i, entry in ipairs(redis.call('HMGET', KEYS[3], unpack(names))) do
  local deadline, attempt, added_ms = string.match(entry or '', '^(%d+) (%d+) (%d+)$')
  deadline = tonumber(deadline)
  if deadline and deadline >= pointer and added_ms == ARGV[2 + 2 * i] then
    local list = left[deadline] or {}
    list[#list + 1] = names[i] .. (attempt == '1' and '' or '/' .. attempt)
    left[deadline] = list
    removed[#removed + 1] = names[i]
    if string.sub(ARGV[2], i, i) == 'k' then acked[deadline] = (acked[deadline] or 0) + 1 end
  end
end

for deadline, list in pairs(left) do in_chunks('SREM', KEYS[5 + deadline % lists], list) end
in_chunks('HDEL', KEYS[3], removed)
redis.call('HSET', KEYS[1], 'in_flight', in_flight - #removed)
for deadline, count in pairs(acked) do redis.call('HINCRBY', KEYS[4], 'acked:' .. deadline, count) end
return {'reapplied', #removed}
