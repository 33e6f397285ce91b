-- Records that the sidecar has applied all Acks that it held when its connection was registered. The pointer no longer
-- waits for this sidecar.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] held_acks: the sidecars that have not yet applied all Acks that they held in an outage
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the sidecar
-- Reply {'noted'}
redis.call('HDEL', KEYS[3], ARGV[2])
return {'noted'}
