-- Records a heartbeat of the sidecar. Of all other sidecars, the script reads only the entry of the leader. So its
-- cost does not grow with the number of sidecars.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] sidecars: for each sidecar the number of its last heartbeat, and the groups that have subscribers there
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the sidecar
-- ARGV[3] the groups that have subscribers at the sidecar: for each a space and the name, then `/e` if it is ephemeral
-- Replies:
--   {'beaten', limits of the outbox, name of the last leader, number of that leader's last heartbeat}: the limits are
--     those of the last leader, retention in ms and number of messages. A value is empty if Redis does not have it
--   {'differs'}: Redis has no entry of the sidecar, or an entry with other groups. The sidecar must run
--     `announce_groups`
local before = redis.call('HGET', KEYS[3], ARGV[2])
local beats, groups = string.match(before or '', '^(%d+)(.*)$')
if groups ~= ARGV[3] then return {'differs'} end
-- If Redis is out of memory, it runs a script only if the first write needs no memory. So the first write deletes a
-- field that does not exist.
redis.call('HDEL', KEYS[3], '')
redis.call('HSET', KEYS[3], ARGV[2], string.format('%.0f', beats + 1) .. groups)
local bounds, leader = unpack(redis.call('HMGET', KEYS[1], 'bounds', 'inspected_by'))
local entry = leader and redis.call('HGET', KEYS[3], leader)
return {'beaten', bounds or '', leader or '', entry and string.match(entry, '^%d+') or ''}
