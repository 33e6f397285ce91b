-- Adds and dels of one chunk, in the order of their frames.
--
-- KEYS[3] messages   KEYS[4] ticks   KEYS[5..] the lists of deadlines: D lies in KEYS[5 + D mod lists]
-- ARGV[2] number of the chunk, one more than that of the last one applied for this link
-- ARGV[3] most messages in flight   ARGV[4] 1 if there is an add among the frames
-- ARGV[5] messages of the frames of adds that begin in this chunk, whole, and of one that goes on, those in it
-- ARGV[6] classes, of which there are at most 100: `a` add, `d` del, `w` withdraw, with ack timeout in ticks and attempt
-- ARGV[7] for each message a byte: the number of its class, from 1, and 128 more where its frame begins
-- ARGV[8] empty if no message is there twice; else for each its place among the names, from 1, in two bytes
-- ARGV[9] number of a frame of adds that goes on at the beginning, else empty
-- ARGV[10] number of the last frame of adds if it does not end in this chunk, else empty   ARGV[11] its messages, whole
-- ARGV[12..] the names of all messages, each once: `id` or `id:client`
-- Reply {'ok', tick due, outcomes, latencies, in flight}: a letter a message, and ms, comma-separated, for each `k` and `l`
--   a added  r re-armed  x refused, too many in flight
--   k acked  w withdrawn  l late, counted now  L late, counted before  u unknown
-- or {'order', number of the last chunk applied}
--
-- A message that is decided but not yet published stays in the list of its old deadline when it is added again:
-- that life ends in its batch. Its entry is the new life's.
--
-- Many messages have the same entry, since many are added in the same ms: an entry is taken apart once.
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

-- Entries of the messages by their place among the names: as they were, and as they are now.
local NAMES = 11
local was = redis.call('HMGET', messages, unpack(ARGV, NAMES + 1))
local is = {unpack(was)}

-- An entry, taken apart. Deadlines are far below 2^53.
local lives = {}
local function life_of(entry)
  local life = lives[entry]
  if not life then
    local deadline, attempt, added = string.match(entry, '^(%d+) (%d+) (%d+)$')
    deadline, added = tonumber(deadline), tonumber(added)
    life = {deadline = deadline, attempt = attempt, added = added, acked = 0, ms = tostring(math.max(0, now - added))}
    lives[entry] = life
  end
  return life
end

local classes = {}
for kind, k, attempt in string.gmatch(ARGV[6], '(%a) (%d+) (%d+)') do
  local class = {adds = kind == 'a', withdraws = kind == 'w'}
  if class.adds then class.entry = string.format('%.0f %s %.0f', tick_due + k, attempt, now) end
  classes[#classes + 1] = class
end
for i = 1, #classes do classes[128 + i] = classes[i] end

local kinds = {string.byte(ARGV[7], 1, -1)}
local places
if ARGV[8] ~= '' then
  places = {}
  for i = 1, #kinds do
    local high, low = string.byte(ARGV[8], 2 * i - 1, 2 * i)
    places[i] = high * 256 + low
  end
end

-- Whether the frame of adds that begins with message `from` is more than there is room for. Near the limit only new
-- messages are counted, as far as the whole frame is here.
local function too_many(from)
  local to = from
  while kinds[to + 1] and kinds[to + 1] < 128 do to = to + 1 end
  local whole, is_cut = to - from + 1, to == #kinds and ARGV[10] ~= ''
  if is_cut then whole = tonumber(ARGV[11]) end
  if in_flight + whole <= max_in_flight then return false end
  if is_cut then
    redis.call('HSET', link, 'refused', ARGV[10])
    return true
  end
  local fresh, seen = 0, {}
  for i = from, to do
    local place = places and places[i] or i
    if not seen[place] and not (is[place] and life_of(is[place]).deadline >= pointer) then
      fresh, seen[place] = fresh + 1, true
    end
  end
  return in_flight + fresh > max_in_flight
end

local is_near = in_flight + tonumber(ARGV[5]) > max_in_flight
local is_refused = ARGV[9] ~= '' and redis.call('HGET', link, 'refused') == ARGV[9]
local is_careful = is_near or is_refused

local outcomes, latencies, measured = {}, {}, 0
for i = 1, #kinds do
  local class, place = classes[kinds[i]], places and places[i] or i
  local entry = is[place]
  if is_careful and kinds[i] > 128 then is_refused = is_near and class.adds and too_many(i) end
  if class.adds and is_refused then
    outcomes[i] = 'x'
  elseif class.adds then
    if entry and life_of(entry).deadline >= pointer then
      outcomes[i] = 'r'
    else
      outcomes[i] = 'a'
      in_flight = in_flight + 1
    end
    is[place] = class.entry
  elseif not entry then
    outcomes[i] = 'u'
  else
    local life = lives[entry] or life_of(entry)
    local outcome
    if life.deadline >= pointer then
      outcome = class.withdraws and 'w' or 'k'
      is[place] = false
      in_flight = in_flight - 1
    elseif pointer - life.deadline - 1 >= slots then
      outcome = 'u'
    elseif class.withdraws or life.added == 0 then
      -- A late Ack counts once; a withdrawal is none.
      outcome = 'L'
    else
      outcome = 'l'
      is[place] = string.format('%.0f %s 0', life.deadline, life.attempt)
    end
    if outcome == 'k' then life.acked = life.acked + 1 end
    if outcome == 'k' or outcome == 'l' then
      measured = measured + 1
      latencies[measured] = life.ms
    end
    outcomes[i] = outcome
  end
end

-- Every message is written once, as it is in the end.
local leave, join, set, removed = {}, {}, {}, {}
local function note(of, life, message)
  local list = of[life.deadline]
  if not list then
    list = {}
    of[life.deadline] = list
  end
  list[#list + 1] = life.attempt == '1' and message or message .. '/' .. life.attempt
end
for place = 1, #was do
  local before, after = was[place], is[place]
  if before ~= after then
    local message = ARGV[NAMES + place]
    local old, new = before and life_of(before), after and life_of(after)
    if not (old and new and old.deadline == new.deadline and old.attempt == new.attempt) then
      if old and old.deadline >= pointer then note(leave, old, message) end
      if new then note(join, new, message) end
    end
    if after then
      set[#set + 1] = message
      set[#set + 1] = after
    else
      removed[#removed + 1] = message
    end
  end
end
for tick, list in pairs(leave) do in_chunks('SREM', KEYS[5 + tick % lists], list) end
for tick, list in pairs(join) do in_chunks('SADD', KEYS[5 + tick % lists], list) end
in_chunks('HSET', messages, set)
in_chunks('HDEL', messages, removed)

local acked = {}
for _, life in pairs(lives) do
  if life.acked > 0 then acked[life.deadline] = (acked[life.deadline] or 0) + life.acked end
end
for tick, count in pairs(acked) do redis.call('HINCRBY', ticks, 'acked:' .. tick, count) end
redis.call('HSET', KEYS[1], 'in_flight', in_flight)

-- The answer is kept, so that a sidecar whose link broke can ask what became of its last chunks.
local letters, times = table.concat(outcomes), table.concat(latencies, ',')
redis.call('HSET', link, 'chunk', number, 'answer:' .. number % 2, tick_due .. '|' .. letters .. '|' .. times)
return {'ok', tick_due, letters, times, in_flight}
