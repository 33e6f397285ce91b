-- Forgets the oldest chunk of what timed out, once a revolution has passed.
--
-- KEYS[3] messages   KEYS[4] late
-- Reply {'forgot', messages}   {'idle'}
local oldest = redis.call('LINDEX', KEYS[4], 0)
if not oldest then return {'idle'} end
local pointer, slots = numbers(KEYS[1], 'pointer', 'slots')
local tick = string.match(oldest, '^%d+')
if pointer - tick - 1 < slots then return {'idle'} end

redis.call('LPOP', KEYS[4])
local messages = {}
for message in string.gmatch(oldest, ' ([%d:]+)') do messages[#messages + 1] = message end
local entries = redis.call('HMGET', KEYS[3], unpack(messages))
local over = {}
for i, entry in ipairs(entries) do
  -- One that was added again since has another deadline, and another life.
  if entry and string.match(entry, '^%d+') == tick then over[#over + 1] = messages[i] end
end
in_chunks('HDEL', KEYS[3], over)
return {'forgot', #over}
