-- Lists one page of the batches of a group that a sidecar holds. Writes nothing.
--
-- KEYS[1] outbox   KEYS[2] groups
-- ARGV[1] sidecar   ARGV[2] group   ARGV[3] the last id of the previous page, or empty   ARGV[4] maximum number of ids
-- Reply {id...}
local sidecar, group, last, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local from = last == '' and '-' or '(' .. last
local pending = redis.pcall('XPENDING', KEYS[1], group, from, '+', most, sidecar)
if pending.err then
  -- If `groups` has the group and the outbox does not, the script fails: a repair will create the group again.
  local is_none = string.find(pending.err, 'NOGROUP', 1, true) and redis.call('HEXISTS', KEYS[2], group) == 0
  if not is_none then error(pending.err) end
end
local ids = {}
for i, held in ipairs(pending) do ids[i] = held[1] end
return ids
