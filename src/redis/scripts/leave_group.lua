-- Removes the sidecar from a group after the group's last subscriber there left, and releases its batches. If the group
-- is ephemeral and no other sidecar has a subscriber, deletes the group.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] group   ARGV[4] maximum number of batches
-- Reply {'left', 0}   {'left', 1} the sidecar may hold more batches and is still in the group: call again
local sidecar, group, most = ARGV[2], ARGV[3], tonumber(ARGV[4])
write_without_memory()
local freed = let_go_all(group, sidecar, most)
if freed > 0 then tell_returned() end
if freed == most then return {'left', 1} end
leave(group, sidecar)
return {'left', 0}
