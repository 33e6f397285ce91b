-- Reads the status of the ring. Writes nothing.
--
-- KEYS[1] meta   KEYS[2] lease   KEYS[3..] the lists of deadlines
-- Reply {pointer, ms since it was due, epoch, token of the holder, name of the leader, ms of ticks since its election,
--   in flight, messages in each list...}, or {} if the ring does not exist
local found = redis.call('HMGET', KEYS[1], 'pointer', 'due_ms', 'epoch', 'leader', 'elected_at', 'in_flight', 'tick_ms')
if not found[1] then return {} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holder = redis.call('GET', KEYS[2])
local reply = {tonumber(found[1]), now - found[2], tonumber(found[3]), holder or '', holder and found[4] or '',
  math.max(0, found[1] - (found[5] or found[1])) * found[7], tonumber(found[6])}
for i = 3, #KEYS do reply[i + 5] = redis.call('SCARD', KEYS[i]) end
return reply
