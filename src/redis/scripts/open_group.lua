-- Creates a group if it does not exist. Records that the group has a subscriber at the sidecar.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] group   ARGV[4] maximum number of groups
-- ARGV[5] start of a new group: after the id `0` or `$`   ARGV[6] kind of a new group: `e` ephemeral, `-` not
-- Reply {'open', 1 if the group is new, kind of the group}   {'full'} the maximum number of groups is reached
local sidecar, group = ARGV[2], ARGV[3]
repair_unreported()
local kind = kind_of(group)
local is_new = not kind
if is_new then
  if redis.call('HLEN', groups) >= tonumber(ARGV[4]) then return {'full'} end
  kind = ARGV[6]
  -- This trim keeps a new group from getting batches that all other groups have settled.
  trim()
  make(group, ARGV[5], kind)
else
  redis.call('HSET', groups, group, kind)
end
join(group, kind, sidecar)
return {'open', is_new and 1 or 0, kind}
