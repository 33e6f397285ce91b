-- Defines the functions of the scripts that work on groups. In front of each of these scripts, Redis gets
-- `refuse_stale_connection.lua` and then this file. The keys are the same for all these scripts:
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: hash of groups; the value is the kind (`e` ephemeral, `-` not), then the tick since which the group
--   has no subscriber
-- KEYS[5] sidecars: hash of sidecars; the value is the number of the last heartbeat, then each group that has a
--   subscriber there
-- KEYS[6] departed: sorted set of dead sidecars; the score is the tick at which the sidecar was found dead
-- KEYS[7] news: the stream of hints to all sidecars
local outbox, groups, sidecars, departed, news = KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]

-- The name of the consumer that holds returned batches until a sidecar takes them. No sidecar has this name.
local nobody = '-'

-- Converts a list of alternating fields and values to a table.
local function by_field(list)
  local named = {}
  for i = 1, #list, 2 do named[list[i]] = list[i + 1] end
  return named
end

-- Makes a write that changes nothing and needs no memory. If Redis is out of memory, it runs a script only if its first
-- write needs no memory. So scripts that free memory call this function first.
local function write_without_memory() redis.call('HDEL', sidecars, '') end

-- Returns a function, and the pointer. The function returns how long ago the pointer reached `tick`: the number of
-- ticks since, in ms. The pointer moves only while Redis answers and a leader lives. So an outage, or a clock that is
-- set, changes such an age by a few ticks at most.
local function observed()
  local pointer, tick_ms, begun_at = numbers(KEYS[1], 'pointer', 'tick_ms', 'begun_at')
  return function(tick) return math.max(0, pointer - math.max(tick, begun_at)) * tick_ms end, pointer
end

-- Returns a function that converts an entry of the outbox to the reply format of `take` and `retake`, and also returns
-- its number of messages. A missing field becomes the empty string, because nil would end the reply.
local function deliveries()
  local reached_for, now
  return function(entry, delivery_count)
    if not now then reached_for, now = observed(), now_ms() end
    local batch, reply = by_field(entry[2]), {entry[1], delivery_count}
    for _, field in ipairs({'epoch', 'added', 'acked', 'storm', 'last'}) do reply[#reply + 1] = batch[field] or '' end
    local tick, decided_ms = tonumber(string.match(entry[1], '^%d+')), tonumber(batch.decided_ms)
    -- The age by Redis' clock includes outages. If this clock was set back, that age is too small. So the age in ticks
    -- is a lower limit.
    local age = decided_ms and string.format('%.0f', math.max(now - decided_ms, reached_for(tick + 1)))
    reply[#reply + 1], reply[#reply + 2] = age or '', batch.messages or ''
    return reply, tonumber(batch.count) or 0
  end
end

local function parts(id)
  local tick, seq = string.match(id, '^(%d+)%-(%d+)$')
  return tonumber(tick), tonumber(seq)
end

-- Returns whether the id `one` comes before the id `other`.
local function before(one, other)
  local tick, seq = parts(one)
  local other_tick, other_seq = parts(other)
  return tick < other_tick or tick == other_tick and seq < other_seq
end

-- Returns whether the batch `id` was published in `epoch`. After Redis lost data, ids repeat, but epochs do not.
-- `published_by` is the epoch of the last batch, and the first id that was published in that epoch. So the function
-- reads a batch only if its id is before that first id.
local function is_of(id, epoch)
  local last_epoch, first = string.match(redis.call('HGET', KEYS[1], 'published_by') or '', '^(%d+) (%d+%-%d+)$')
  if first and not before(id, first) then return epoch == last_epoch end
  local entry = redis.call('XRANGE', outbox, id, id)[1]
  return entry and by_field(entry[2]).epoch == epoch
end

-- Returns the next possible id after `id`.
local function behind(id)
  local tick, seq = string.match(id, '^(%d+)%-(%d+)$')
  return string.format('%s-%.0f', tick, seq + 1)
end

-- Returns the XINFO fields of every group in the outbox, for example `name`, `pending` and `last-delivered-id`. Returns
-- an empty list if the outbox is lost.
local function readers()
  local found, known = {}, redis.pcall('XINFO', 'GROUPS', outbox)
  if known.err and string.find(known.err, 'no such key', 1, true) then return found end
  if known.err then error(known.err) end
  for i, reader in ipairs(known) do found[i] = by_field(reader) end
  return found
end

-- Maximum number of entries that the first XTRIM in `trim` removes.
local trim_at_once = 200

-- Removes the batches that every group has settled. A group still needs its lowest pending batch and all later
-- batches. If no batch is pending, it needs its first unread batch and all later ones. The function removes the entries
-- before the lowest id that any group needs. Returns whether there may be more to remove.
local function trim()
  local least
  for _, reader in ipairs(readers()) do
    local held = reader.pending > 0 and redis.call('XPENDING', outbox, reader.name, '-', '+', 1)[1]
    local needed = held and held[1] or behind(reader['last-delivered-id'])
    if not least or before(needed, least) then least = needed end
  end
  if not least then return false end
  -- The first XTRIM removes only whole nodes of the stream (`~`), because only then XTRIM accepts LIMIT. A node has at
  -- most 100 entries by default. If the first XTRIM removed at most 100 entries, LIMIT did not stop it. Then less than
  -- one node is left for the second, exact XTRIM.
  local removed = redis.call('XTRIM', outbox, 'MINID', '~', least, 'LIMIT', trim_at_once)
  if removed > trim_at_once / 2 then return true end
  redis.call('XTRIM', outbox, 'MINID', '=', least)
  return false
end

-- Parses the entry of a group in `groups`. Returns the kind (`e` ephemeral, `-` not), and the tick since which the
-- group has no subscriber, or an empty string.
local function kept_of(value) return string.match(value, '^(%S+) ?(%d*)$') end

local function kind_of(group)
  local found = redis.call('HGET', groups, group)
  return found and (kept_of(found))
end

-- Returns whether the group exists, in `groups` or in the outbox. If Redis lost the entry in `groups`, the outbox still
-- has the batches of the group. The leader restores the entry later.
local function is_known(group)
  if kind_of(group) then return true end
  local pending = redis.pcall('XPENDING', outbox, group)
  if pending.err and not string.find(pending.err, 'NOGROUP', 1, true) then error(pending.err) end
  return not pending.err
end

-- Creates a group that begins after the id `start`, and records it in `groups`. Returns false if the group already
-- existed in the outbox.
local function make(group, start, kind)
  local made = redis.pcall('XGROUP', 'CREATE', outbox, group, start, 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then error(made.err) end
  redis.call('HSET', groups, group, kind)
  return not made.err
end

-- These functions read and write an entry of `sidecars`: the number of the last heartbeat, then each group with a
-- subscriber at the sidecar. The suffix `/e` marks an ephemeral group.
local function beats_in(entry) return string.match(entry, '^%d+') end
local function groups_in(entry) return string.gmatch(entry, ' ([^/ ]+)/?(e?)') end
local function marked(group, kind) return kind == 'e' and group .. '/e' or group end
local function attends(entry, group)
  for other in groups_in(entry) do
    if other == group then return true end
  end
  return false
end

-- Returns two tables by group: the number of sidecars that have a subscriber of the group, and the mark (`e` or empty).
-- Does not count the sidecar `except`.
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

-- Restores lost data: the outbox, groups in the outbox, and entries in `groups`. Returns the number of groups that were
-- created in the outbox.
local function repair()
  local known, made = {}, 0
  for _, reader in ipairs(readers()) do known[reader.name] = true end
  if not kind_of('default') then redis.call('HSET', groups, 'default', '-') end
  -- If `groups` has lost a group, `sidecars` may still name it.
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
  -- `known` now has the groups that are in the outbox and not in `groups`. A group with an illegal name was created by
  -- hand, and is ignored.
  for group in pairs(known) do
    if is_name(group) then
      redis.call('HSET', groups, group, string.find(group, '^ephemeral%-' .. string.rep('%x', 8) .. '%-%d+$') and 'e' or '-')
    end
  end
  return made
end

-- Calls `repair`, and adds the number of groups created to `remade`. The next `inspect_sidecars` reports that number to
-- the leader.
local function repair_unreported()
  write_without_memory()
  local made = repair()
  if made > 0 then redis.call('HINCRBY', KEYS[1], 'remade', made) end
end

local function delete(group)
  local destroyed = redis.pcall('XGROUP', 'DESTROY', outbox, group)
  -- If the outbox is lost, the group in it is lost too.
  local failed = type(destroyed) == 'table' and destroyed.err
  if failed and not string.find(failed, 'requires the key to exist', 1, true) then error(failed) end
  redis.call('HDEL', groups, group)
end

-- Records that a sidecar has subscribers of a group.
local function join(group, kind, sidecar)
  local entry = redis.call('HGET', sidecars, sidecar) or '0'
  if not attends(entry, group) then redis.call('HSET', sidecars, sidecar, entry .. ' ' .. marked(group, kind)) end
end

-- Records that a sidecar has no subscriber of a group any more. Deletes an ephemeral group if no other sidecar has a
-- subscriber.
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

-- Releases batches of a group: the consumer `-` holds them, until a sidecar takes them. Their delivery counts do not
-- change.
local function let_go(group, ids)
  if #ids == 0 then return end
  local claim = {'XCLAIM', outbox, group, nobody, 0}
  for _, id in ipairs(ids) do claim[#claim + 1] = id end
  claim[#claim + 1] = 'JUSTID'
  redis.call(unpack(claim))
end

-- Releases up to `most` batches of a group that a sidecar holds. Returns the number of released batches, or 0 if the
-- group does not exist.
local function let_go_all(group, sidecar, most)
  local ids, pending = {}, redis.pcall('XPENDING', outbox, group, '-', '+', most, sidecar)
  if pending.err and not string.find(pending.err, 'NOGROUP', 1, true) then error(pending.err) end
  for i, held in ipairs(pending) do ids[i] = held[1] end
  let_go(group, ids)
  return #ids
end

-- Sends all sidecars the hint that batches were released.
local function tell_returned()
  redis.call('XADD', news, 'MAXLEN', 16, '*', 'returned', '1')
end
