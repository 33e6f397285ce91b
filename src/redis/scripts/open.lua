-- Registers a new connection of a sidecar, and creates the ring if it does not exist. Gives the connection a
-- generation, a number that grows with each connection. Every other script that writes refuses a call that has an older
-- generation.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the sidecar's connection: generation, last chunk of requests, last two answers
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] held_acks: the sidecars that have not yet applied all Acks that they held in an outage
-- KEYS[7..] further keys of the ring. If `meta` is lost, the script deletes these keys and KEYS[6]
-- ARGV[1] schema, the version of the format of the keys
-- ARGV[2] oldest schema that the sidecar serves
-- ARGV[3] number of slots of the ring, that is, of ticks in a revolution
-- ARGV[4] length of a tick in ms
-- ARGV[5] number of rings in the namespace. Each ring has its own keys
-- ARGV[6] number of lists, for a new ring. A list is a Redis SET of the messages of one deadline
-- ARGV[7] incarnation, a random name for a new ring
-- ARGV[8] name of the sidecar
-- ARGV[9] maximum number of ticks by which a leader catches up, for a new ring
-- ARGV[10] number of the last chunk whose answer this sidecar has
-- ARGV[11] number of Acks that this sidecar holds
-- Replies:
--   {'open', generation, incarnation, maximum number of ticks by which a leader catches up, number of the last chunk
--     applied, answer, answer}: the answers to the last two chunks, in any order, each with the generation and the
--     number of its chunk. A missing answer is empty
--   {'differs', schema, slots, tick in ms, rings}: the ring has these settings, and the sidecar has others
local meta, link = KEYS[1], KEYS[2]

-- Returns the tick of the last entry of the outbox, and the numbers of batches and messages published up to that entry.
-- Returns zeros if the outbox does not exist or Redis cannot read it.
local function left_in_outbox()
  local function by_field(list)
    local named = {}
    for i = 1, #list, 2 do named[list[i]] = list[i + 1] end
    return named
  end
  local stream = by_field(redis.pcall('XINFO', 'STREAM', KEYS[3]))
  local last = by_field(stream['last-entry'] and stream['last-entry'][2] or {})
  local tick = tonumber(string.match(stream['last-generated-id'] or '', '^%d+')) or 0
  -- An id that another program wrote may have no tick, or a number that Lua does not represent exactly.
  if tick >= 1e14 then tick = 0 end
  return tick, tonumber(last.batches) or 0, tonumber(last.ids) or 0
end

-- If Redis is out of memory, it runs a script only if the first write needs no memory. So the first write deletes a
-- field that does not exist.
redis.call('HDEL', link, '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('HMGET', meta, 'schema', 'slots', 'tick_ms', 'rings', 'incarnation', 'catch_up')
if not found[1] then
  -- If Redis lost only `meta`, the pointer of the other keys is unknown, and their messages would time out at a wrong
  -- time. So the script deletes these keys. If the Redis user is not allowed to run UNLINK, the script uses DEL.
  if type(redis.pcall('UNLINK', unpack(KEYS, 6))) == 'table' then redis.call('DEL', unpack(KEYS, 6)) end
  local tick, batches, ids = left_in_outbox()
  local pointer = math.max(math.floor(now / ARGV[4]), tick + 1)
  found = {ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[7], ARGV[9]}
  redis.call('HSET', meta, 'schema', ARGV[1], 'slots', ARGV[3], 'tick_ms', ARGV[4], 'rings', ARGV[5],
    'lists', ARGV[6], 'catch_up', ARGV[9], 'incarnation', ARGV[7], 'begun_at', pointer, 'pointer', pointer, 'due_ms', now,
    'frozen_from', pointer, 'in_flight', 0, 'epoch', 0, 'renewals', 0, 'published_batches', batches,
    'published_ids', ids)
  redis.pcall('XGROUP', 'CREATE', KEYS[3], 'default', '0', 'MKSTREAM')
  redis.call('HSET', KEYS[4], 'default', '-')
end
local schema = tonumber(found[1])
if schema > tonumber(ARGV[1]) or schema < tonumber(ARGV[2])
  or found[2] ~= ARGV[3] or found[3] ~= ARGV[4] or found[4] ~= ARGV[5] then
  return {'differs', found[1], found[2], found[3], found[4]}
end
-- The new generation is above all earlier ones, so that scripts refuse late writes of older connections. If Redis lost
-- the key `link`, the time in ms is normally above all earlier generations.
local generation = math.max(tonumber(redis.call('HGET', link, 'generation') or '0') + 1, now)
redis.call('HSET', link, 'generation', generation)
-- Without this entry, a sidecar that dies before its first heartbeat would never be found dead.
redis.call('HSETNX', KEYS[5], ARGV[8], '0')
local chunk = tonumber(redis.call('HGET', link, 'chunk') or '0')
local answers = redis.call('HMGET', link, 'answer:0', 'answer:1')
-- An entry in `held_acks` makes the pointer wait for this sidecar. The sidecar must first apply the Acks that it holds,
-- and the Acks that Redis answered and then lost. If this write fails, the sidecar still connects, so that it can apply
-- the Acks. The pointer then does not wait.
local held = tonumber(ARGV[11])
if held > 0 or chunk < tonumber(ARGV[10]) then
  redis.pcall('HSET', KEYS[6], ARGV[8], held)
else
  redis.call('HDEL', KEYS[6], ARGV[8])
end
return {'open', generation, found[5], tonumber(found[6]), chunk, answers[1] or '', answers[2] or ''}
