-- Scans a part of the messages, and repairs them after Redis lost keys. If a message is in flight and missing in the
-- list of its deadline, puts it back into that list. If a message timed out at least one revolution of the ring
-- (`slots` ticks) ago, deletes its entry. `forget_late_messages` would have deleted that entry, but Redis lost the
-- chunk with its name.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] messages: the name of each message, and its entry: deadline, number of the attempt, time of the add in ms
-- KEYS[4..] the lists: a Redis SET of messages for each deadline; deadline T has KEYS[4 + T mod number of lists]
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] cursor of HSCAN; 0 to begin
-- ARGV[3] approximate number of messages to scan
-- Replies:
--   {'looked', next cursor (0 at the end), number of messages put back, number of entries deleted}
--   {'denied', error}: the Redis user is not allowed to run a command of this script
--
-- HSCAN returns every message that exists during the whole scan. A message that is added during the scan needs
-- no repair, since every script that writes an entry also writes its list.
local messages = KEYS[3]
-- If Redis is out of memory, it runs a script only if the first write needs no memory. So the first write deletes a
-- field that does not exist.
redis.call('HDEL', KEYS[2], '')
local looked = redis.pcall('HSCAN', messages, ARGV[2], 'COUNT', ARGV[3])
if looked.err then return {'denied', looked.err} end

local pointer, slots, lists, frozen_from = numbers(KEYS[1], 'pointer', 'slots', 'lists', 'frozen_from')
local entries, members, over = looked[2], {}, {}
for i = 1, #entries, 2 do
  local deadline, attempt = string.match(entries[i + 1], '^(%d+) (%d+) %d+$')
  deadline = tonumber(deadline)
  -- If a deadline is too far ahead to have a list of its own, the entry was written by hand and is ignored.
  if deadline and deadline >= pointer and deadline < frozen_from + lists then
    local listed = members[deadline] or {}
    listed[#listed + 1] = entries[i] .. (attempt == '1' and '' or '/' .. attempt)
    members[deadline] = listed
  elseif deadline and deadline < pointer and pointer - deadline - 1 >= slots then
    over[#over + 1] = entries[i]
  end
end

-- Works like `in_chunks`, but returns the sum of the replies, and stores an error in `denied`. An error that ended the
-- script would stop the pointer, which waits for the repair.
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
