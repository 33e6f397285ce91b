<?php
// A logic node with phpredis. Run it as `php logic_node.php`, with PORT and TOKEN in the environment.
$port = (int) (getenv('PORT') ?: 7417);
$token = (string) getenv('TOKEN');

function store_offline(string $id, string $client, string ...$rest) {
    echo "offline $id $client\n";
}

$redis = new Redis();
$redis->connect('127.0.0.1', $port, 2.0);
$redis->setOption(Redis::OPT_READ_TIMEOUT, 10);
if ($token !== '') $redis->auth($token);
$redis->rawCommand('AW.ADD', '101:7', '102:8'); // before the push
print_r($redis->rawCommand('AW.DEL', '101:7')); // the Ack of the phone: ['acked']
while (true) {
    foreach ($redis->rawCommand('AW.TAKE', 'default', 'BLOCK', 2000) as [$batch, , $messages]) {
        foreach ($messages as $message) store_offline(...explode(':', "$message:0"));
        $redis->rawCommand('AW.ACK', 'default', $batch);
    }
}
