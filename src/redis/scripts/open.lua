-- Registers a link, and creates the ring if it does not exist. Returns the generation that
-- `refuse_stale_connection.lua` compares. So that file does not precede this script.
--
-- KEYS[1] meta   KEYS[2] link of the sidecar   KEYS[3] outbox   KEYS[4] groups   KEYS[5] sidecars
-- KEYS[6] held_acks   KEYS[7..] further keys of the ring; `held_acks` and these are deleted if `meta` is lost
-- ARGV[1] schema   ARGV[2] oldest schema served   ARGV[3] slots   ARGV[4] tick in ms   ARGV[5] rings
-- ARGV[6] number of lists   ARGV[7] incarnation, for a new ring   ARGV[8] sidecar
-- ARGV[9] maximum number of ticks that are caught up, for a new ring
-- ARGV[10] number of the last chunk whose answer this sidecar has   ARGV[11] number of Acks that this sidecar holds
-- Reply {'open', generation, incarnation, maximum number of ticks that are caught up, last chunk applied, the last two
--   answers, each with the generation and the number of its chunk}
--   {'differs', schema, slots, tick in ms, rings}
local meta, link = KEYS[1], KEYS[2]

-- Returns the state of an outbox whose `meta` was lost: its last tick, and the counts of its last entry. Returns zeros
-- if the outbox does not exist or Redis cannot read it.
local function left_in_outbox()
  local function by_field(list)
    local named = {}
    for i = 1, #list, 2 do named[list[i]] = list[i + 1] end
    return named
  end
  local stream = by_field(redis.pcall('XINFO', 'STREAM', KEYS[3]))
  local last = by_field(stream['last-entry'] and stream['last-entry'][2] or {})
  local tick = tonumber(string.match(stream['last-generated-id'] or '', '^%d+')) or 0
  -- An entry in another format may have no tick, or a number too large for Lua.
  if tick >= 1e14 then tick = 0 end
  return tick, tonumber(last.batches) or 0, tonumber(last.ids) or 0
end

-- If Redis is out of memory, it runs a script only if the first write needs no memory.
redis.call('HDEL', link, '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('HMGET', meta, 'schema', 'slots', 'tick_ms', 'rings', 'incarnation', 'catch_up')
if not found[1] then
  -- The remaining keys of a ring that lost `meta` count from another pointer: messages would time out at a wrong time.
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
-- The new generation is above all earlier ones, even if the link was lost: Redis must refuse late writes of older
-- connections.
local generation = math.max(tonumber(redis.call('HGET', link, 'generation') or '0') + 1, now)
redis.call('HSET', link, 'generation', generation)
-- With this entry, a sidecar that dies before its first heartbeat is found dead too.
redis.call('HSETNX', KEYS[5], ARGV[8], '0')
local chunk = tonumber(redis.call('HGET', link, 'chunk') or '0')
local answers = redis.call('HMGET', link, 'answer:0', 'answer:1')
-- The pointer waits until this sidecar has applied two kinds of Acks: those it holds, and those that Redis answered and
-- then lost. If Redis is out of memory, it does not record this.
local held = tonumber(ARGV[11])
if held > 0 or chunk < tonumber(ARGV[10]) then
  redis.pcall('HSET', KEYS[6], ARGV[8], held)
else
  redis.call('HDEL', KEYS[6], ARGV[8])
end
return {'open', generation, found[5], tonumber(found[6]), chunk, answers[1] or '', answers[2] or ''}
