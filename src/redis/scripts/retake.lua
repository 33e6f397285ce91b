-- Delivers batches to the sidecar again, if the sidecar still holds them, or if they were returned and no sidecar holds
-- them. The reply skips batches that are settled, dropped or held by another sidecar.
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
-- ARGV[4], ARGV[6].. id of each batch
-- ARGV[5], ARGV[7].. epoch of that batch
-- Replies:
--   {'taken', batch...}: a batch is {id, delivery count, epoch, added, acked, storm, last, ms since its tick expired,
--     messages}. `added` and `acked` count messages of the whole tick, `storm` is 1 if unusually many of them timed
--     out, `last` is 1 for the last batch of its tick, and `messages` are the names, separated by spaces
--   {'unknown'}: the group does not exist
local sidecar, group = ARGV[2], ARGV[3]
if not is_known(group) then return {'unknown'} end
local reply, delivery = {'taken'}, deliveries()
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  local held = redis.call('XPENDING', outbox, group, id, id, 1)[1]
  if held and (held[2] == sidecar or held[2] == nobody) and is_of(id, ARGV[i + 1]) then
    -- XCLAIM returns nothing if the entry was removed from the stream.
    local claimed = redis.call('XCLAIM', outbox, group, sidecar, 0, id)[1]
    if claimed then reply[#reply + 1] = delivery(claimed, held[4] + 1) end
  end
end
return reply
