-- Records that the sidecar has applied all Acks that it held when its session began. The pointer no longer waits for
-- them.
--
-- KEYS[3] held_acks
-- ARGV[2] sidecar
-- Reply {'noted'}
redis.call('HDEL', KEYS[3], ARGV[2])
return {'noted'}
