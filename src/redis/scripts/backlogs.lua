-- Counts the messages in the outbox, and for each group the batches that the group has not acknowledged. Writes
-- nothing.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[3] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- No ARGV
-- Reply {number of messages in the outbox, {group, number of unacknowledged batches, number of batches that sidecars
--   hold, age of the oldest unacknowledged batch in ms of ticks}...}
local meta, outbox, groups = KEYS[1], KEYS[2], KEYS[3]
if redis.call('EXISTS', outbox) == 0 then return {0} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local counts = redis.call('HMGET', meta, 'published_batches', 'published_ids', 'pointer', 'due_ms', 'tick_ms')
for i = 1, #counts do counts[i] = tonumber(counts[i] or '0') end
local published, published_ids, pointer, due_ms, tick_ms = unpack(counts)
-- Returns the age of an expired tick in ms: the whole ticks since it expired, plus the elapsed part of the current
-- tick.
local function age_of(tick)
  return math.max(0, pointer - tick - 1) * tick_ms + math.min(math.max(0, now - due_ms), tick_ms)
end

local function by_field(list)
  local named = {}
  for i = 1, #list, 2 do named[list[i]] = list[i + 1] end
  return named
end

-- Returns the fields and the tick of the first entry in the range of ids that begins with `from`.
local function first(from)
  local entry = redis.call('XRANGE', outbox, from, '+', 'COUNT', 1)[1]
  return entry and by_field(entry[2]), entry and string.match(entry[1], '^%d+')
end

-- Returns the number of batches that no sidecar holds, from the consumers in an XPENDING summary. The consumer `-` has
-- these batches.
local function returned(consumers)
  for _, consumer in ipairs(consumers or {}) do
    if consumer[1] == '-' then return tonumber(consumer[2]) end
  end
  return 0
end

-- `ids` of an entry is the number of messages published up to and including this entry. So the script reads only the
-- first entry to count all messages.
local front = first('-')
local gone = front and tonumber(front.ids) and tonumber(front.count) and front.ids - front.count or published_ids

local reply = {math.max(0, published_ids - gone)}
for _, reader in ipairs(redis.call('XINFO', 'GROUPS', outbox)) do
  reader = by_field(reader)
  if redis.call('HEXISTS', groups, reader.name) == 1 then
    -- `batches` of an entry is its number among all published batches. So the script need not count the later entries.
    local unread, tick = first('(' .. reader['last-delivered-id'])
    local number = unread and (tonumber(unread.batches) or published)
    local batches = reader.pending + (unread and published - number + 1 or 0)
    local unacked = 0
    if reader.pending > 0 then
      local pending = redis.call('XPENDING', outbox, reader.name)
      tick, unacked = string.match(pending[2], '^%d+'), reader.pending - returned(pending[4])
    end
    reply[#reply + 1] = {reader.name, batches, unacked, tick and age_of(tick) or 0}
  end
end
return reply
