-- Applies the adds and dels of one chunk, in the order of their frames.
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
-- Reply {'ok', tick due, outcomes, times, in flight}: a letter a message; in ms, comma-separated, Redis' time now, and
--   for each `k`, `w` and `l` that when it was added
--   a added  r re-armed  x refused, too many in flight
--   k acked  w withdrawn  l late, counted now  L late, counted before  u unknown
-- or {'order', number of the last chunk applied}
--
-- A message that is decided but not yet published stays in the list of its old deadline when it is added again:
-- that life ends in its batch. Its entry is the new life's.
--
-- The work for each message takes Redis' time beside its commands. So the loop over the messages calls nothing for
-- those that are new and those that are acknowledged in time, looks for the end of no list, and does not parse the
-- times at which they were added: the sidecar subtracts.
local messages, ticks, link = KEYS[3], KEYS[4], KEYS[2]
local number = tonumber(ARGV[2])
local last = tonumber(redis.call('HGET', link, 'chunk') or '0')
if number ~= last + 1 then return {'order', last} end

-- A Redis without memory refuses a script whose first write needs some. Dels free memory, and must pass.
if ARGV[4] == '0' then redis.call('HDEL', link, 'refused') end

local pointer, due_ms, tick_ms, slots, lists, in_flight, catch_up =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'slots', 'lists', 'in_flight', 'catch_up')
-- With adds, a Redis without memory must refuse the whole script, and the sidecar sends the dels again alone: after
-- their writes, which need no memory, the adds would pass.
if ARGV[4] == '1' then redis.call('HSET', KEYS[1], 'in_flight', in_flight) end
local max_in_flight, now = tonumber(ARGV[3]), now_ms()
local behind = math.floor((now - due_ms) / tick_ms)
-- A leader moves at most so many ticks at once; the other missed ticks shift every deadline. A lag below one tick is
-- always caught up.
local tick_due = pointer + math.max(0, math.min(behind, math.max(1, catch_up)))

-- Entries of the messages by their place among the names: as they were, and as they are now. Where no message is there
-- twice, both are the same table.
local NAMES = 11
local is_once = ARGV[8] == ''
local was = redis.call('HMGET', messages, unpack(ARGV, NAMES + 1))
local is = is_once and was or {unpack(was)}

-- A life has what messages of one deadline and attempt share: the writes that their names need in the end, and how
-- many were acknowledged. Deadlines are far below 2^53. An entry is taken apart once, since many messages are added in
-- the same ms.
local lives, known, added_ms = {}, {}, {}
local function life_of(entry)
  local life = known[entry]
  if life then return life end
  local key, ms = string.match(entry, '^(%d+ %d+) (%d+)$')
  -- An entry in another format does not count: it is overwritten, or left alone.
  if not key then return nil end
  life = lives[key]
  if not life then
    local deadline, attempt = string.match(key, '^(%d+) (%d+)$')
    life = {deadline = tonumber(deadline), suffix = attempt == '1' and '' or '/' .. attempt, acked = 0,
      over = {}, overs = 0, left = {}, lefts = 0, joined = {}, joins = 0}
    lives[key] = life
  end
  known[entry], added_ms[entry] = life, ms
  return life
end

local classes = {}
for kind, k, attempt in string.gmatch(ARGV[6], '(%a) (%d+) (%d+)') do
  local class = {adds = kind == 'a', withdraws = kind == 'w'}
  if class.adds then
    class.entry = string.format('%.0f %s %.0f', tick_due + k, attempt, now)
    class.life = life_of(class.entry)
  end
  classes[#classes + 1] = class
end
for i = 1, #classes do classes[128 + i] = classes[i] end

local kinds = {string.byte(ARGV[7], 1, -1)}
local places
if not is_once then
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
    local place = is_once and i or places[i]
    local life = is[place] and life_of(is[place])
    if not seen[place] and not (life and life.deadline >= pointer) then
      fresh, seen[place] = fresh + 1, true
    end
  end
  return in_flight + fresh > max_in_flight
end

local is_near = in_flight + tonumber(ARGV[5]) > max_in_flight
local is_refused = ARGV[9] ~= '' and redis.call('HGET', link, 'refused') == ARGV[9]
local is_careful = is_near or is_refused

-- Messages as they stand in the list of their deadline.
local function in_lists(life, names)
  if life.suffix == '' then return names end
  local listed = {}
  for i = 1, #names do listed[i] = names[i] .. life.suffix end
  return listed
end

-- Every message is written once, in its final state: its entry, and the lists that it leaves and joins.
local set, sets, removed = {}, 0, {}
local function write(message, before, after)
  local old, new = before and life_of(before), after and life_of(after)
  if after then
    set[sets + 1], set[sets + 2], sets = message, after, sets + 2
  else
    removed[#removed + 1] = message
  end
  if old == new then return end
  if old and old.deadline >= pointer then
    old.left[old.lefts + 1], old.lefts = message, old.lefts + 1
  end
  if new then
    new.joined[new.joins + 1], new.joins = message, new.joins + 1
  end
end

local outcomes, times, measured = {}, {string.format('%.0f', now)}, 1
for i = 1, #kinds do
  local class, place = classes[kinds[i]], is_once and i or places[i]
  local entry = is[place]
  local life = entry and (known[entry] or life_of(entry))
  local outcome, after = 'u', entry
  if is_careful and kinds[i] > 128 then is_refused = is_near and class.adds and too_many(i) end
  if class.adds and is_refused then
    outcome = 'x'
  elseif class.adds then
    outcome, after = 'r', class.entry
    if not (life and life.deadline >= pointer) then
      outcome, in_flight = 'a', in_flight + 1
    end
  elseif life and life.deadline >= pointer then
    outcome, after, in_flight = 'w', false, in_flight - 1
    if not class.withdraws then
      outcome, life.acked = 'k', life.acked + 1
    end
  elseif life and pointer - life.deadline - 1 < slots then
    -- A late Ack counts once; a late withdrawal does not count.
    outcome = 'L'
    if not class.withdraws and added_ms[entry] ~= '0' then
      outcome, after = 'l', string.match(entry, '^%d+ %d+ ') .. '0'
    end
  end
  if outcome == 'k' or outcome == 'l' or outcome == 'w' then
    measured = measured + 1
    times[measured] = added_ms[entry]
  end
  outcomes[i] = outcome
  if after ~= entry then
    local message = ARGV[NAMES + place]
    if not is_once then
      is[place] = after
    elseif not entry then
      local new, n = class.life, class.life.joins + 1
      new.joined[n], new.joins = message, n
      set[sets + 1], set[sets + 2], sets = message, after, sets + 2
    elseif not after then
      local n = life.overs + 1
      life.over[n], life.overs = message, n
    else
      write(message, entry, after)
    end
  end
end
if not is_once then
  for place = 1, #was do
    if was[place] ~= is[place] then write(ARGV[NAMES + place], was[place], is[place]) end
  end
end

-- First the writes that free memory. If Redis refuses one of these, the earlier ones stay: then a message that is in no
-- list any more still has its entry, so that a repeated DelMsg is correct.
for _, life in pairs(lives) do
  local list = KEYS[5 + life.deadline % lists]
  in_chunks('SREM', list, in_lists(life, life.over))
  in_chunks('SREM', list, in_lists(life, life.left))
  in_chunks('HDEL', messages, life.over)
end
in_chunks('HDEL', messages, removed)
for _, life in pairs(lives) do
  in_chunks('SADD', KEYS[5 + life.deadline % lists], in_lists(life, life.joined))
end
in_chunks('HSET', messages, set)
redis.call('HSET', KEYS[1], 'in_flight', in_flight)
for _, life in pairs(lives) do
  if life.acked > 0 then redis.call('HINCRBY', ticks, 'acked:' .. life.deadline, life.acked) end
end

-- The answer is kept for a sidecar whose connection broke. Chunk numbers repeat after Redis lost writes, generations do
-- not: together they name one chunk.
local letters = table.concat(outcomes)
times = table.concat(times, ',')
redis.call('HSET', link, 'chunk', number, 'answer:' .. number % 2,
  table.concat({ARGV[1], number, tick_due, letters, times}, '|'))
return {'ok', tick_due, letters, times, in_flight}
