-- Removes the caller from the candidates. If the caller holds the lease, also deletes the lease and sends the other
-- sidecars a hint.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] lease: the token of the leader
-- KEYS[4] candidates: the token of each candidate, the number of rings that it leads, and its name
-- KEYS[5] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] token of the caller
-- ARGV[3] field of the hint: `vacant` if any candidate may take the lease, `handed` if a successor should
-- ARGV[4] value of the hint: `1` for `vacant`, the token of the successor for `handed`
-- Replies:
--   {'released'}
--   {'deposed'}: the caller does not hold the lease
redis.call('HDEL', KEYS[4], ARGV[2])
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return {'deposed'} end
redis.call('DEL', KEYS[3])
redis.call('HDEL', KEYS[1], 'leader')
redis.call('XADD', KEYS[5], 'MAXLEN', 16, '*', ARGV[3], ARGV[4])
return {'released'}
