-- What a sidecar holds of a group, as far as it fits one page. Writes nothing.
--
-- KEYS[1] outbox   KEYS[2] groups
-- ARGV[1] sidecar   ARGV[2] group   ARGV[3] the last id of the page before, or empty   ARGV[4] most ids
-- Reply {id...}
local sidecar, group, last, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('HEXISTS', KEYS[2], group) == 0 then return {} end
local from = last == '' and '-' or '(' .. last
local ids = {}
for i, held in ipairs(redis.call('XPENDING', KEYS[1], group, from, '+', most, sidecar)) do ids[i] = held[1] end
return ids
