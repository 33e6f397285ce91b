-- Refuses writes of a connection that the sidecar has replaced, and defines functions for all scripts. Redis gets this
-- file in front of every script that writes, except `open.lua`.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the sidecar's connection, with the generation of the newest connection
-- ARGV[1] generation of the connection that sends the script, as `open.lua` returned it
-- Reply {'stale'}: the sidecar has registered a newer connection, or the ring no longer exists. Otherwise the script
--   continues
if redis.call('HGET', KEYS[2], 'generation') ~= ARGV[1] or redis.call('EXISTS', KEYS[1]) == 0 then
  return {'stale'}
end

-- Returns Redis' time in whole ms, rounded down.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Returns the values of fields of a hash as numbers, in the order of the arguments.
local function numbers(key, ...)
  local found = redis.call('HMGET', key, ...)
  for i = 1, #found do found[i] = tonumber(found[i]) end
  return unpack(found)
end

-- Returns the token of the leader (false if no sidecar holds the lease), the epoch of the last election, Redis' time in
-- ms, and the number of renewals. The lease ends at `lease_until`, by Redis' clock. Its key has no TTL, because some
-- eviction policies delete keys with one.
local function lease_state(lease)
  local epoch, lease_until, renewals = unpack(redis.call('HMGET', KEYS[1], 'epoch', 'lease_until', 'renewals'))
  local now = now_ms()
  return (tonumber(lease_until) or 0) > now and redis.call('GET', lease), epoch, now, renewals or '0'
end

-- Calls a command with all values of a list, at most 4,000 in one call. `unpack` fails with about 8,000 values.
local function in_chunks(command, key, list)
  for first = 1, #list, 4000 do
    redis.call(command, key, unpack(list, first, math.min(first + 3999, #list)))
  end
end
