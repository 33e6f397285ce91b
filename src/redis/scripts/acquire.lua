-- Takes the lease: SET NX PX with the candidate's token, then a new epoch. A leader whose connection was replaced, or
-- whose answer was lost, is elected again: each won election has an epoch of its own.
--
-- KEYS[3] lease   KEYS[4] candidates
-- ARGV[2] token   ARGV[3] name of the sidecar   ARGV[4] lease in ms
-- ARGV[5] the pointer that the candidate has seen, due at ARGV[15], and ARGV[6] for how many ms by its monotonic clock
-- ARGV[7] 1 if it has not polled lately, in this session of its link   ARGV[8] highest epoch that the candidate knows
-- ARGV[9], ARGV[10] token and renewals of a lease that is not renewed and is to be deleted; empty without one
-- ARGV[11] ms that the pointer has yet to wait after an outage that the candidate knows of
-- ARGV[12] ms that it waits after one   ARGV[13] ms that clocks may differ
-- ARGV[14] how many rings the candidate leads, and its name, for the leader; empty if it does not announce itself
-- Reply {'won', epoch, pointer, ms until the next move is due, ms by which every deadline is shifted}
--   {'held', token, renewals, pointer, name of the leader, its lease in ms, or empty if unknown, epoch, when the
--   pointer was due in ms, and how many ms ago that was; negative if it is due only then}
local pointer, due_ms, tick_ms, epoch, catch_up =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'epoch', 'catch_up')
local renewals = redis.call('HGET', KEYS[1], 'renewals') or '0'
local holder = redis.call('GET', KEYS[3])
if holder and holder == ARGV[9] and renewals == ARGV[10] then
  redis.call('DEL', KEYS[3])
  holder = false
end
if holder and holder ~= ARGV[2] then
  -- If nothing can be written, the leader does not learn of this candidate, and still leads.
  if ARGV[14] ~= '' then redis.pcall('HSET', KEYS[4], ARGV[2], ARGV[14]) end
  local leader, lease_ms = unpack(redis.call('HMGET', KEYS[1], 'leader', 'lease_ms'))
  return {'held', holder, renewals, pointer, leader or '', lease_ms or '', epoch, due_ms, now_ms() - due_ms}
end

local now, wait, grace, slack, shifted_ms = now_ms(), tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13]), 0
if holder then
  -- The shift of an election whose answer was lost is reported with the first move after this one.
  redis.call('PEXPIRE', KEYS[3], ARGV[4])
  local elected_at, unreported_ms = unpack(redis.call('HMGET', KEYS[1], 'elected_at', 'shifted_ms'))
  if tonumber(elected_at) == pointer then shifted_ms = tonumber(unreported_ms) end
else
  -- A Redis without memory lets a script finish whose first write needs none; a leader is what frees some.
  redis.call('HDEL', KEYS[2], '')
  redis.call('SET', KEYS[3], ARGV[2], 'NX', 'PX', ARGV[4])
  redis.call('DEL', KEYS[4])
end
epoch = math.max(epoch + 1, now, tonumber(ARGV[8]) + 1)
redis.call('HSET', KEYS[1], 'epoch', epoch, 'leader', ARGV[3], 'lease_ms', ARGV[4], 'acquired_ms', now)

-- Missed ticks: the minimum of Redis' time, the candidate's own, and the bound. The candidate's own counts only if no
-- election has delayed the pointer since: adds count from its due time, and Redis' clock may have been set after them.
-- The rest of the gap shifts every deadline. A gap below a tick is ignored. A candidate that has not polled lately
-- cannot know whether Redis or all sidecars were unreachable: Acks may arrive only now.
local gap = now - due_ms
if gap >= tick_ms then
  local own = 0
  if tonumber(ARGV[5]) == pointer and tonumber(ARGV[15]) == due_ms then own = tonumber(ARGV[6]) end
  if ARGV[7] == '1' then wait = math.max(wait, grace) end
  local shift = math.max(0, gap - math.min(own, catch_up * tick_ms))
  due_ms, shifted_ms = due_ms + shift, shifted_ms + shift
elseif gap < -math.max(slack, grace) then
  due_ms = now
end

-- The previous leader waits for Acks, or this one did before its connection was replaced: the wait continues. Or the
-- clock was set back, by no more than that.
local ahead = due_ms - now
if ahead > 0 and ahead <= grace then wait = math.max(wait, ahead) end

-- Also if the election was requested before the outage and Redis ran it afterwards.
local waited_ms = now + wait - tick_ms - due_ms
if wait > 0 and waited_ms > 0 then due_ms, shifted_ms = due_ms + waited_ms, shifted_ms + waited_ms end
redis.call('HSET', KEYS[1], 'due_ms', due_ms, 'elected_at', pointer, 'shifted_ms', shifted_ms)
return {'won', epoch, pointer, math.min(due_ms - now, wait) + tick_ms, shifted_ms}
