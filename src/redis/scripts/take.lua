-- Delivers batches of a group to the sidecar, which then holds them. Delivers returned batches first, oldest first, and
-- then batches that were never delivered to this group.
--
-- KEYS[1] meta: the state of the ring, with the pointer: the tick that expires next
-- KEYS[2] link: the state of the caller's connection
-- KEYS[3] outbox: the stream of timeout batches, with a consumer group for each group
-- KEYS[4] groups: the name of each group, its kind, and the tick since which it has no subscriber
-- KEYS[5] sidecars: the name of each sidecar, the number of its last heartbeat, and its groups
-- KEYS[6] departed: dead sidecars, and the tick at which each was found dead
-- KEYS[7] news: the stream of hints to all sidecars
-- ARGV[1] generation of the connection, which refuse_stale_connection.lua has compared
-- ARGV[2] name of the sidecar
-- ARGV[3] name of the group
-- ARGV[4] number of messages wanted. The script stops after the first batch that reaches or exceeds this number
-- ARGV[5] maximum number of batches
-- ARGV[6..] ids of returned batches that this sidecar must not get, so that other sidecars get them
-- Replies:
--   {'taken', batch...}: no batch if none is left for this sidecar. A batch is {id, delivery count, epoch, added,
--     acked, storm, last, ms since its tick expired, messages}. `added` and `acked` count messages of the whole tick,
--     `storm` is 1 if unusually many of them timed out, `last` is 1 for the last batch of its tick, and `messages` are
--     the names of the messages, separated by spaces
--   {'unknown'}: the group does not exist
local sidecar, group, wanted, most = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if not is_known(group) then return {'unknown'} end
-- A sidecar that holds batches must have an entry, because only a sidecar with an entry is found dead. The entry is
-- missing if the leader took this sidecar for dead by mistake.
if redis.call('HEXISTS', sidecars, sidecar) == 0 then redis.call('HSET', sidecars, sidecar, 0) end

local reply, messages, delivery = {'taken'}, 0, deliveries()
local function has_room()
  return messages < wanted and #reply - 1 < most
end
local function add(entry, delivery_count)
  local batch, count = delivery(entry, delivery_count)
  reply[#reply + 1] = batch
  messages = messages + count
end

local except = {}
for i = 6, #ARGV do except[ARGV[i]] = true end
for _, returned in ipairs(redis.call('XPENDING', outbox, group, '-', '+', most + #ARGV - 5, nobody)) do
  if not has_room() then break end
  if not except[returned[1]] then
    -- XCLAIM returns nothing if the entry was removed from the stream.
    local claimed = redis.call('XCLAIM', outbox, group, sidecar, 0, returned[1])[1]
    if claimed then add(claimed, returned[4] + 1) end
  end
end
while has_room() do
  local read = redis.call('XREADGROUP', 'GROUP', group, sidecar, 'COUNT', 1, 'STREAMS', outbox, '>')
  if not read then break end
  add(read[1][2][1], 1)
end
return reply
