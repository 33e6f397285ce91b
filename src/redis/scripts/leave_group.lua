-- Removes the sidecar from a group after its last subscriber left: its batches are released. An ephemeral group without
-- a subscriber elsewhere is deleted.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] group   ARGV[4] most batches
-- Reply {'left', 1 if it may hold more}: until it holds none the group is not left
local sidecar, group, most = ARGV[2], ARGV[3], tonumber(ARGV[4])
write_without_memory()
local freed = let_go_all(group, sidecar, most)
if freed > 0 then tell_returned() end
if freed == most then return {'left', 1} end
leave(group, sidecar)
return {'left', 0}
