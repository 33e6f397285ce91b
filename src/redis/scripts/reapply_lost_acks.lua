-- Applies Acks again that Redis had answered and then lost. Skips an Ack if the message is not in flight, or was added
-- again since.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] messages: the name of each message, and its entry: deadline, number of the attempt, time of the add in ms
-- KEYS[4] ticks: `acked:T`, the number of Acks of each open tick T
-- KEYS[5..] the lists: a Redis SET of messages for each deadline; deadline T has KEYS[5 + T mod number of lists]
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] one letter for each Ack: `k` the message was acknowledged, `w` it was withdrawn
-- ARGV[3], ARGV[5].. the name of each message
-- ARGV[4], ARGV[6].. the time in ms at which that message was added
-- Reply {'reapplied', number of messages removed from flight}
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
