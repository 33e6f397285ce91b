-- Announces all groups that have subscribers at the sidecar. If the sidecar holds batches of any other group, releases
-- those batches.
--
-- KEYS as in group_functions.lua
-- ARGV[2] sidecar   ARGV[3] maximum number of batches released in one group
-- ARGV[4..] each group that has subscribers at the sidecar: its name, and its kind (`e` ephemeral, `-` not)
-- Reply {'announced', groups that had to be created again}
local sidecar, most = ARGV[2], tonumber(ARGV[3])
write_without_memory()
local before = redis.call('HGET', sidecars, sidecar) or '0'
local told, joined, names = '', {}, {}
for i = 4, #ARGV, 2 do
  local group = ARGV[i]
  told, joined[group], names[#names + 1] = told .. ' ' .. marked(group, ARGV[i + 1]), true, group
end

local made = 0
local kept = #names > 0 and redis.call('HMGET', groups, unpack(names))
for i, group in ipairs(names) do
  -- The group is missing: Redis lost its data, or another sidecar reaped this one as dead.
  local kind = ARGV[3 + 2 * i]
  if not kept[i] and make(group, kind == 'e' and '$' or '0', kind) then made = made + 1 end
end

local entry = string.format('%.0f', beats_in(before) + 1) .. told
redis.call('HSET', sidecars, sidecar, entry)
if string.sub(before, #beats_in(before) + 1) ~= told then
  local freed, left = 0, {}
  for group, mark in groups_in(before) do
    if not joined[group] then
      local here = let_go_all(group, sidecar, most)
      freed = freed + here
      -- The sidecar may hold more batches of this group: its next heartbeat continues.
      if here == most then entry = entry .. ' ' .. marked(group, mark) else left[#left + 1] = group end
    end
  end
  redis.call('HSET', sidecars, sidecar, entry)
  for _, group in ipairs(left) do leave(group, sidecar) end
  if freed > 0 then tell_returned() end
end

return {'announced', made}
