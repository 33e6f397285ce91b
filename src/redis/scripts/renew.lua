-- Renews the lease, if the caller still holds it. Can also return the candidates that have announced themselves since
-- the last such call.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] lease: the token of the leader
-- KEYS[4] candidates: the token of each candidate, the number of rings that it leads, and its name
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] token of the caller
-- ARGV[3] epoch of the caller
-- ARGV[4] length of the lease in ms
-- ARGV[5] 1 to return and delete the candidates, else 0
-- Replies:
--   {'renewed'}: without candidates
--   {'renewed', token, announcement...}: for each candidate its token, then the number of rings that it leads and its
--     name
--   {'deposed'}: the caller does not hold the lease, or its epoch is not the current one
local holder, epoch, now, renewals = lease_state(KEYS[3])
if holder ~= ARGV[2] or epoch ~= ARGV[3] then return {'deposed'} end
-- If Redis is out of memory, it runs a script only if the first write needs no memory. So the first write deletes a
-- field that does not exist.
redis.call('HDEL', KEYS[2], '')
redis.call('HSET', KEYS[1], 'renewals', renewals + 1, 'lease_until', now + ARGV[4])
if ARGV[5] ~= '1' then return {'renewed'} end
local candidates = redis.call('HGETALL', KEYS[4])
redis.call('DEL', KEYS[4])
return {'renewed', unpack(candidates)}
