-- Reads the state of messages. Writes nothing.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] messages: the name of each message, and its entry: deadline, number of the attempt, time of the add in ms
-- ARGV[1..] the name of each message, at most 1,000: `id` or `id:client`
-- Replies:
--   {pointer, ms until the pointer is due to leave its tick, ms of a tick, slots, entry of each message...}: an entry is
--     empty if the message is not there
--   {}: the ring does not exist
local found = redis.call('HMGET', KEYS[1], 'pointer', 'due_ms', 'tick_ms', 'slots')
if not found[1] then return {} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local reply = {tonumber(found[1]), found[2] + found[3] - now, tonumber(found[3]), tonumber(found[4])}
local entries = redis.call('HMGET', KEYS[2], unpack(ARGV))
for i = 1, #entries do reply[i + 4] = entries[i] or '' end
return reply
