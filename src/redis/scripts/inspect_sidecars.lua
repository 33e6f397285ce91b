-- Reads the number of the last heartbeat of every sidecar, for the leader. Also repairs lost groups, and lists dead
-- sidecars whose key `link`, the state of the sidecar's connection, should be deleted.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the caller
-- ARGV[3] ms for which the key `link` of a dead sidecar is kept
-- ARGV[4] maximum number n in the reply
-- Reply {'inspected', number of groups created again, number n, n names of dead sidecars whose key `link` should be
--   deleted, then for each sidecar its name and the number of its last heartbeat}: the first number counts the groups
--   that any script has created again since the last call
write_without_memory()
if redis.call('HGET', KEYS[1], 'inspected_by') ~= ARGV[2] then redis.call('HSET', KEYS[1], 'inspected_by', ARGV[2]) end
local made = repair() + tonumber(redis.call('HGET', KEYS[1], 'remade') or '0')
redis.call('HDEL', KEYS[1], 'remade')

-- If a sidecar holds batches of a group and its entry does not name the group, the script adds the group to the entry.
-- So a dead sidecar has an entry and is found dead, even if Redis lost the entry. A live sidecar corrects its entry
-- with its next heartbeat.
local entries = by_field(redis.call('HGETALL', sidecars))
for _, reader in ipairs(readers()) do
  for _, holder in ipairs(reader.pending > 0 and redis.call('XPENDING', outbox, reader.name)[4] or {}) do
    local name, entry = holder[1], entries[holder[1]] or '0'
    if name ~= nobody and not attends(entry, reader.name) then
      if is_name(reader.name) then entry = entry .. ' ' .. marked(reader.name, kind_of(reader.name)) end
      if entry ~= entries[name] then redis.call('HSET', sidecars, name, entry) end
      entries[name] = entry
    end
  end
end

local _, pointer = observed()
local tick_ms = numbers(KEYS[1], 'tick_ms')
local oldest = string.format('(%.0f', pointer - ARGV[3] / tick_ms)
local old = redis.call('ZRANGEBYSCORE', departed, '-inf', oldest, 'LIMIT', 0, ARGV[4])
local reply = {'inspected', made, #old, unpack(old)}
for name, entry in pairs(entries) do
  reply[#reply + 1], reply[#reply + 2] = name, beats_in(entry) or '0'
end
return reply
