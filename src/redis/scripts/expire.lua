-- Publishes one batch of the oldest frozen tick, if the caller leads: moves messages from the list of the tick to the
-- outbox. A frozen tick has expired and is not yet wholly published.
--
-- A batch has the id `tick-seq`. `seq` is the number of the batch within its tick, from 0. The batch also has the
-- caller's epoch, a number that grows with each election. If Redis loses a batch, a leader with another epoch publishes
-- the messages again. So two different batches never have the same id and the same epoch.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] lease: the token of the leader
-- KEYS[4] ticks: `frozen:T`, the counts of each frozen tick T
-- KEYS[5] the list of the tick: a Redis SET of its messages that timed out and are not yet published
-- KEYS[6] outbox: the stream of timeout batches
-- KEYS[7] late: a Redis list of the published messages, in chunks, until they are deleted
-- KEYS[8] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] token of the caller
-- ARGV[3] epoch of the caller
-- ARGV[4] the tick that the caller expects to be the oldest frozen one
-- ARGV[5] the `seq` that the caller expects to be next
-- ARGV[6] maximum number of messages in the batch
-- Replies:
--   {'published', messages in the batch, 1 if the whole tick is published now, ms since the tick was due to expire,
--     timed out, acked, storm, missing}: the last four values are about the whole tick. `storm` is 1 if unusually
--     many timed out. `missing` is above 0 if the tick ends and Redis has lost messages of its list
--   {'expected', tick, seq, 1 if the tick is frozen}: nothing was published. The caller should continue with this tick
--     and seq
--   {'expected', tick, seq, 1 if the tick is frozen, finished tick, timed out, acked, storm}: the same. This caller has
--     published a whole tick before. The last four values are that tick and its counts, because the answer with them
--     may be lost
--   {'deposed', 'holder'}: the caller does not hold the lease
--   {'deposed', 'epoch'}: the caller's epoch is not the current one
local holder, epoch, now = lease_state(KEYS[3])
if holder ~= ARGV[2] then return {'deposed', 'holder'} end
if epoch ~= ARGV[3] then return {'deposed', 'epoch'} end

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
  -- The record of the tick is lost, or has another format. The list still has the messages that are not published. If
  -- the last id of the outbox is of this tick, its seq plus one is the next seq. Otherwise the next seq is 0.
  local stream, last = redis.pcall('XINFO', 'STREAM', KEYS[6]), ''
  for i = 1, #stream, 2 do
    if stream[i] == 'last-generated-id' then last = stream[i + 1] end
  end
  local last_tick, last_seq = string.match(last, '^(%d+)-(%d+)$')
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
    -- Redis does not undo writes if a later one fails. So the script puts the messages back into their list, and
    -- reduces the counts again.
    if remembered then redis.pcall('RPOP', KEYS[7]) end
    if type(batches) == 'number' then redis.pcall('HINCRBY', KEYS[1], 'published_batches', -1) end
    if type(ids) == 'number' then redis.pcall('HINCRBY', KEYS[1], 'published_ids', -#members) end
    redis.call('SADD', KEYS[5], unpack(members))
    return failed
  end
  -- Sends the other sidecars a hint. If this fails, they find the batch when they poll.
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
return {'published', #members, last and 1 or 0, math.max(0, now - tonumber(due_ms)), timed_out, tonumber(acked),
  tonumber(storm), last and math.max(0, timed_out - published) or 0}
