-- Deletes a group that has no subscriber at another sidecar.
--
-- KEYS as in groups.lua
-- ARGV[2] sidecar   ARGV[3] group
-- Reply {'deleted'}   {'unknown'}   {'in use', number of other sidecars with a subscriber}
local sidecar, group = ARGV[2], ARGV[3]
mend_untold()
if not kind_of(group) then return {'unknown'} end
local others = sidecars_of(group, sidecar)
if others > 0 then return {'in use', others} end
delete(group)
trim()
return {'deleted'}
