-- Renews the lease, if the caller still holds it.
--
-- KEYS[3] lease   KEYS[4] candidates
-- ARGV[2] token   ARGV[3] epoch   ARGV[4] lease in ms   ARGV[5] 1 to return the candidates and delete their list
-- Reply {'renewed', for each candidate since the last such call: token, number of rings it leads, name}   {'deposed'}
if redis.call('GET', KEYS[3]) ~= ARGV[2] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[3] then
  return {'deposed'}
end
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('HINCRBY', KEYS[1], 'renewals', 1)
if ARGV[5] ~= '1' then return {'renewed'} end
local candidates = redis.call('HGETALL', KEYS[4])
redis.call('DEL', KEYS[4])
return {'renewed', unpack(candidates)}
