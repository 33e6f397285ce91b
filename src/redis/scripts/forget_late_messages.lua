-- Deletes the oldest chunk of timed-out messages, once a revolution of the ring (`slots` ticks) has passed.
--
-- KEYS[3] messages   KEYS[4] late
-- ARGV[2] maximum number of messages in a chunk
-- Reply {'forgot', messages}   {'idle'}
--   {'left over'} there are more timed-out messages than the chunks can name: Redis has lost some chunks
local pointer, slots, frozen_from, in_flight = numbers(KEYS[1], 'pointer', 'slots', 'frozen_from', 'in_flight')
local oldest = redis.call('LINDEX', KEYS[4], 0)
local tick = oldest and string.match(oldest, '^%d+')
if oldest and not tick then
  -- The chunk has another format.
  redis.call('LPOP', KEYS[4])
  return {'forgot', 0}
end
if not tick or pointer - tick - 1 < slots then
  local late = redis.call('HLEN', KEYS[3]) - in_flight
  local is_left_over = late > 0 and frozen_from == pointer
    and not redis.call('LINDEX', KEYS[4], math.ceil(late / ARGV[2]) - 1)
  return {is_left_over and 'left over' or 'idle'}
end

redis.call('LPOP', KEYS[4])
local messages = {}
for message in string.gmatch(oldest, ' ([%d:]+)') do messages[#messages + 1] = message end
local entries = #messages > 0 and redis.call('HMGET', KEYS[3], unpack(messages)) or {}
local over = {}
for i, entry in ipairs(entries) do
  -- A message that was added again has another deadline, and stays.
  if entry and string.match(entry, '^%d+') == tick then over[#over + 1] = messages[i] end
end
in_chunks('HDEL', KEYS[3], over)
return {'forgot', #over}
