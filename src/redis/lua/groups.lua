-- Behind the guard, in front of every script that works on groups: what they share. They all have the same keys.
--
-- KEYS[3] outbox   KEYS[4] groups   KEYS[5] members   KEYS[6] sidecars   KEYS[7] news
local outbox, groups, members, sidecars, news = KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]

-- Holds what was given back, until somebody takes it. No sidecar has this name.
local nobody = '-'

-- A list of fields and values, by field.
local function by_field(list)
  local named = {}
  for i = 1, #list, 2 do named[list[i]] = list[i + 1] end
  return named
end

-- An entry of the outbox as `take` and `take_again` reply it. What this version does not know to read is empty: a
-- reply would end there.
local function delivery(entry, delivery_count)
  local batch, reply = by_field(entry[2]), {entry[1], delivery_count}
  for _, field in ipairs({'epoch', 'added', 'acked', 'storm', 'last', 'decided_ms', 'messages'}) do
    reply[#reply + 1] = batch[field] or ''
  end
  return reply, tonumber(batch.count) or 0
end

-- Whether an entry of this id is in the outbox and was published in this epoch. Ids alone can come again after
-- Redis lost its data.
local function is_of(id, epoch)
  local entry = redis.call('XRANGE', outbox, id, id)[1]
  return entry and by_field(entry[2]).epoch == epoch
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

-- The least id behind one.
local function behind(id)
  local tick, seq = string.match(id, '^(%d+)%-(%d+)$')
  return string.format('%s-%.0f', tick, seq + 1)
end

-- What Redis knows of every group: name, pending, last-delivered-id. Nothing where the outbox is lost.
local function readers()
  local found, known = {}, redis.pcall('XINFO', 'GROUPS', outbox)
  if known.err and string.find(known.err, 'no such key', 1, true) then return found end
  if known.err then error(known.err) end
  for i, reader in ipairs(known) do found[i] = by_field(reader) end
  return found
end

-- The most entries that one trim removes.
local trim_at_once = 200

-- Removes what every group has settled: all that comes before the least, over all groups, of lowest pending and
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

-- Whether a group is ephemeral: `e`, else `-`. Nothing where there is no such group.
local function kind_of(group)
  local found = redis.call('HGET', groups, group)
  return found and string.match(found, ' (%S+)$')
end

-- Whether there is such a group, if only in the outbox: its entry in `groups` may be lost until a beat mends that, and
-- what is held of it is held all the same.
local function is_known(group)
  if kind_of(group) then return true end
  local pending = redis.pcall('XPENDING', outbox, group)
  if pending.err and not string.find(pending.err, 'NOGROUP', 1, true) then error(pending.err) end
  return not pending.err
end

-- Notes that a group has a subscriber now.
local function attend(group, kind)
  redis.call('HSET', groups, group, now_ms() .. ' ' .. kind)
end

-- Makes a group that begins behind the id `start`. Returns false where the outbox knew it, and `groups` alone was
-- lost.
local function make(group, start, kind)
  local made = redis.pcall('XGROUP', 'CREATE', outbox, group, start, 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then error(made.err) end
  attend(group, kind)
  return not made.err
end

-- Every membership: a list of {field, group, sidecar}.
local function memberships()
  local found = {}
  for _, field in ipairs(redis.call('HKEYS', members)) do
    local group, sidecar = string.match(field, '^(%S+) (.*)$')
    if group then found[#found + 1] = {field, group, sidecar} end
  end
  return found
end

-- Makes what was lost, where somebody deleted it or a Redis evicted it: the outbox, a group in it, or its entry in
-- `groups`. Returns how many groups had to be made.
local function mend()
  local known, made = {}, 0
  for _, reader in ipairs(readers()) do known[reader.name] = true end
  if not kind_of('default') then attend('default', '-') end
  for _, group in ipairs(redis.call('HKEYS', groups)) do
    if not known[group] then
      redis.call('XGROUP', 'CREATE', outbox, group, kind_of(group) == 'e' and '$' or '0', 'MKSTREAM')
      made = made + 1
    end
    known[group] = nil
  end
  -- A group with members is noted by the beat of their sidecar, which knows what it is. Others have made what is no
  -- name of a group.
  for _, membership in ipairs(memberships()) do known[membership[2]] = nil end
  for group in pairs(known) do
    if string.find(group, '^[%w_.%-]+$') and #group <= 64 then
      attend(group, string.find(group, '^ephemeral%-' .. string.rep('%x', 8) .. '%-%d+$') and 'e' or '-')
    end
  end
  return made
end

-- The same, where the next beat is to tell of it.
local function mend_untold()
  -- A Redis without memory lets a script finish whose first write needs none, as this one, which deletes nothing: who
  -- subscribes, and who deletes a group, is what frees some.
  redis.call('HDEL', members, '')
  local made = mend()
  if made > 0 then redis.call('HINCRBY', KEYS[1], 'remade', made) end
end

-- How many sidecars have a subscriber of a group, one of them not counted.
local function sidecars_of(group, except)
  local count = 0
  for _, membership in ipairs(memberships()) do
    if membership[2] == group and membership[3] ~= except then count = count + 1 end
  end
  return count
end

local function delete(group)
  local destroyed = redis.pcall('XGROUP', 'DESTROY', outbox, group)
  -- Where the outbox itself is lost, so is the group in it.
  local failed = type(destroyed) == 'table' and destroyed.err
  if failed and not string.find(failed, 'requires the key to exist', 1, true) then error(failed) end
  redis.call('HDEL', groups, group)
  for _, membership in ipairs(memberships()) do
    if membership[2] == group then redis.call('HDEL', members, membership[1]) end
  end
end

-- Ends the membership of a sidecar. An ephemeral group goes with its last one.
local function leave(group, sidecar)
  redis.call('HDEL', members, group .. ' ' .. sidecar)
  if kind_of(group) == 'e' and sidecars_of(group, sidecar) == 0 then delete(group) end
end

-- Lets go of batches, for anyone to take. Their delivery counts stay as they are.
local function let_go(group, ids)
  if #ids == 0 then return end
  local claim = {'XCLAIM', outbox, group, nobody, 0}
  for _, id in ipairs(ids) do claim[#claim + 1] = id end
  claim[#claim + 1] = 'JUSTID'
  redis.call(unpack(claim))
end

-- Lets go of what a sidecar holds of a group, up to `most` batches. Returns how many those were: none, where the group
-- is not there.
local function let_go_all(group, sidecar, most)
  local ids, pending = {}, redis.pcall('XPENDING', outbox, group, '-', '+', most, sidecar)
  if pending.err and not string.find(pending.err, 'NOGROUP', 1, true) then error(pending.err) end
  for i, held in ipairs(pending) do ids[i] = held[1] end
  let_go(group, ids)
  return #ids
end

-- Tells all sidecars that there is something to take.
local function tell_returned()
  redis.call('XADD', news, 'MAXLEN', 16, '*', 'returned', '1')
end
