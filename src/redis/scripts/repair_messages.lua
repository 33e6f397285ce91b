-- Repairs some of the messages, beginning at a cursor. Puts a message in flight back into its list if Redis has lost
-- that list. Deletes a message that is past its `late` period and whose chunk of `late` was lost.
--
-- KEYS[3] messages   KEYS[4..] the lists of deadlines: D lies in KEYS[4 + D mod lists]
-- ARGV[2] cursor, 0 to begin   ARGV[3] approximate number of messages
-- Reply {'looked', the next cursor (0 at the end), messages put back, messages deleted}
--   {'denied', error} the Redis user lacks a permission
--
-- A full scan returns every message that does not change during the scan. Every script that writes an entry also writes
-- its list.
local messages = KEYS[3]
-- If Redis is out of memory, it runs a script only if the first write needs no memory.
redis.call('HDEL', KEYS[2], '')
local looked = redis.pcall('HSCAN', messages, ARGV[2], 'COUNT', ARGV[3])
if looked.err then return {'denied', looked.err} end

local pointer, slots, lists, frozen_from = numbers(KEYS[1], 'pointer', 'slots', 'lists', 'frozen_from')
local entries, members, over = looked[2], {}, {}
for i = 1, #entries, 2 do
  local deadline, attempt = string.match(entries[i + 1], '^(%d+) (%d+) %d+$')
  deadline = tonumber(deadline)
  -- A deadline beyond the number of lists was written by hand.
  if deadline and deadline >= pointer and deadline < frozen_from + lists then
    local listed = members[deadline] or {}
    listed[#listed + 1] = entries[i] .. (attempt == '1' and '' or '/' .. attempt)
    members[deadline] = listed
  elseif deadline and deadline < pointer and pointer - deadline - 1 >= slots then
    over[#over + 1] = entries[i]
  end
end

-- Works like `in_chunks`, but an error does not end the script: that would stop the wheel.
local denied
local function in_parts(command, key, list)
  local sum = 0
  for first = 1, #list, 4000 do
    local done = redis.pcall(command, key, unpack(list, first, math.min(first + 3999, #list)))
    if type(done) ~= 'number' then
      denied = done.err
      break
    end
    sum = sum + done
  end
  return sum
end
local put_back = 0
for deadline, listed in pairs(members) do
  put_back = put_back + in_parts('SADD', KEYS[4 + deadline % lists], listed)
end
local deleted = in_parts('HDEL', messages, over)
if denied then return {'denied', denied} end
return {'looked', looked[1], put_back, deleted}
