-- Records which groups have subscribers at this sidecar. Counts as a heartbeat. If the sidecar was recorded in other
-- groups, removes the sidecar from those groups. Also releases the batches of those groups that the sidecar holds, so
-- that other sidecars can take them.
--
-- KEYS[1] meta: the state of the ring
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the sidecar
-- ARGV[3] maximum number of batches that are released in one group
-- ARGV[4], ARGV[6].. name of each group that has subscribers at the sidecar
-- ARGV[5], ARGV[7].. kind of that group: `e` ephemeral, `-` not
-- Reply {'announced', number of groups that Redis had lost and that were created again}
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
  -- If the group is not recorded, Redis lost data, or the leader took this sidecar for dead and deleted its groups.
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
      -- If the maximum was reached, the sidecar may hold more batches of this group. Its entry keeps the group, so that
      -- its next heartbeat differs and continues here.
      if here == most then entry = entry .. ' ' .. marked(group, mark) else left[#left + 1] = group end
    end
  end
  redis.call('HSET', sidecars, sidecar, entry)
  for _, group in ipairs(left) do leave(group, sidecar) end
  if freed > 0 then tell_returned() end
end

return {'announced', made}
