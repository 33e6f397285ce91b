-- Moves the pointer from D to D + 1, if the caller leads: that decides tick D and freezes its counts.
--
-- KEYS[3] lease   KEYS[4] ticks   KEYS[5] held_acks   KEYS[6..] the lists of deadlines: D lies in KEYS[6 + D mod lists]
-- ARGV[2] token   ARGV[3] epoch   ARGV[4] D   ARGV[5] ms that the leader is late by its monotonic clock
-- ARGV[6] ms that clocks may differ before a clock counts as set
-- ARGV[7], ARGV[8] least number and share of a storm   ARGV[9] most frozen ticks
-- ARGV[10] ms that the leader asks ahead: by its monotonic clock the move is due for certain only so much later
-- ARGV[11] ms that a request may take before it shows a stall of Redis; empty if the leader knows of stalls itself
-- ARGV[12] 1 if it moves although messages are missing   ARGV[13] 1 if it moves although sidecars hold Acks
-- Reply {'moved', ms until the next move is due, ms late, 1 if it was now, messages missing}   {'wait', ms}
--   {'missing', messages} that count as in flight and are in no list: Redis has lost it. Nothing is decided
--   {'busy'} too much is to be published first
--   {'held', sidecars} that have yet to apply Acks that they held in an outage
--   {'delayed', ms} Redis stalled for so long, or its clock was set: Acks may wait, nothing is decided
--   {'deposed', what}   {'elsewhere', pointer}
local held = redis.call('GET', KEYS[3])
if held ~= ARGV[2] then return {'deposed', 'holder'} end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch ~= ARGV[3] then return {'deposed', 'epoch'} end

local pointer, due_ms, tick_ms, in_flight, frozen_from, catch_up, lists =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'in_flight', 'frozen_from', 'catch_up', 'lists')
local tick, late, slack, now = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), now_ms()
local uncertain = tonumber(ARGV[10]) - late
-- It has moved already, and the answer was lost. Only Redis' clock has the time of that, and it may have been set
-- since.
if pointer == tick + 1 then return {'moved', tick_ms, 0, 0, 0} end
if pointer ~= tick then return {'elsewhere', pointer} end
-- Never before its time: deadlines were given by this clock.
local early = due_ms + tick_ms - now
if early > 0 and (early <= slack or uncertain > 0) then
  return {'wait', math.min(early, math.max(slack, uncertain))}
end
-- It is late by Redis' clock alone, which may have been set forwards: the leader waits until its own clock is certain.
if uncertain > 0 and -early - late > slack then return {'wait', uncertain} end
if pointer + 1 - frozen_from >= tonumber(ARGV[9]) then return {'busy'} end
if ARGV[13] ~= '1' then
  local holders = redis.call('HLEN', KEYS[5])
  if holders > 0 then return {'held', holders} end
end

-- The pointer is later than the leader knows: other sidecars do not know of that time either.
if ARGV[11] ~= '' and -early - late > tonumber(ARGV[11]) then return {'delayed', -early - late} end

local next_due = due_ms + tick_ms
if early > slack then
  -- Redis' clock was set back: the leader's monotonic time decides.
  next_due = now
elseif now - late > next_due + slack then
  -- It was set forwards, or the rest of a gap shifts every deadline. How late it is for certain counts.
  next_due = now + uncertain
end
-- Adds assume that no more than these are caught up, also if the leader knew of more when it asked.
next_due = math.max(next_due, now - math.max(1, catch_up) * tick_ms)

-- Messages in no list would never time out, and count as in flight forever.
local function listed(deadline) return redis.call('SCARD', KEYS[6 + deadline % lists]) end
local timed_out, left = listed(tick), 0
for deadline = tick + 1, frozen_from + lists - 1 do left = left + listed(deadline) end
local missing = math.max(0, in_flight - timed_out - left)
if missing > 0 and ARGV[12] ~= '1' then return {'missing', missing} end

local acked = tonumber(redis.call('HGET', KEYS[4], 'acked:' .. tick) or '0')
local storm = timed_out > 0 and timed_out >= tonumber(ARGV[7])
  and timed_out >= tonumber(ARGV[8]) * (timed_out + acked)
-- The deletion comes first: a Redis without memory lets a script finish whose first write needs none.
redis.call('HDEL', KEYS[4], 'acked:' .. tick)
redis.call('HSET', KEYS[4], 'frozen:' .. tick, table.concat(
  {now, next_due, timed_out, acked, storm and 1 or 0, 0, 0}, ' '))
redis.call('HSET', KEYS[1], 'pointer', tick + 1, 'due_ms', next_due, 'in_flight', left)
return {'moved', next_due + tick_ms - now, now - next_due, 1, missing}
