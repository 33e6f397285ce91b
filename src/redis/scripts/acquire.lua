-- Takes the lease with SET NX PX under the candidate's token, and begins a new epoch. A leader whose connection was
-- replaced, or whose answer was lost, calls this script again and gets a new epoch.
--
-- KEYS[3] lease   KEYS[4] candidates
-- ARGV[2] token   ARGV[3] name of the sidecar   ARGV[4] lease in ms
-- ARGV[5] the pointer that the candidate last saw   ARGV[15] its `due_ms`
-- ARGV[6] ms for which the candidate has observed that pointer, by its monotonic clock
-- ARGV[7] 1 if the candidate has not polled lately in this session of its link   ARGV[8] highest epoch that it knows
-- ARGV[9], ARGV[10] token and renewals of a lease that its leader does not renew, to be deleted; empty without one
-- ARGV[11] ms that the pointer must still wait after an outage that the candidate saw
-- ARGV[12] ms that the pointer waits after any outage   ARGV[13] ms that two clocks may differ
-- ARGV[14] number of rings that the candidate leads, and its name; empty if the leader is not to see this candidate
-- Reply {'won', epoch, pointer, ms until the next move is due, ms by which every deadline is shifted}
--   {'held', token, renewals, pointer, name of the leader, its lease in ms (both empty if unknown), epoch, `due_ms`, ms
--   since then (negative before it)}
local pointer, due_ms, tick_ms, epoch, catch_up =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'epoch', 'catch_up')
local renewals = redis.call('HGET', KEYS[1], 'renewals') or '0'
local holder = redis.call('GET', KEYS[3])
if holder and holder == ARGV[9] and renewals == ARGV[10] then
  redis.call('DEL', KEYS[3])
  holder = false
end
if holder and holder ~= ARGV[2] then
  -- If Redis cannot write, the leader does not see this candidate. The holder stays the leader.
  if ARGV[14] ~= '' then redis.pcall('HSET', KEYS[4], ARGV[2], ARGV[14]) end
  local leader, lease_ms = unpack(redis.call('HMGET', KEYS[1], 'leader', 'lease_ms'))
  return {'held', holder, renewals, pointer, leader or '', lease_ms or '', epoch, due_ms, now_ms() - due_ms}
end

local now, wait, grace, slack, shifted_ms = now_ms(), tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13]), 0
if holder then
  -- The answer of the previous election may be lost with its shift. The answer of this election reports that shift
  -- again.
  redis.call('PEXPIRE', KEYS[3], ARGV[4])
  local elected_at, unreported_ms = unpack(redis.call('HMGET', KEYS[1], 'elected_at', 'shifted_ms'))
  if tonumber(elected_at) == pointer then shifted_ms = tonumber(unreported_ms) end
else
  -- If Redis is out of memory, it runs a script only if the first write needs no memory. The election must succeed
  -- then too, because the work of a leader frees memory.
  redis.call('HDEL', KEYS[2], '')
  redis.call('SET', KEYS[3], ARGV[2], 'NX', 'PX', ARGV[4])
  redis.call('DEL', KEYS[4])
end
epoch = math.max(epoch + 1, now, tonumber(ARGV[8]) + 1)
redis.call('HSET', KEYS[1], 'epoch', epoch, 'leader', ARGV[3], 'lease_ms', ARGV[4], 'acquired_ms', now)

-- The number of missed ticks to catch up is the minimum of three: Redis' time, the candidate's time, and the limit. The
-- candidate's time counts only if no election has shifted `due_ms` since: adds count from the shifted `due_ms`, and
-- Redis' clock may have been set after those adds. The rest of the gap shifts every deadline. A gap below one tick is
-- ignored. A candidate that has not polled lately cannot tell whether there was an outage, so it waits for Acks that
-- may still arrive.
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

-- A `due_ms` in the future means that the previous leader was waiting for Acks: the wait continues. A clock that was
-- set back by at most the grace time looks the same.
local ahead = due_ms - now
if ahead > 0 and ahead <= grace then wait = math.max(wait, ahead) end

-- The pointer waits also if the candidate requested the election before the outage and Redis ran it afterwards.
local waited_ms = now + wait - tick_ms - due_ms
if wait > 0 and waited_ms > 0 then due_ms, shifted_ms = due_ms + waited_ms, shifted_ms + waited_ms end
redis.call('HSET', KEYS[1], 'due_ms', due_ms, 'elected_at', pointer, 'shifted_ms', shifted_ms)
return {'won', epoch, pointer, math.min(due_ms - now, wait) + tick_ms, shifted_ms}
