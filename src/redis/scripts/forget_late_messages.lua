-- Deletes the entries of one chunk of timed-out messages, if the pointer passed their tick at least one revolution of
-- the ring (`slots` ticks) ago. Until then, an Ack of such a message is answered `late`.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] messages: the name and the entry of each message, also of timed-out ones
-- KEYS[4] late: a Redis list of the chunks, oldest first; each is a tick and the names of messages that timed out in
--   this tick
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] maximum number of messages in a chunk
-- Replies:
--   {'forgot', number of entries deleted}
--   {'idle'}: no chunk is old enough
--   {'left over'}: no chunk is old enough, and Redis has lost chunks. There are more entries of timed-out messages than
--     the remaining chunks can contain
local pointer, slots, frozen_from, in_flight = numbers(KEYS[1], 'pointer', 'slots', 'frozen_from', 'in_flight')
local oldest = redis.call('LINDEX', KEYS[4], 0)
local tick = oldest and string.match(oldest, '^%d+')
if oldest and not tick then
  -- The chunk has another format, so it names no message.
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
  -- If the message was added again, its entry has another deadline and stays.
  if entry and string.match(entry, '^%d+') == tick then over[#over + 1] = messages[i] end
end
in_chunks('HDEL', KEYS[3], over)
return {'forgot', #over}
