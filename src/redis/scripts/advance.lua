-- Moves the pointer from tick D to D + 1, if the caller leads and nothing requires a wait. The move expires tick D: its
-- messages time out, and its counts become final (`frozen`). Redis' clock or the leader's clock may have been set, so
-- the script compares both.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] lease: the token of the leader
-- KEYS[4] ticks: `acked:D`, the number of Acks of an open tick; `frozen:D`, the counts of an expired tick
-- KEYS[5] held_acks: the sidecars that have not yet applied all Acks that they held in an outage
-- KEYS[6..] the lists: a Redis SET of messages for each deadline; deadline T has KEYS[6 + T mod number of lists]
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] token of the caller
-- ARGV[3] epoch of the caller
-- ARGV[4] D
-- ARGV[5] ms from the planned time of this request until the leader sent it, by the leader's monotonic clock
-- ARGV[6] maximum difference of two clocks in ms; with a greater difference, one of them was set
-- ARGV[7] minimum number of timed-out messages in a storm, that is, a tick with unusually many timeouts
-- ARGV[8] minimum share of timed-out messages in a storm
-- ARGV[9] number of frozen ticks that the move must not reach
-- ARGV[10] ms from the planned time of this request until the move is certainly due, by the leader's clock. Above 0 if
--   Redis is far, because the leader sends the request early
-- ARGV[11] maximum ms by which the move may be later than the leader knew; a greater delay shows a stall of Redis;
--   empty if the leader has put the move off itself
-- ARGV[12] 1 to move although Redis has lost messages, else 0
-- ARGV[13] 1 to move although sidecars hold Acks, else 0
-- Replies:
--   {'moved', ms until the next move is due, ms by which this move was late, 1 or 0, number of lost messages}: 1 if
--     this call moved the pointer, 0 if an earlier call did
--   {'wait', ms until the move is due}
--   {'missing', number of messages that count in `in_flight` and are in no list}: Redis has lost lists
--   {'busy'}: some frozen ticks must be published first
--   {'held', number of sidecars that still hold Acks of an outage}
--   {'delayed', ms of the delay}: Redis stalled, or its clock was set. Acks may wait in sidecars, so the pointer stays
--   {'deposed', 'holder'}: the caller does not hold the lease
--   {'deposed', 'epoch'}: the caller's epoch is not the current one
--   {'elsewhere', pointer}: the pointer is neither at D nor at D + 1
local holder, epoch, now = lease_state(KEYS[3])
if holder ~= ARGV[2] then return {'deposed', 'holder'} end
if epoch ~= ARGV[3] then return {'deposed', 'epoch'} end

local pointer, due_ms, tick_ms, in_flight, frozen_from, catch_up, lists =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'in_flight', 'frozen_from', 'catch_up', 'lists')
local tick, late, slack = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local uncertain = tonumber(ARGV[10]) - late
-- An earlier call moved the pointer, and its answer was lost. The next move is due in one tick from now, because Redis'
-- clock may have been set since the earlier call.
if pointer == tick + 1 then return {'moved', tick_ms, 0, 0, 0} end
if pointer ~= tick then return {'elsewhere', pointer} end
-- Deadlines count by Redis' clock, so the pointer does not move before `due_ms` plus one tick. There is one exception:
-- Redis' clock was set back by more than `slack`, and the move is certainly due by the leader's clock.
local early = due_ms + tick_ms - now
if early > 0 and (early <= slack or uncertain > 0) then
  return {'wait', math.min(early, math.max(slack, uncertain))}
end
-- If the move is late by Redis' clock but not yet certainly due by the leader's clock, Redis' clock may have been set
-- forwards. Then the leader's clock counts.
if uncertain > 0 and -early - late > slack then return {'wait', uncertain} end
if pointer + 1 - frozen_from >= tonumber(ARGV[9]) then return {'busy'} end
if ARGV[13] ~= '1' then
  local holders = redis.call('HLEN', KEYS[5])
  if holders > 0 then return {'held', holders} end
end

-- The move is later than the leader knew when it sent the request, so Redis may have stalled. Other sidecars may then
-- have Acks that Redis has not applied.
if ARGV[11] ~= '' and -early - late > tonumber(ARGV[11]) then return {'delayed', -early - late} end

local next_due = due_ms + tick_ms
if early > slack then
  -- Redis' clock was set back. By the leader's clock the move is due, so the tick begins now.
  next_due = now
elseif now - late > next_due + slack then
  -- The move is later by Redis' clock than by the leader's clock. Redis' clock was set forwards, or the leader skipped
  -- missed ticks, which shifts every deadline. So only the time since the move was certainly due, by the leader's
  -- clock, counts as lateness.
  next_due = now + uncertain
end
-- Adds compute deadlines on the assumption that the pointer lags by at most `catch_up` ticks, or one tick if `catch_up`
-- is 0. A greater lag shifts every deadline.
next_due = math.max(next_due, now - math.max(1, catch_up) * tick_ms)

-- `missing` counts messages that are in no list. Such messages would never time out, and would count as in flight
-- forever.
local function listed(deadline) return redis.call('SCARD', KEYS[6 + deadline % lists]) end
local timed_out, left = listed(tick), 0
for deadline = tick + 1, frozen_from + lists - 1 do left = left + listed(deadline) end
local missing = math.max(0, in_flight - timed_out - left)
if missing > 0 and ARGV[12] ~= '1' then return {'missing', missing} end

local acked = tonumber(redis.call('HGET', KEYS[4], 'acked:' .. tick) or '0')
local storm = timed_out > 0 and timed_out >= tonumber(ARGV[7])
  and timed_out >= tonumber(ARGV[8]) * (timed_out + acked)
-- If Redis is out of memory, it runs a script only if the first write needs no memory. So the first write is a
-- deletion.
redis.call('HDEL', KEYS[4], 'acked:' .. tick)
redis.call('HSET', KEYS[4], 'frozen:' .. tick, table.concat(
  {now, next_due, timed_out, acked, storm and 1 or 0, 0, 0}, ' '))
redis.call('HSET', KEYS[1], 'pointer', tick + 1, 'due_ms', next_due, 'in_flight', left)
return {'moved', next_due + tick_ms - now, now - next_due, 1, missing}
