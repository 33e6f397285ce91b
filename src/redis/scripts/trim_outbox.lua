-- Does one step of trimming the outbox, for the leader. Removes the batches that all groups have settled. Drops the
-- oldest batches if they are too old, or if the outbox has too many messages. Deletes groups that had no subscriber for
-- too long. Ages are counted in ticks.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] retention in ms: the maximum age of a batch, and of a group without subscribers
-- ARGV[3] maximum number of messages in the outbox
-- ARGV[4] 1 if batches and groups may be dropped because of their age, else 0
-- ARGV[5] number of the step. If the answer to a call was lost, the caller repeats the number
-- Reply {'tended', 1 if there is more to do, else 0, number of messages dropped, number of batches dropped, name of
--   each group deleted for its age...}: batches that all groups had settled do not count as dropped. Ephemeral groups
--   are not named
local retention, most_ids, may_drop_old, number = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1', ARGV[5]
local told = {}
for word in string.gmatch(redis.call('HGET', KEYS[2], 'tended') or '', '%S+') do told[#told + 1] = word end
if told[1] == number then
  for i = 2, 4 do told[i] = tonumber(told[i]) end
  told[1] = 'tended'
  return told
end
write_without_memory()
local trimmed_all = not trim()
-- The heartbeats of other sidecars return these limits. Each sidecar compares them with its own options.
local bounds = ARGV[2] .. ' ' .. ARGV[3]
if redis.call('HGET', KEYS[1], 'bounds') ~= bounds then redis.call('HSET', KEYS[1], 'bounds', bounds) end

local reached_for, pointer = observed()
local function is_too_old(tick) return may_drop_old and reached_for(tick) > retention end

local found = readers()
-- To drop a batch, the script looks it up in each group, and reads all its messages. Both are limited, so that no step
-- blocks Redis for long.
local most_batches, most_messages = math.max(1, math.floor(400 / #found)), 10000
local published_ids = tonumber(redis.call('HGET', KEYS[1], 'published_ids') or '0')
local ids, batches, last, looked_at, read = 0, 0, nil, 0, 0

local function may_look()
  return looked_at < most_batches and read < most_messages
end

-- Returns whether a batch has the counts `ids` and `count`. A batch without them is dropped together with the next
-- batch that has them.
local function is_readable(batch) return tonumber(batch.ids) and tonumber(batch.count) end

local function is_beyond_bounds(id, batch)
  local stored = published_ids - (batch.ids - batch.count)
  return is_too_old(string.match(id, '^%d+') + 1) or stored > most_ids
end

-- Settles an entry for all groups. Returns whether some group had not settled it.
local function settle_for_all(id)
  local unsettled = false
  for _, reader in ipairs(found) do
    local was_pending = redis.call('XACK', outbox, reader.name, id) == 1
    unsettled = unsettled or was_pending or before(reader['last-delivered-id'], id)
  end
  return unsettled
end

-- Ends the step with `reply`. If the step dropped anything, the key `link` keeps the reply, since a repeated call could
-- not count the dropped batches again. Redis accepts this write even if it is out of memory, because it checks its
-- memory only before the first write of a script.
local function ends(reply)
  if batches > 0 or #reply > 4 then
    redis.call('HSET', KEYS[2], 'tended', number .. ' ' .. table.concat(reply, ' ', 2))
  end
  return reply
end

local from, passed = '-', {}
while may_look() do
  local entry = redis.call('XRANGE', outbox, from, '+', 'COUNT', 1)[1]
  if not entry then break end
  local batch = by_field(entry[2])
  local readable = is_readable(batch)
  if readable and not is_beyond_bounds(entry[1], batch) then break end
  from, looked_at, read = '(' .. entry[1], looked_at + 1, read + (tonumber(batch.count) or 0)
  passed[#passed + 1] = {entry[1], readable and batch.count or 0}
  if readable then
    last = entry[1]
    for _, one in ipairs(passed) do
      if settle_for_all(one[1]) then
        ids, batches = ids + one[2], batches + 1
      end
    end
    passed = {}
  end
end
if last then redis.call('XTRIM', outbox, 'MINID', '=', behind(last)) end
if last and not may_look() or not trimmed_all then return ends({'tended', 1, ids, batches}) end

-- An ephemeral group normally has a subscriber. If Redis lost the entry of the subscriber's sidecar, that sidecar
-- restores it within this time, or never.
local orphaned_ms = 60000
-- The script deletes groups only after it has dropped batches. Otherwise a batch that only a deleted group had not
-- settled would not be counted.
local reply, counts = {'tended', 0, ids, batches}, attendance('')
local kept = redis.call('HGETALL', groups)
for i = 1, #kept, 2 do
  local group, kind, since = kept[i], kept_of(kept[i + 1])
  if group == 'default' or counts[group] then
    if since ~= '' then redis.call('HSET', groups, group, kind) end
  elseif since == '' then
    redis.call('HSET', groups, group, string.format('%s %.0f', kind, pointer))
  elseif is_too_old(tonumber(since)) or kind == 'e' and reached_for(tonumber(since)) > orphaned_ms then
    delete(group)
    if kind ~= 'e' then reply[#reply + 1] = group end
  end
end
return ends(reply)
