-- Renews the lease, if it is still ours.
--
-- KEYS[3] lease   KEYS[4] candidates
-- ARGV[2] token   ARGV[3] epoch   ARGV[4] lease in ms   ARGV[5] 1 if the candidates are wanted, and then forgotten
-- Reply {'renewed', for each candidate since: its token, how many rings it leads, and its name}   {'deposed'}
if redis.call('GET', KEYS[3]) ~= ARGV[2] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[3] then
  return {'deposed'}
end
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('HINCRBY', KEYS[1], 'renewals', 1)
if ARGV[5] ~= '1' then return {'renewed'} end
local candidates = redis.call('HGETALL', KEYS[4])
redis.call('DEL', KEYS[4])
return {'renewed', unpack(candidates)}
