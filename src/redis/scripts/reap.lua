-- Frees the batches that a sidecar held, a part at a time, and then deletes its entry: a dead one, or our own at its
-- end.
--
-- KEYS as in group_functions.lua, and KEYS[8] held_acks
-- ARGV[2] the sidecar   ARGV[3] its last heartbeat, or `ends` for our own   ARGV[4] most batches   ARGV[5] most groups
-- Reply {'reaped', batches freed}   {'more', batches freed}   {'alive'} a heartbeat has come since
local dead, left, most_groups, ends = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[3] == 'ends'
local entry = redis.call('HGET', sidecars, dead)
if not ends and not (entry and beats_in(entry) == ARGV[3]) then return {'alive'} end
write_without_memory()

local freed = 0
-- Also of a group that `groups` has lost.
for _, reader in ipairs(readers()) do
  local here = let_go_all(reader.name, dead, left)
  freed, left = freed + here, left - here
  if left == 0 then
    tell_returned()
    return {'more', freed}
  end
  -- Deleting a consumer deletes its batches: this one holds none.
  redis.call('XGROUP', 'DELCONSUMER', outbox, reader.name, dead)
end
if freed > 0 then tell_returned() end

-- An ephemeral group goes with its last sidecar.
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
-- The Acks that it held are lost with it: the pointer need not wait for them.
redis.call('HDEL', KEYS[8], dead)
if ends then
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', departed, dead)
else
  -- It may be paused, and come back for the answers to its last chunks.
  local _, pointer = observed()
  redis.call('ZADD', departed, pointer, dead)
end
return {'reaped', freed}
