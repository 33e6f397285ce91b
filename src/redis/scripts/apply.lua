-- Applies the adds and dels of one chunk, in order. A frame is one request: an add or a del of one or more messages. A
-- chunk is the part of a sidecar's frames that one call applies. A frame may begin in one chunk and continue in the
-- next.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the sidecar's connection, with the last chunk and the last two answers
-- KEYS[3] messages: the name of each message, and its entry: deadline, number of the attempt, time of the add in ms
-- KEYS[4] ticks: `acked:T`, the number of Acks of each open tick T
-- KEYS[5..] the lists: a Redis SET of messages for each deadline; deadline T has KEYS[5 + T mod number of lists]
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] number of the chunk; must be the number of the last chunk applied for this sidecar, plus one
-- ARGV[3] maximum number of messages in flight
-- ARGV[4] 1 if the chunk contains an add, else 0
-- ARGV[5] number of messages to add, for the check of ARGV[3]. Of a frame that begins here, all messages count, also
--   those in later chunks. Of a frame that began earlier, only the messages in this chunk count
-- ARGV[6] the classes, at most 100. A class is a kind, an ack timeout in ticks, and an attempt. The kinds are `a` add,
--   `d` del, `w` withdraw
-- ARGV[7] one byte for each message: the number of its class, from 1, plus 128 if the message is the first of its frame
-- ARGV[8] empty if each message occurs once; else two bytes for each message: the position of its name in ARGV[12..],
--   from 1
-- ARGV[9] number of the add frame that began earlier and continues here; empty if there is none
-- ARGV[10] number of the last add frame if it begins here and continues in the next chunk, else empty
-- ARGV[11] number of messages of the whole frame in ARGV[10], else 0
-- ARGV[12..] the name of each message, once: `id` or `id:client`
-- Replies:
--   {'ok', tick due, outcomes, times, number of messages in flight}
--   {'order', number of the last chunk applied}: nothing was applied, because ARGV[2] is not the next number
-- `outcomes` is one letter for each message:
--   a added   r added again while in flight   x refused, too many in flight   k acknowledged   w withdrawn
--   l late, counted now   L late, not counted   u unknown
-- `times` is a comma-separated list in ms: Redis' time now, then the time of the add for each outcome `k`, `w` or `l`.
--
-- A message whose tick has expired and is not yet published may be added again. The message stays in the list of the
-- old deadline until the batch of that tick is published. Its entry already has the new deadline.
--
-- Every add and del runs through this script, so it must be fast. The loop over the messages calls no function for new
-- messages and timely Acks, and does not compute the length of a table. The script does not parse the times of adds,
-- since the sidecar computes the latencies.
local messages, ticks, link = KEYS[3], KEYS[4], KEYS[2]
local number = tonumber(ARGV[2])
local last = tonumber(redis.call('HGET', link, 'chunk') or '0')
if number ~= last + 1 then return {'order', last} end

-- If Redis is out of memory, it refuses a script whose first write needs memory. Dels free memory, so Redis must run a
-- chunk of dels. Its first write therefore is a deletion.
if ARGV[4] == '0' then redis.call('HDEL', link, 'refused') end

local pointer, due_ms, tick_ms, slots, lists, in_flight, catch_up =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'slots', 'lists', 'in_flight', 'catch_up')
-- If Redis is out of memory, it must refuse a chunk with adds as a whole. So the first write of such a chunk needs
-- memory. If the deletions came first, Redis would also run the adds. After a refusal the sidecar sends the dels alone.
if ARGV[4] == '1' then redis.call('HSET', KEYS[1], 'in_flight', in_flight) end
local max_in_flight, now = tonumber(ARGV[3]), now_ms()
local behind = math.floor((now - due_ms) / tick_ms)
-- The tick due is the tick that the pointer will reach by catching up. A leader catches up at most `catch_up` ticks, or
-- one tick if `catch_up` is 0. Further missed ticks shift every deadline.
local tick_due = pointer + math.max(0, math.min(behind, math.max(1, catch_up)))

-- The entries of the messages, in the order of their names: `was` before this chunk, `is` after the messages processed
-- so far. If each message occurs once, both are the same table.
local NAMES = 11
local is_once = ARGV[8] == ''
local was = redis.call('HMGET', messages, unpack(ARGV, NAMES + 1))
local is = is_once and was or {unpack(was)}

-- A `life` is a table for all messages of one deadline and attempt. It collects the writes to the list of that
-- deadline, and counts Acks. Deadlines are far below 2^53, so a Lua number is exact. Each distinct entry is parsed
-- once, since many messages are added in the same ms.
local lives, known, added_ms = {}, {}, {}
local function life_of(entry)
  local life = known[entry]
  if life then return life end
  local key, ms = string.match(entry, '^(%d+ %d+) (%d+)$')
  -- An entry in another format counts as missing: an add overwrites it, and a del does not change it.
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

-- Returns whether the add frame whose first message is number `from` would exceed the limit of messages in flight. If
-- the frame continues in the next chunk, all its messages count, and the function records a refusal in `link` for the
-- later chunks. If the frame ends in this chunk, only messages that are not yet in flight count.
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

-- Returns the members of a list that stand for `names`. An attempt above 1 is a suffix of the name.
local function in_lists(life, names)
  if life.suffix == '' then return names end
  local listed = {}
  for i = 1, #names do listed[i] = names[i] .. life.suffix end
  return listed
end

-- Collects the writes for a message whose entry changes from `before` to `after`: to its entry, and to the lists of the
-- old and the new deadline. Must be called at most once per message.
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
    -- Only the first late Ack of a message counts. It sets the time of the add to 0 as a mark. A late withdrawal does
    -- not count.
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

-- The writes that free memory come first. If Redis refuses a write, the earlier writes stay. So members of lists are
-- removed before entries. If Redis then refuses to remove an entry, a repeated DelMsg still finds the entry and gets
-- the correct outcome.
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

-- The key `link` keeps the answer, so that a sidecar whose connection broke can read it later. After Redis lost writes,
-- chunk numbers repeat, but generations do not. Generation and number together identify one chunk.
local letters = table.concat(outcomes)
times = table.concat(times, ',')
redis.call('HSET', link, 'chunk', number, 'answer:' .. number % 2,
  table.concat({ARGV[1], number, tick_due, letters, times}, '|'))
return {'ok', tick_due, letters, times, in_flight}
