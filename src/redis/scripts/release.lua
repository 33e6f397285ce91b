-- Deletes the lease, if the caller holds it, and sends the other sidecars a hint. The caller stops being a candidate.
--
-- KEYS[3] lease   KEYS[4] candidates   KEYS[5] news
-- ARGV[2] token   ARGV[3], ARGV[4] the hint: `vacant`, 1, or `handed` and the token of the successor
-- Reply {'released'}   {'deposed'}
redis.call('HDEL', KEYS[4], ARGV[2])
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return {'deposed'} end
redis.call('DEL', KEYS[3])
redis.call('HDEL', KEYS[1], 'leader')
redis.call('XADD', KEYS[5], 'MAXLEN', 16, '*', ARGV[3], ARGV[4])
return {'released'}
