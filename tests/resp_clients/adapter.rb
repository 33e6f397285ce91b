# Runs commands of the scenario with redis-rb: `adapter.rb PORT PASSWORD`.
require 'redis'
port, password = ARGV
clients = Hash.new { |all, number| all[number] = Redis.new(port: port.to_i, password: password.empty? ? nil : password, timeout: 60) }

def shown(reply)
  case reply
  when Array then "[#{reply.map { |element| shown(element) }.join(',')}]"
  when Integer then reply.to_s
  else "\"#{reply}\""
  end
end

$stdout.sync = true
$stdin.each_line do |line|
  number, *words = line.chomp.split("\t")
  begin
    if words[0] == 'PIPELINE'
      replies = clients[number].pipelined { |pipeline| words[1].to_i.times { |id| pipeline.call('AW.ADD', id.to_s) } }
      puts replies.sum(&:first)
    else
      puts shown(clients[number].call(*words))
    end
  rescue Redis::CommandError => error
    puts "error #{error.message}"
  end
end
