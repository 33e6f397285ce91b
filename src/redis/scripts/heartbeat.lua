-- Records a heartbeat of the sidecar. The script does not read other sidecars or groups, so its cost does not grow with
-- their number.
--
-- KEYS[3] sidecars
-- ARGV[2] sidecar   ARGV[3] its groups, in the format of its entry
-- Reply {'beaten', limits to which the leader trims the outbox, last leader, number of its last heartbeat}; the values
--   are empty if no sidecar has led yet
--   {'differs'} the sidecar must announce its groups, because its entry has other groups or is lost
local before = redis.call('HGET', KEYS[3], ARGV[2])
local beats, groups = string.match(before or '', '^(%d+)(.*)$')
if groups ~= ARGV[3] then return {'differs'} end
-- If Redis is out of memory, it runs a script only if the first write needs no memory.
redis.call('HDEL', KEYS[3], '')
redis.call('HSET', KEYS[3], ARGV[2], string.format('%.0f', beats + 1) .. groups)
local bounds, leader = unpack(redis.call('HMGET', KEYS[1], 'bounds', 'inspected_by'))
local entry = leader and redis.call('HGET', KEYS[3], leader)
return {'beaten', bounds or '', leader or '', entry and string.match(entry, '^%d+') or ''}
