-- Releases the batches that a sidecar holds, and then deletes its entry. The sidecar is dead, or it is the caller,
-- which shuts down. Each call does a limited part of this work.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- KEYS[8] held_acks: the sidecars that have not yet applied all Acks that they held in an outage
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the sidecar
-- ARGV[3] number of the last heartbeat that the caller saw of the sidecar; `ends` if the sidecar is the caller
-- ARGV[4] maximum number of batches that one call releases
-- ARGV[5] maximum number of groups that one call deletes
-- Replies:
--   {'reaped', number of batches released}: the entry is deleted
--   {'more', number of batches released}: a maximum was reached. The caller must call again
--   {'alive'}: the sidecar has sent a heartbeat since, or has no entry
local dead, left, most_groups, ends = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[3] == 'ends'
local entry = redis.call('HGET', sidecars, dead)
if not ends and not (entry and beats_in(entry) == ARGV[3]) then return {'alive'} end
write_without_memory()

local freed = 0
-- The loop goes over the groups in the outbox, so that it includes groups that `groups` has lost.
for _, reader in ipairs(readers()) do
  local here = let_go_all(reader.name, dead, left)
  freed, left = freed + here, left - here
  if left == 0 then
    tell_returned()
    return {'more', freed}
  end
  -- Deleting a consumer would also delete its pending batches. This consumer has none left.
  redis.call('XGROUP', 'DELCONSUMER', outbox, reader.name, dead)
end
if freed > 0 then tell_returned() end

-- If no other sidecar has a subscriber of an ephemeral group, that group is deleted.
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
  -- The sidecar may only be paused. When it resumes, it reads its last answers in its key `link`. So that key is
  -- deleted much later, counted from this tick.
  local _, pointer = observed()
  redis.call('ZADD', departed, pointer, dead)
end
return {'reaped', freed}
