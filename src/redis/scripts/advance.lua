-- Moves the pointer from D to D + 1, if the caller leads. The move expires tick D and freezes its counts.
--
-- KEYS[3] lease   KEYS[4] ticks   KEYS[5] held_acks   KEYS[6..] the lists of deadlines: D lies in KEYS[6 + D mod lists]
-- ARGV[2] token   ARGV[3] epoch   ARGV[4] D   ARGV[5] ms that the leader is late by its monotonic clock
-- ARGV[6] maximum difference of two clocks in ms; with a greater difference, one of them was set
-- ARGV[7], ARGV[8] minimum number and share of timed-out messages in a storm   ARGV[9] maximum number of frozen ticks
-- ARGV[10] ms that the leader sends the request early. By its monotonic clock, the move is certainly due only this much
--   later
-- ARGV[11] ms that a request may take before it shows a stall of Redis; empty if the leader detects stalls itself
-- ARGV[12] 1 to move although messages are missing   ARGV[13] 1 to move although sidecars hold Acks
-- Reply {'moved', ms until the next move is due, ms late, 1 if this call moved the pointer, messages
--   missing}   {'wait', ms}
--   {'missing', messages} that `in_flight` counts and no list has: Redis has lost them. The pointer stays
--   {'busy'} too many frozen ticks are to be published first
--   {'held', sidecars} that have not applied all Acks of an outage yet
--   {'delayed', ms} Redis stalled so long, or its clock was set: Acks may wait, so the pointer stays
--   {'deposed', reason}   {'elsewhere', pointer}
local held = redis.call('GET', KEYS[3])
if held ~= ARGV[2] then return {'deposed', 'holder'} end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch ~= ARGV[3] then return {'deposed', 'epoch'} end

local pointer, due_ms, tick_ms, in_flight, frozen_from, catch_up, lists =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'in_flight', 'frozen_from', 'catch_up', 'lists')
local tick, late, slack, now = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), now_ms()
local uncertain = tonumber(ARGV[10]) - late
-- An earlier call moved the pointer, and its answer was lost. Redis' clock may have been set since that move.
if pointer == tick + 1 then return {'moved', tick_ms, 0, 0, 0} end
if pointer ~= tick then return {'elsewhere', pointer} end
-- The pointer never moves before `due_ms` plus one tick, since this clock gave the deadlines.
local early = due_ms + tick_ms - now
if early > 0 and (early <= slack or uncertain > 0) then
  return {'wait', math.min(early, math.max(slack, uncertain))}
end
-- If the move is late only by Redis' clock, that clock may have been set forwards: the leader waits for its own clock.
if uncertain > 0 and -early - late > slack then return {'wait', uncertain} end
if pointer + 1 - frozen_from >= tonumber(ARGV[9]) then return {'busy'} end
if ARGV[13] ~= '1' then
  local holders = redis.call('HLEN', KEYS[5])
  if holders > 0 then return {'held', holders} end
end

-- The move is later than the leader knows. Other sidecars do not know of that stall either.
if ARGV[11] ~= '' and -early - late > tonumber(ARGV[11]) then return {'delayed', -early - late} end

local next_due = due_ms + tick_ms
if early > slack then
  -- Redis' clock was set back: the leader's monotonic clock determines the time.
  next_due = now
elseif now - late > next_due + slack then
  -- Redis' clock was set forwards, or the rest of a gap shifts every deadline. Only the certain part of the lateness
  -- counts.
  next_due = now + uncertain
end
-- Adds assume that the leader catches up at most `catch_up` ticks, also if it was late by more when it sent the
-- request.
next_due = math.max(next_due, now - math.max(1, catch_up) * tick_ms)

-- Messages that no list has would never time out, and would count as in flight forever.
local function listed(deadline) return redis.call('SCARD', KEYS[6 + deadline % lists]) end
local timed_out, left = listed(tick), 0
for deadline = tick + 1, frozen_from + lists - 1 do left = left + listed(deadline) end
local missing = math.max(0, in_flight - timed_out - left)
if missing > 0 and ARGV[12] ~= '1' then return {'missing', missing} end

local acked = tonumber(redis.call('HGET', KEYS[4], 'acked:' .. tick) or '0')
local storm = timed_out > 0 and timed_out >= tonumber(ARGV[7])
  and timed_out >= tonumber(ARGV[8]) * (timed_out + acked)
-- The first write is a deletion: if Redis is out of memory, it runs a script only if the first write needs no memory.
redis.call('HDEL', KEYS[4], 'acked:' .. tick)
redis.call('HSET', KEYS[4], 'frozen:' .. tick, table.concat(
  {now, next_due, timed_out, acked, storm and 1 or 0, 0, 0}, ' '))
redis.call('HSET', KEYS[1], 'pointer', tick + 1, 'due_ms', next_due, 'in_flight', left)
return {'moved', next_due + tick_ms - now, now - next_due, 1, missing}
