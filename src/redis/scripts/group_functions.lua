-- Defines the functions of all scripts that work on groups. Comes between `refuse_stale_connection.lua` and the script.
-- All these scripts have the same keys.
--
-- KEYS[3] outbox   KEYS[4] groups   KEYS[5] sidecars   KEYS[6] departed   KEYS[7] news
local outbox, groups, sidecars, departed, news = KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]

-- The consumer of returned batches, until they are delivered. No sidecar has this name.
local nobody = '-'

-- A list of fields and values, by field.
local function by_field(list)
  local named = {}
  for i = 1, #list, 2 do named[list[i]] = list[i + 1] end
  return named
end

-- A Redis without memory finishes a script whose first write needs none. This write changes nothing.
local function write_without_memory() redis.call('HDEL', sidecars, '') end

-- Ages are counted in ticks. The pointer moves only while Redis answers and a leader lives, and an outage or a clock
-- that is set moves it by a few ticks at most. Returns a function: for how many ms a tick has been reached.
local function observed()
  local pointer, tick_ms, begun_at = numbers(KEYS[1], 'pointer', 'tick_ms', 'begun_at')
  return function(tick) return math.max(0, pointer - math.max(tick, begun_at)) * tick_ms end, pointer
end

-- Returns a function that replies an entry of the outbox as `take` and `retake` do. A field that this version does
-- cannot read is empty: nil would end the reply.
local function deliveries()
  local reached_for, now
  return function(entry, delivery_count)
    if not now then reached_for, now = observed(), now_ms() end
    local batch, reply = by_field(entry[2]), {entry[1], delivery_count}
    for _, field in ipairs({'epoch', 'added', 'acked', 'storm', 'last'}) do reply[#reply + 1] = batch[field] or '' end
    local tick, decided_ms = tonumber(string.match(entry[1], '^%d+')), tonumber(batch.decided_ms)
    -- Redis' clock includes outages. It may have been set, and then the ticks count.
    local age = decided_ms and string.format('%.0f', math.max(now - decided_ms, reached_for(tick + 1)))
    reply[#reply + 1], reply[#reply + 2] = age or '', batch.messages or ''
    return reply, tonumber(batch.count) or 0
  end
end

local function parts(id)
  local tick, seq = string.match(id, '^(%d+)%-(%d+)$')
  return tonumber(tick), tonumber(seq)
end

-- Whether one id comes before another.
local function before(one, other)
  local tick, seq = parts(one)
  local other_tick, other_seq = parts(other)
  return tick < other_tick or tick == other_tick and seq < other_seq
end

-- Whether an id names the batch that was published under it in this epoch. Ids alone can repeat after Redis lost its
-- data. `published_by` has the last epoch that published, and its first id: only an earlier batch has to be read.
local function is_of(id, epoch)
  local last_epoch, first = string.match(redis.call('HGET', KEYS[1], 'published_by') or '', '^(%d+) (%d+%-%d+)$')
  if first and not before(id, first) then return epoch == last_epoch end
  local entry = redis.call('XRANGE', outbox, id, id)[1]
  return entry and by_field(entry[2]).epoch == epoch
end

-- The least id behind one.
local function behind(id)
  local tick, seq = string.match(id, '^(%d+)%-(%d+)$')
  return string.format('%s-%.0f', tick, seq + 1)
end

-- The state of every group in Redis: name, pending, last-delivered-id. Empty if the outbox is lost.
local function readers()
  local found, known = {}, redis.pcall('XINFO', 'GROUPS', outbox)
  if known.err and string.find(known.err, 'no such key', 1, true) then return found end
  if known.err then error(known.err) end
  for i, reader in ipairs(known) do found[i] = by_field(reader) end
  return found
end

-- The most entries that one trim removes.
local trim_at_once = 200

-- Removes the batches that every group has settled: all before the minimum, over all groups, of lowest pending and
-- first unread. Returns whether there is more to remove.
local function trim()
  local least
  for _, reader in ipairs(readers()) do
    local held = reader.pending > 0 and redis.call('XPENDING', outbox, reader.name, '-', '+', 1)[1]
    local needed = held and held[1] or behind(reader['last-delivered-id'])
    if not least or before(needed, least) then least = needed end
  end
  if not least then return false end
  -- Whole nodes of the stream first: only that can be bounded. A node has at most 100 entries unless Redis is told
  -- otherwise, so fewer than this are left when a trim ends early.
  local removed = redis.call('XTRIM', outbox, 'MINID', '~', least, 'LIMIT', trim_at_once)
  if removed > trim_at_once / 2 then return true end
  redis.call('XTRIM', outbox, 'MINID', '=', least)
  return false
end

-- The entry of a group in `groups`: `e` if it is ephemeral, else `-`; and the tick since which it has no subscriber, if
-- it has none. Nil if there is no such group.
local function kept_of(value) return string.match(value, '^(%S+) ?(%d*)$') end

local function kind_of(group)
  local found = redis.call('HGET', groups, group)
  return found and (kept_of(found))
end

-- Whether there is such a group, if only in the outbox: its entry in `groups` may be lost until the leader repairs
-- that, and its batches are still held.
local function is_known(group)
  if kind_of(group) then return true end
  local pending = redis.pcall('XPENDING', outbox, group)
  if pending.err and not string.find(pending.err, 'NOGROUP', 1, true) then error(pending.err) end
  return not pending.err
end

-- Creates a group that begins after the id `start`. Returns false if the outbox has it, and only `groups` was lost.
local function make(group, start, kind)
  local made = redis.pcall('XGROUP', 'CREATE', outbox, group, start, 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then error(made.err) end
  redis.call('HSET', groups, group, kind)
  return not made.err
end

-- An entry of `sidecars`: the number of the last heartbeat, then each group with a subscriber at the sidecar, with `/e`
-- behind one that is ephemeral.
local function beats_in(entry) return string.match(entry, '^%d+') end
local function groups_in(entry) return string.gmatch(entry, ' ([^/ ]+)/?(e?)') end
local function marked(group, kind) return kind == 'e' and group .. '/e' or group end
local function attends(entry, group)
  for other in groups_in(entry) do
    if other == group then return true end
  end
  return false
end

-- How many sidecars have a subscriber of each group, one sidecar not counted; and the groups that are ephemeral.
local function attendance(except)
  local counts, marks, all = {}, {}, redis.call('HGETALL', sidecars)
  for i = 1, #all, 2 do
    if all[i] ~= except then
      for group, mark in groups_in(all[i + 1]) do counts[group], marks[group] = (counts[group] or 0) + 1, mark end
    end
  end
  return counts, marks
end

local function is_name(group) return #group <= 64 and string.find(group, '^[%w_.%-]+$') end

-- Creates again what was deleted or evicted: the outbox, a group in it, or its entry in `groups`. Returns how many
-- groups were created.
local function repair()
  local known, made = {}, 0
  for _, reader in ipairs(readers()) do known[reader.name] = true end
  if not kind_of('default') then redis.call('HSET', groups, 'default', '-') end
  -- The sidecars have announced the groups that `groups` has lost.
  local _, marks = attendance('')
  for group, mark in pairs(marks) do
    if not kind_of(group) then redis.call('HSET', groups, group, mark == 'e' and 'e' or '-') end
  end
  for _, group in ipairs(redis.call('HKEYS', groups)) do
    if not known[group] then
      redis.call('XGROUP', 'CREATE', outbox, group, kind_of(group) == 'e' and '$' or '0', 'MKSTREAM')
      made = made + 1
    end
    known[group] = nil
  end
  -- A group that was created by hand may have an illegal name.
  for group in pairs(known) do
    if is_name(group) then
      redis.call('HSET', groups, group, string.find(group, '^ephemeral%-' .. string.rep('%x', 8) .. '%-%d+$') and 'e' or '-')
    end
  end
  return made
end

-- The same, and the leader's next `inspect_sidecars` reports it.
local function repair_unreported()
  write_without_memory()
  local made = repair()
  if made > 0 then redis.call('HINCRBY', KEYS[1], 'remade', made) end
end

local function delete(group)
  local destroyed = redis.pcall('XGROUP', 'DESTROY', outbox, group)
  -- If the outbox is lost, so is the group in it.
  local failed = type(destroyed) == 'table' and destroyed.err
  if failed and not string.find(failed, 'requires the key to exist', 1, true) then error(failed) end
  redis.call('HDEL', groups, group)
end

-- Records that a sidecar has a subscriber of a group.
local function join(group, kind, sidecar)
  local entry = redis.call('HGET', sidecars, sidecar) or '0'
  if not attends(entry, group) then redis.call('HSET', sidecars, sidecar, entry .. ' ' .. marked(group, kind)) end
end

-- Records that it has none any more. An ephemeral group is deleted with its last subscriber.
local function leave(group, sidecar)
  local entry = redis.call('HGET', sidecars, sidecar)
  if entry and attends(entry, group) then
    local rest = beats_in(entry)
    for other, mark in groups_in(entry) do
      if other ~= group then rest = rest .. ' ' .. marked(other, mark) end
    end
    redis.call('HSET', sidecars, sidecar, rest)
  end
  if kind_of(group) == 'e' and not attendance(sidecar)[group] then delete(group) end
end

-- Releases batches, for any consumer. Their delivery counts stay as they are.
local function let_go(group, ids)
  if #ids == 0 then return end
  local claim = {'XCLAIM', outbox, group, nobody, 0}
  for _, id in ipairs(ids) do claim[#claim + 1] = id end
  claim[#claim + 1] = 'JUSTID'
  redis.call(unpack(claim))
end

-- Releases the batches of a group that a sidecar holds, up to `most`. Returns how many those were: 0 if there is no
-- such group.
local function let_go_all(group, sidecar, most)
  local ids, pending = {}, redis.pcall('XPENDING', outbox, group, '-', '+', most, sidecar)
  if pending.err and not string.find(pending.err, 'NOGROUP', 1, true) then error(pending.err) end
  for i, held in ipairs(pending) do ids[i] = held[1] end
  let_go(group, ids)
  return #ids
end

-- Sends all sidecars a hint that there are batches to deliver.
local function tell_returned()
  redis.call('XADD', news, 'MAXLEN', 16, '*', 'returned', '1')
end
