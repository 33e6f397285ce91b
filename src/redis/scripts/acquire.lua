-- Takes the lease with SET NX under the candidate's token, and begins a new epoch, a number that grows with each
-- election. The end of the lease stands in `meta`. If another sidecar holds the lease, reports that lease instead. A
-- leader calls this script again if its connection was replaced, or if the answer was lost. Then the leader gets a new
-- epoch.
--
-- `due_ms` is the time, in ms by Redis' clock, at which the pointer was due at its tick. Deadlines count from this
-- time.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] lease: the token of the leader
-- KEYS[4] candidates: the token of each candidate, the number of rings that it leads, and its name
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] token of the candidate
-- ARGV[3] name of the candidate
-- ARGV[4] length of the lease in ms
-- ARGV[5] the pointer that the candidate saw last
-- ARGV[6] ms for which the candidate has observed ARGV[5] and ARGV[15] unchanged, by its monotonic clock
-- ARGV[7] 1 if the candidate did not lead before and has not polled the lease lately on this connection, else 0
-- ARGV[8] the highest epoch that the candidate has seen
-- ARGV[9] token of a lease that its holder does not renew: this script deletes that lease; empty if there is none
-- ARGV[10] number of renewals that the candidate saw of the lease in ARGV[9]; empty if there is none
-- ARGV[11] ms for which the pointer must still wait after an outage that the candidate saw
-- ARGV[12] the grace time: ms for which the pointer waits for Acks after any outage
-- ARGV[13] maximum difference of two clocks in ms; with a greater difference, one of them was set
-- ARGV[14] number of rings that the candidate leads, and its name; empty if the candidate should get no ring from the
--   leader
-- ARGV[15] the `due_ms` that the candidate saw last
-- Replies:
--   {'won', epoch, pointer, ms until the next move of the pointer is due, ms by which every deadline is shifted}
--   {'held', token of the holder, number of renewals, pointer, name of the leader, length of its lease in ms, epoch,
--     `due_ms`, ms since `due_ms` (negative before it)}: another sidecar leads; an unknown name or length is empty
local pointer, due_ms, tick_ms, epoch, catch_up =
  numbers(KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'epoch', 'catch_up')
local holder, _, now, renewals = lease_state(KEYS[3])
if holder and holder == ARGV[9] and renewals == ARGV[10] then holder = false end
if holder and holder ~= ARGV[2] then
  -- If Redis cannot write, this announcement fails and the leader does not see this candidate. The script goes on,
  -- because the candidate needs the reply.
  if ARGV[14] ~= '' then redis.pcall('HSET', KEYS[4], ARGV[2], ARGV[14]) end
  local leader, lease_ms = unpack(redis.call('HMGET', KEYS[1], 'leader', 'lease_ms'))
  return {'held', holder, renewals, pointer, leader or '', lease_ms or '', epoch, due_ms, now - due_ms}
end

local wait, grace, slack, shifted_ms = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13]), 0
-- The first write deletes the previous lease. If Redis is out of memory, it runs a script only if the first write needs
-- no memory. The election must not fail, because the work of a leader frees memory.
redis.call('DEL', KEYS[3])
redis.call('SET', KEYS[3], ARGV[2], 'NX')
if holder then
  -- The caller leads already. If the answer of its previous election was lost, the shift in that answer was lost too.
  -- So this answer reports the shift again, unless the pointer has moved since.
  local elected_at, unreported_ms = unpack(redis.call('HMGET', KEYS[1], 'elected_at', 'shifted_ms'))
  if tonumber(elected_at) == pointer then shifted_ms = tonumber(unreported_ms) end
else
  redis.call('DEL', KEYS[4])
end
epoch = math.max(epoch + 1, now, tonumber(ARGV[8]) + 1)
redis.call('HSET', KEYS[1], 'epoch', epoch, 'leader', ARGV[3], 'lease_ms', ARGV[4], 'acquired_ms', now,
  'lease_until', now + ARGV[4])

-- `gap` is the time since `due_ms`, by Redis' clock. Below one tick the gap needs no correction. Otherwise the leader
-- catches up missed ticks, and the rest of the gap shifts every deadline. The time to catch up is the minimum of the
-- gap, the candidate's observation `own`, and the limit `catch_up`. The observation counts only if no election has
-- shifted `due_ms` since it began. Later adds count from the shifted time. With an older observation, their messages
-- would time out too early if Redis' clock was set forwards. A candidate that has not polled lately cannot tell whether
-- there was an outage. So the pointer waits for Acks that may still arrive.
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

-- If `due_ms` is in the future by at most the grace time, the previous leader was waiting for Acks, and the wait
-- continues. If Redis' clock was set back by at most the grace time, the pointer waits in the same way.
local ahead = due_ms - now
if ahead > 0 and ahead <= grace then wait = math.max(wait, ahead) end

-- The next move is due one tick after `due_ms`. If that is less than `wait` ms from now, the move is put off until
-- then, and every deadline shifts. `wait` counts from now, because Redis may run an older request only after an outage.
local waited_ms = now + wait - tick_ms - due_ms
if wait > 0 and waited_ms > 0 then due_ms, shifted_ms = due_ms + waited_ms, shifted_ms + waited_ms end
redis.call('HSET', KEYS[1], 'due_ms', due_ms, 'elected_at', pointer, 'shifted_ms', shifted_ms)
return {'won', epoch, pointer, math.min(due_ms - now, wait) + tick_ms, shifted_ms}
