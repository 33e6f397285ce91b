-- Deletes the key `link` of a sidecar that has been dead for long. The key has the state of that sidecar's connection.
-- Keeps the key if the sidecar has an entry in `sidecars` again, because it lives.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- KEYS[8] the key `link` of the dead sidecar
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the dead sidecar
-- Reply {'dropped'}
if redis.call('HEXISTS', sidecars, ARGV[2]) == 0 then redis.call('DEL', KEYS[8]) end
redis.call('ZREM', departed, ARGV[2])
return {'dropped'}
