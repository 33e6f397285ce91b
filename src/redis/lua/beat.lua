-- Tells that the sidecar lives and which groups have subscribers there, and returns who else lives. What is told is
-- the whole truth: another membership of the sidecar ends, and what it holds of another group is free for others.
--
-- KEYS as in groups.lua
-- ARGV[2] sidecar   ARGV[3] ms that an unused link is kept   ARGV[4] most batches let go of in one group
-- ARGV[5..] for each group that was joined here: name | `e` ephemeral, `-` not | 1 if it has a subscriber now
-- Reply {'beaten', groups that had to be made anew, by this or before, sidecar, its beats, ...}
local sidecar, joined = ARGV[2], {}
-- A Redis without memory lets a script finish whose first write needs none.
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('HINCRBY', sidecars, sidecar, 1)
local made = 0

-- Where `sidecars` was lost: who lives beats on, and who does not is found dead.
local function know(other)
  if redis.call('HEXISTS', sidecars, other) == 0 then redis.call('HSET', sidecars, other, 0) end
end

for i = 5, #ARGV, 3 do
  local group, kind, attended = ARGV[i], kind_of(ARGV[i]), ARGV[i + 2] == '1'
  joined[group] = true
  if not kind then
    -- Redis came back empty, or the sidecar was taken for dead.
    kind = ARGV[i + 1]
    if make(group, kind == 'e' and '$' or '0', kind) then made = made + 1 end
  elseif attended then
    attend(group, kind)
  end
  local membership = group .. ' ' .. sidecar
  if redis.call('HEXISTS', members, membership) == 0 then redis.call('HSET', members, membership, 1) end
end
made = made + mend() + tonumber(redis.call('HGET', KEYS[1], 'remade') or '0')
redis.call('HDEL', KEYS[1], 'remade')

for _, membership in ipairs(memberships()) do
  local group, other = membership[2], membership[3]
  if other == sidecar and not joined[group] then leave(group, sidecar) end
  know(other)
end
local freed = 0
for _, reader in ipairs(readers()) do
  for _, holder in ipairs(reader.pending > 0 and redis.call('XPENDING', outbox, reader.name)[4] or {}) do
    if holder[1] ~= nobody then know(holder[1]) end
  end
  if not joined[reader.name] then freed = freed + let_go_all(reader.name, sidecar, ARGV[4]) end
end
if freed > 0 then tell_returned() end

local reply = {'beaten', made}
for _, value in ipairs(redis.call('HGETALL', sidecars)) do reply[#reply + 1] = value end
return reply
