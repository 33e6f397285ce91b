-- Frees what a sidecar held, a part at a time, and then forgets it: one that is dead, or our own as it goes.
--
-- KEYS as in groups.lua
-- ARGV[2] the sidecar   ARGV[3] the beats at which it stands still, or `goes` for our own   ARGV[4] most batches
-- Reply {'buried', batches freed}   {'more', batches freed}   {'alive'} it has beaten since
local dead, left = ARGV[2], tonumber(ARGV[4])
local goes = ARGV[3] == 'goes'
if not goes and redis.call('HGET', sidecars, dead) ~= ARGV[3] then return {'alive'} end

local freed = 0
-- Also of a group that `groups` has lost.
for _, reader in ipairs(readers()) do
  local here = let_go_all(reader.name, dead, left)
  freed, left = freed + here, left - here
  if left == 0 then
    tell_returned()
    return {'more', freed}
  end
  -- What a consumer holds goes with it: this one holds nothing.
  redis.call('XGROUP', 'DELCONSUMER', outbox, reader.name, dead)
end
for _, membership in ipairs(memberships()) do
  if membership[3] == dead then leave(membership[2], dead) end
end
redis.call('HDEL', sidecars, dead)
if goes then redis.call('DEL', KEYS[2]) end
if freed > 0 then tell_returned() end
return {'buried', freed}
