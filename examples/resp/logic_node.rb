# A logic node with redis-rb. Run it as `ruby logic_node.rb`, with PORT and TOKEN in the environment.
require 'redis'
PORT = (ENV['PORT'] || 7417).to_i
TOKEN = ENV['TOKEN']
$stdout.sync = true

def store_offline(id, client = '0')
  puts "offline #{id} #{client}"
end

redis = Redis.new(port: PORT, password: TOKEN, timeout: 10)
redis.call('AW.ADD', '101:7', '102:8') # before the push
p redis.call('AW.DEL', '101:7') # the Ack of the phone: ["acked"]
loop do
  redis.call('AW.TAKE', 'default', 'BLOCK', 2000).each do |batch, _, messages|
    messages.each { |message| store_offline(*message.split(':')) }
    redis.call('AW.ACK', 'default', batch)
  end
end
