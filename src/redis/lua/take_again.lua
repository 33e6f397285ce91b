-- Takes a batch once more, if the sidecar still holds it, or it was given back and nobody has taken it since.
--
-- KEYS as in groups.lua
-- ARGV[2] sidecar   ARGV[3] group   ARGV[4] id   ARGV[5] epoch
-- Reply {'taken', ms now, batch as in take.lua}
--   {'gone'} it is settled or dropped, or somebody else has it
local sidecar, group, id = ARGV[2], ARGV[3], ARGV[4]
if not kind_of(group) then return {'gone'} end
local held = redis.call('XPENDING', outbox, group, id, id, 1)[1]
if not held or held[2] ~= sidecar and held[2] ~= nobody or not is_of(id, ARGV[5]) then return {'gone'} end
local claimed = redis.call('XCLAIM', outbox, group, sidecar, 0, id)[1]
local batch = delivery(claimed, held[4] + 1)
return {'taken', now_ms(), batch}
