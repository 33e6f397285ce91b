-- Deletes the link of a sidecar that has been dead for too long.
--
-- KEYS as in group_functions.lua, and KEYS[8] the link   ARGV[2] the sidecar
-- Reply {'dropped'}
if redis.call('HEXISTS', sidecars, ARGV[2]) == 0 then redis.call('DEL', KEYS[8]) end
redis.call('ZREM', departed, ARGV[2])
return {'dropped'}
