-- Registers a link, and creates the ring if there is none. Returns the generation that `refuse_stale_connection.lua`
-- compares, so that does not come before it.
--
-- KEYS[1] meta   KEYS[2] link of the sidecar   KEYS[3] outbox   KEYS[4] groups   KEYS[5] sidecars
-- KEYS[6] held_acks, KEYS[7..] what else is of one ring alone
-- ARGV[1] schema   ARGV[2] oldest schema served   ARGV[3] slots   ARGV[4] tick in ms   ARGV[5] rings
-- ARGV[6] lists   ARGV[7] incarnation, if the ring is new   ARGV[8] sidecar
-- ARGV[9] most ticks that are caught up, if the ring is new
-- ARGV[10] number of the last chunk whose answer this sidecar has   ARGV[11] Acks that it holds
-- Reply {'open', generation, incarnation, most ticks that are caught up, last chunk applied, the last two answers, each
--   with the generation and the number of its chunk}
--   {'differs', schema, slots, tick in ms, rings}
local meta, link = KEYS[1], KEYS[2]

-- Where an outbox whose `meta` was lost continues: its last tick, and the counts of its last entry. 0 if there is none,
-- or Redis cannot read it.
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

-- A Redis without memory lets a script finish whose first write needs none.
redis.call('HDEL', link, '')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = redis.call('HMGET', meta, 'schema', 'slots', 'tick_ms', 'rings', 'incarnation', 'catch_up')
if not found[1] then
  -- The rest of a ring whose `meta` was lost counts from another pointer: it would time out at a wrong time.
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
-- Above all earlier ones: also if the link was lost with its count, since its late writes must be refused.
local generation = math.max(tonumber(redis.call('HGET', link, 'generation') or '0') + 1, now)
redis.call('HSET', link, 'generation', generation)
-- So that a sidecar that dies before its first heartbeat is found dead too.
redis.call('HSETNX', KEYS[5], ARGV[8], '0')
local chunk = tonumber(redis.call('HGET', link, 'chunk') or '0')
local answers = redis.call('HMGET', link, 'answer:0', 'answer:1')
-- The pointer waits until the Acks are applied that this sidecar holds, and those that Redis lost after it had answered
-- them. A Redis without memory does not record that.
local held = tonumber(ARGV[11])
if held > 0 or chunk < tonumber(ARGV[10]) then
  redis.pcall('HSET', KEYS[6], ARGV[8], held)
else
  redis.call('HDEL', KEYS[6], ARGV[8])
end
return {'open', generation, found[5], tonumber(found[6]), chunk, answers[1] or '', answers[2] or ''}
