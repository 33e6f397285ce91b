-- Adds and dels of one chunk, in the order of their frames.
--
-- KEYS[3] messages   KEYS[4] ticks   KEYS[5..] the lists of deadlines: D lies in KEYS[5 + D mod lists]
-- ARGV[2] number of the chunk, one more than that of the last one applied for this link
-- ARGV[3] most messages in flight   ARGV[4] 1 if there is an add among the frames
-- ARGV[5] number of frames; then for each six values:
--   'a' add, 'd' del, 'w' withdraw | ack timeout in ticks | attempt | messages of it in this chunk
--   | messages of the whole frame with its first part, else 0 | number of the frame
-- and then all their messages, `id` or `id:client`
-- Reply {'ok', tick due, outcomes, latencies, in flight}: a letter a message, and ms, comma-separated, for each `k` and `l`
--   a added  r re-armed  x refused, too many in flight
--   k acked  w withdrawn  l late, counted now  L late, counted before  u unknown
-- or {'order', number of the last chunk applied}
--
-- A message that is decided but not yet published stays in the list of its old deadline when it is added again:
-- that life ends in its batch. Its entry is the new life's.
local messages, ticks, link = KEYS[3], KEYS[4], KEYS[2]
local number = tonumber(ARGV[2])
local last = tonumber(redis.call('HGET', link, 'chunk') or '0')
if number ~= last + 1 then return {'order', last} end

-- A Redis without memory refuses a script whose first write needs some. Dels free memory, and must pass.
if ARGV[4] == '0' then redis.call('HDEL', link, 'refused') end

local pointer, due_ms, tick_ms, slots, lists, in_flight, catch_up =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'slots', 'lists', 'in_flight', 'catch_up')
local max_in_flight, now = tonumber(ARGV[3]), now_ms()
local behind = math.floor((now - due_ms) / tick_ms)
-- A leader moves at most so many ticks at once; what it does not catch up shifts. Being late by less than a tick is
-- made up in any case.
local tick_due = pointer + math.max(0, math.min(behind, math.max(1, catch_up)))

local frames = tonumber(ARGV[5])
local first = 6 + frames * 6

-- What is known of each message: as it was, and as it is now. Deadlines are far below 2^53.
local was_deadline, was_attempt, deadline, attempt, added = {}, {}, {}, {}, {}
for from = first, #ARGV, 4000 do
  local to = math.min(from + 3999, #ARGV)
  local entries = redis.call('HMGET', messages, unpack(ARGV, from, to))
  for i = from, to do
    local entry = entries[i - from + 1]
    if entry then
      local d, a, at = string.match(entry, '^(%d+) (%d+) (%d+)$')
      local message = ARGV[i]
      was_deadline[message], was_attempt[message] = tonumber(d), a
      deadline[message], attempt[message], added[message] = tonumber(d), a, tonumber(at)
    end
  end
end

local touched, order, acked = {}, {}, {}
local function touch(message)
  if not touched[message] then
    touched[message] = true
    order[#order + 1] = message
  end
end

local outcomes, latencies = {}, {}

local function add(message, to, with)
  local present = deadline[message]
  if present and present >= pointer then
    outcomes[#outcomes + 1] = 'r'
  else
    outcomes[#outcomes + 1] = 'a'
    in_flight = in_flight + 1
  end
  deadline[message], attempt[message], added[message] = to, with, now
  touch(message)
end

local function del(message, withdraw)
  local present = deadline[message]
  if not present then return 'u' end
  if present >= pointer then
    if not withdraw then
      acked[present] = (acked[present] or 0) + 1
      latencies[#latencies + 1] = math.max(0, now - added[message])
    end
    deadline[message] = nil
    in_flight = in_flight - 1
    touch(message)
    return withdraw and 'w' or 'k'
  end
  if pointer - present - 1 >= slots then return 'u' end
  -- A late Ack counts once; a withdrawal is none.
  if withdraw or added[message] == 0 then return 'L' end
  latencies[#latencies + 1] = math.max(0, now - added[message])
  added[message] = 0
  touch(message)
  return 'l'
end

-- Whether a frame of adds is more than there is room for. Near the limit only new messages are counted, as far as
-- the whole frame is here.
local function too_many(from, to, whole)
  if in_flight + whole <= max_in_flight then return false end
  if whole > to - from + 1 then return true end
  local fresh, seen = 0, {}
  for i = from, to do
    local message = ARGV[i]
    local present = deadline[message]
    if not seen[message] and not (present and present >= pointer) then
      fresh, seen[message] = fresh + 1, true
    end
  end
  return in_flight + fresh > max_in_flight
end

local position = first
for frame = 0, frames - 1 do
  local head = 6 + frame * 6
  local kind, k, with, count, whole, name =
    ARGV[head], tonumber(ARGV[head + 1]), ARGV[head + 2], tonumber(ARGV[head + 3]), tonumber(ARGV[head + 4]), ARGV[head + 5]
  local to = position + count - 1
  if kind ~= 'a' then
    for i = position, to do outcomes[#outcomes + 1] = del(ARGV[i], kind == 'w') end
  elseif whole == 0 and redis.call('HGET', link, 'refused') == name or whole > 0 and too_many(position, to, whole) then
    if whole > count then redis.call('HSET', link, 'refused', name) end
    for _ = position, to do outcomes[#outcomes + 1] = 'x' end
  else
    for i = position, to do add(ARGV[i], tick_due + k, with) end
  end
  position = to + 1
end

local function member(message, with)
  if with == '1' then return message end
  return message .. '/' .. with
end

-- Every message is written once, as it is in the end.
local set, removed, leave, join = {}, {}, {}, {}
local function note(of, tick, what)
  local list = of[tick]
  if not list then
    list = {}
    of[tick] = list
  end
  list[#list + 1] = what
end
for _, message in ipairs(order) do
  local was, is = was_deadline[message], deadline[message]
  local moved = was ~= is or was_attempt[message] ~= attempt[message]
  if moved and was and was >= pointer then note(leave, was, member(message, was_attempt[message])) end
  if moved and is then note(join, is, member(message, attempt[message])) end
  if is then
    set[#set + 1] = message
    set[#set + 1] = is .. ' ' .. attempt[message] .. ' ' .. added[message]
  elseif was then
    removed[#removed + 1] = message
  end
end
for tick, list in pairs(leave) do in_chunks('SREM', KEYS[5 + tick % lists], list) end
for tick, list in pairs(join) do in_chunks('SADD', KEYS[5 + tick % lists], list) end
in_chunks('HSET', messages, set)
in_chunks('HDEL', messages, removed)
for tick, count in pairs(acked) do redis.call('HINCRBY', ticks, 'acked:' .. tick, count) end
redis.call('HSET', KEYS[1], 'in_flight', in_flight)

-- The answer is kept, so that a sidecar whose link broke can ask what became of its last chunks.
local letters, times = table.concat(outcomes), table.concat(latencies, ',')
redis.call('HSET', link, 'chunk', number, 'answer:' .. number % 2, tick_due .. '|' .. letters .. '|' .. times)
return {'ok', tick_due, letters, times, in_flight}
