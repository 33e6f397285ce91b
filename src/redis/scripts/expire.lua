-- Moves the next messages of the oldest frozen tick to the outbox, if the caller leads. A frozen tick is expired and
-- not yet published. The batch has the caller's epoch. If Redis loses a batch, another epoch publishes its messages
-- again, so no batch id names two contents.
--
-- KEYS[3] lease   KEYS[4] ticks   KEYS[5] the list of the tick   KEYS[6] outbox   KEYS[7] late   KEYS[8] news
-- ARGV[2] token   ARGV[3] epoch   ARGV[4] the tick   ARGV[5] the seq that the caller expects   ARGV[6] maximum number
--   of messages
-- Reply {'published', messages, 1 if the tick is now published, ms late, timed out, acked, storm, messages missing at
--   the end of the tick, since Redis has lost its list}
--   {'expected', tick, seq, 1 if the tick is frozen}: where to continue. If this leader has finished a tick, four
--   values follow, since the answer with them may be lost: finished tick, timed out, acked, storm
--   {'deposed', reason}
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return {'deposed', 'holder'} end
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[3] then return {'deposed', 'epoch'} end

local pointer, frozen_from = numbers(KEYS[1], 'pointer', 'frozen_from')
local function expected(seq, is_frozen)
  local by, finished, timed_out, acked, storm =
    string.match(redis.call('HGET', KEYS[1], 'finished') or '', '^(%S+) (%d+) (%d+) (%d+) (%d)$')
  if by ~= ARGV[2] then return {'expected', frozen_from, seq, is_frozen} end
  return {'expected', frozen_from, seq, is_frozen, finished, timed_out, acked, storm}
end
if frozen_from >= pointer then return expected(0, 0) end
local field = 'frozen:' .. frozen_from
local function parsed(record)
  return string.match(record or '', '^(%d+) (%-?%d+) (%d+) (%d+) (%d) (%d+) (%d+)$')
end
local expired_ms, due_ms, timed_out, acked, storm, published, seq = parsed(redis.call('HGET', KEYS[4], field))
if not expired_ms then
  -- The record of the tick is lost with `ticks`, or has another format. The list still has the rest of the tick. The
  -- last id of the outbox shows the seq at which the tick continues. If Redis cannot read that id, the seq begins at 0.
  local stream, last = redis.pcall('XINFO', 'STREAM', KEYS[6]), ''
  for i = 1, #stream, 2 do
    if stream[i] == 'last-generated-id' then last = stream[i + 1] end
  end
  local last_tick, last_seq = string.match(last, '^(%d+)-(%d+)$')
  local now = now_ms()
  expired_ms, due_ms, timed_out, acked, storm, published = now, now, redis.call('SCARD', KEYS[5]), 0, 0, 0
  seq = string.format('%.0f', tonumber(last_tick) == frozen_from and last_seq + 1 or 0)
end
if tonumber(ARGV[4]) ~= frozen_from or ARGV[5] ~= seq then return expected(seq, 1) end

timed_out, published = tonumber(timed_out), tonumber(published)
local members = redis.call('SPOP', KEYS[5], ARGV[6])
published = published + #members
local last = #members == 0 or published >= timed_out
if #members > 0 then
  local packed, failed = table.concat(members, ' '), nil
  local function try(...)
    if failed then return nil end
    local reply = redis.pcall(...)
    if type(reply) == 'table' and reply.err then failed = reply end
    return reply
  end
  try('RPUSH', KEYS[7], frozen_from .. ' ' .. packed)
  local remembered = not failed
  local batches = try('HINCRBY', KEYS[1], 'published_batches', 1)
  local ids = try('HINCRBY', KEYS[1], 'published_ids', #members)
  local by = redis.call('HGET', KEYS[1], 'published_by') or ''
  if string.match(by, '^%d+') ~= ARGV[3] then
    try('HSET', KEYS[1], 'published_by', ARGV[3] .. ' ' .. frozen_from .. '-' .. seq)
  end
  try('XADD', KEYS[6], frozen_from .. '-' .. seq,
    'epoch', ARGV[3], 'count', #members, 'added', timed_out + acked, 'acked', acked, 'storm', storm,
    'last', last and 1 or 0, 'decided_ms', expired_ms, 'batches', batches, 'ids', ids, 'messages', packed)
  if failed then
    -- Writes before an error stay. So the messages go back into their list, and the counts are reduced again.
    if remembered then redis.pcall('RPOP', KEYS[7]) end
    if type(batches) == 'number' then redis.pcall('HINCRBY', KEYS[1], 'published_batches', -1) end
    if type(ids) == 'number' then redis.pcall('HINCRBY', KEYS[1], 'published_ids', -#members) end
    redis.call('SADD', KEYS[5], unpack(members))
    return failed
  end
  -- A sidecar that misses this hint finds the batch when it polls.
  redis.pcall('XADD', KEYS[8], 'MAXLEN', 16, '*', 'published', frozen_from)
end
if last then
  redis.call('HDEL', KEYS[4], field)
  redis.call('HSET', KEYS[1], 'frozen_from', frozen_from + 1,
    'finished', table.concat({ARGV[2], frozen_from, timed_out, acked, storm}, ' '))
else
  redis.call('HSET', KEYS[4], field,
    table.concat({expired_ms, due_ms, timed_out, acked, storm, published, seq + 1}, ' '))
end
return {'published', #members, last and 1 or 0, math.max(0, now_ms() - tonumber(due_ms)), timed_out, tonumber(acked),
  tonumber(storm), last and math.max(0, timed_out - published) or 0}
