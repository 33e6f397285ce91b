-- Runs commands of the scenario with lua-redis: `adapter.lua PORT PASSWORD`.
local redis = require 'redis'
local port, password = arg[1], arg[2]
local clients = {}
io.stdout:setvbuf('no')

local function client(number)
  if not clients[number] then
    clients[number] = redis.connect('127.0.0.1', tonumber(port))
    if password ~= '' then clients[number]:auth(password) end
  end
  return clients[number]
end

local function shown(reply)
  if type(reply) == 'table' then
    local elements = {}
    for index, element in ipairs(reply) do elements[index] = shown(element) end
    return '[' .. table.concat(elements, ',') .. ']'
  end
  return type(reply) == 'number' and string.format('%d', reply) or '"' .. tostring(reply) .. '"'
end

for line in io.lines() do
  local words = {}
  for word in line:gmatch('[^\t]+') do words[#words + 1] = word end
  local connection = client(table.remove(words, 1))
  local call = redis.command(words[1])
  local ok, reply = pcall(function()
    if words[1] == 'PIPELINE' then
      local add, sum = redis.command('AW.ADD'), 0
      for id = 0, tonumber(words[2]) - 1 do sum = sum + add(connection, tostring(id))[1] end
      return sum
    end
    return call(connection, unpack(words, 2))
  end)
  print(ok and shown(reply) or 'error ' .. tostring(reply):gsub('^.-: ', '', 1):gsub('^redis error: ', ''))
end
