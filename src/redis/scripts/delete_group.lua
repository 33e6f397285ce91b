-- Deletes a group that has no subscriber at another sidecar.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] group
-- Reply {'deleted'}   {'unknown'}   {'in use', number of other sidecars with a subscriber}
local sidecar, group = ARGV[2], ARGV[3]
repair_unreported()
if not kind_of(group) then return {'unknown'} end
local others = attendance(sidecar)[group]
if others then return {'in use', others} end
leave(group, sidecar)
delete(group)
trim()
return {'deleted'}
