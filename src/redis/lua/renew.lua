-- Renews the lease, if it is still ours.
--
-- KEYS[3] lease
-- ARGV[2] token   ARGV[3] epoch   ARGV[4] lease in ms
-- Reply {'renewed'}   {'deposed'}
if redis.call('GET', KEYS[3]) ~= ARGV[2] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[3] then
  return {'deposed'}
end
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('HINCRBY', KEYS[1], 'renewals', 1)
return {'renewed'}
