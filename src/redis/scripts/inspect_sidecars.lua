-- Reads the heartbeats of all sidecars, for the leader, and repairs groups that were lost.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] ms that the link of a dead sidecar is kept   ARGV[4] maximum number of links named
-- Reply {'inspected', groups created again since the last call, number of links that are too old, the sidecar of each
--   such link, then for every sidecar: its name, its heartbeats}
write_without_memory()
if redis.call('HGET', KEYS[1], 'inspected_by') ~= ARGV[2] then redis.call('HSET', KEYS[1], 'inspected_by', ARGV[2]) end
local made = repair() + tonumber(redis.call('HGET', KEYS[1], 'remade') or '0')
redis.call('HDEL', KEYS[1], 'remade')

-- If a sidecar holds batches of a group, its entry gets that group until its next heartbeat. So a dead sidecar is found
-- dead even if Redis lost its entry.
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
