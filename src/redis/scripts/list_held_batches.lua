-- Lists the ids of the batches of a group that a sidecar holds, one page per call. Writes nothing.
--
-- KEYS[1] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[2] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- ARGV[1] name of the sidecar
-- ARGV[2] name of the group
-- ARGV[3] the last id of the previous page; empty for the first page
-- ARGV[4] maximum number of ids
-- Reply {id...}: empty if the group does not exist
local sidecar, group, last, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local from = last == '' and '-' or '(' .. last
local pending = redis.pcall('XPENDING', KEYS[1], group, from, '+', most, sidecar)
if pending.err then
  -- If the outbox has lost a group that is in `groups`, the script fails. The leader creates such a group again.
  local is_none = string.find(pending.err, 'NOGROUP', 1, true) and redis.call('HEXISTS', KEYS[2], group) == 0
  if not is_none then error(pending.err) end
end
local ids = {}
for i, held in ipairs(pending) do ids[i] = held[1] end
return ids
