-- Refuses a late write of a dead connection, and defines functions for all scripts. Precedes every script that writes.
--
-- KEYS[1] meta   KEYS[2] link of the sidecar
-- ARGV[1] generation of the link, as `open` returned it
-- Reply {'stale'} if the sidecar has connected again since, or the ring no longer exists
if redis.call('HGET', KEYS[2], 'generation') ~= ARGV[1] or redis.call('EXISTS', KEYS[1]) == 0 then
  return {'stale'}
end

-- Returns Redis' time in whole ms, rounded down.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Returns numeric fields of a hash, in the order of the arguments.
local function numbers(key, ...)
  local found = redis.call('HMGET', key, ...)
  for i = 1, #found do found[i] = tonumber(found[i]) end
  return unpack(found)
end

-- Calls a variadic command in chunks, since `unpack` fails with about 8,000 values.
local function in_chunks(command, key, list)
  for first = 1, #list, 4000 do
    redis.call(command, key, unpack(list, first, math.min(first + 3999, #list)))
  end
end
