-- Releases the batches that a sidecar holds, in several calls, and then deletes its entry. The sidecar is a dead one,
-- or the caller itself when it ends.
--
-- KEYS as in group_functions.lua, and KEYS[8] held_acks
-- ARGV[2] the sidecar   ARGV[3] its last heartbeat, or `ends` for the caller itself
-- ARGV[4] maximum number of batches   ARGV[5] maximum number of groups
-- Reply {'reaped', batches released}   {'more', batches released}   {'alive'} a heartbeat has arrived since
local dead, left, most_groups, ends = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[3] == 'ends'
local entry = redis.call('HGET', sidecars, dead)
if not ends and not (entry and beats_in(entry) == ARGV[3]) then return {'alive'} end
write_without_memory()

local freed = 0
-- The loop includes a group whose entry `groups` has lost.
for _, reader in ipairs(readers()) do
  local here = let_go_all(reader.name, dead, left)
  freed, left = freed + here, left - here
  if left == 0 then
    tell_returned()
    return {'more', freed}
  end
  -- Deleting a consumer deletes its batches. This consumer has none left.
  redis.call('XGROUP', 'DELCONSUMER', outbox, reader.name, dead)
end
if freed > 0 then tell_returned() end

-- An ephemeral group is deleted with its last sidecar.
local counts, deleted, rest = attendance(dead), 0, beats_in(entry or '0')
for group in groups_in(entry or '') do
  if kind_of(group) == 'e' and not counts[group] then
    if deleted < most_groups then delete(group) else rest = rest .. ' ' .. marked(group, 'e') end
    deleted = deleted + 1
  end
end
if deleted > most_groups then
  redis.call('HSET', sidecars, dead, rest)
  return {'more', freed}
end
redis.call('HDEL', sidecars, dead)
-- The Acks that the sidecar held are lost with it, so the pointer need not wait for them.
redis.call('HDEL', KEYS[8], dead)
if ends then
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', departed, dead)
else
  -- The sidecar may only be paused. When it resumes, it asks for the answers to its last chunks.
  local _, pointer = observed()
  redis.call('ZADD', departed, pointer, dead)
end
return {'reaped', freed}
