-- Reads the status of the ring. Writes nothing.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] lease: the token of the leader
-- KEYS[3..] the lists, each a Redis SET of the messages of one deadline
-- No ARGV
-- Replies:
--   {pointer, ms since the pointer was due at this tick, epoch, token of the leader, name of the leader, ms since the
--     last election in whole ticks, messages in flight, number of messages in each list...}: token and name are
--     empty if no sidecar leads
--   {}: the ring does not exist
local found = redis.call('HMGET', KEYS[1], 'pointer', 'due_ms', 'epoch', 'leader', 'elected_at', 'in_flight', 'tick_ms',
  'lease_until')
if not found[1] then return {} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holder = (tonumber(found[8]) or 0) > now and redis.call('GET', KEYS[2])
local reply = {tonumber(found[1]), now - found[2], tonumber(found[3]), holder or '', holder and found[4] or '',
  math.max(0, found[1] - (found[5] or found[1])) * found[7], tonumber(found[6])}
for i = 3, #KEYS do reply[i + 5] = redis.call('SCARD', KEYS[i]) end
return reply
