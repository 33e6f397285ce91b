-- Gives the lease up, if it is ours, and tells the others.
--
-- KEYS[3] lease   KEYS[4] news
-- ARGV[2] token   ARGV[3] whom the others are to give precedence: a token, or `1`
-- Reply {'released'}   {'deposed'}
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return {'deposed'} end
redis.call('DEL', KEYS[3])
redis.call('HDEL', KEYS[1], 'leader')
redis.call('XADD', KEYS[4], 'MAXLEN', 16, '*', 'vacant', ARGV[3])
return {'released'}
