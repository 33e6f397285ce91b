-- Gives the lease up, if it is ours, and tells the others.
--
-- KEYS[3] lease   KEYS[4] news
-- ARGV[2] token
-- Reply {'released'}   {'deposed'}
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return {'deposed'} end
redis.call('DEL', KEYS[3])
redis.call('HDEL', KEYS[1], 'leader')
redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'vacant', '1')
return {'released'}
