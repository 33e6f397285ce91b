<?php
// Runs each command over a persistent connection of phpredis, as one request after the other does:
// `pool.php phpredis PORT PASSWORD`.
require __DIR__ . '/shown.php';
[, , $port, $password] = $argv;

while (($line = fgets(STDIN)) !== false) {
    $words = array_slice(explode("\t", rtrim($line, "\n")), 1);
    try {
        $redis = new Redis();
        $redis->pconnect('127.0.0.1', (int) $port, 2.0);
        if ($password !== '') {
            $redis->auth($password);
        }
        $reply = $redis->rawCommand(...$words);
        echo $reply === false ? 'error ' . $redis->getLastError() : shown($reply), "\n";
    } catch (RedisException $error) {
        echo 'error ', $error->getMessage(), "\n";
    }
    unset($redis);
}
