-- Records a heartbeat of the sidecar. It reads nothing of other sidecars or groups, so its cost does not grow with
-- their number.
--
-- KEYS[3] sidecars
-- ARGV[2] sidecar   ARGV[3] its groups, as its entry has them
-- Reply {'beaten', limits of the outbox by which the leader trims it, sidecar that led last, its heartbeats}; empty if
--   no sidecar has led yet
--   {'differs'} it must announce its groups: they differ, or its entry was lost
local before = redis.call('HGET', KEYS[3], ARGV[2])
local beats, groups = string.match(before or '', '^(%d+)(.*)$')
if groups ~= ARGV[3] then return {'differs'} end
-- A Redis without memory finishes a script whose first write needs none.
redis.call('HDEL', KEYS[3], '')
redis.call('HSET', KEYS[3], ARGV[2], string.format('%.0f', beats + 1) .. groups)
local bounds, leader = unpack(redis.call('HMGET', KEYS[1], 'bounds', 'inspected_by'))
local entry = leader and redis.call('HGET', KEYS[3], leader)
return {'beaten', bounds or '', leader or '', entry and string.match(entry, '^%d+') or ''}
