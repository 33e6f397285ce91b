<?php
// Runs commands of the scenario with phpredis or predis: `adapter.php LIBRARY PORT PASSWORD`.
require __DIR__ . '/shown.php';
[, $library, $port, $password] = $argv;
$clients = [];

function client(string $number) {
    global $clients, $library, $port, $password;
    if (!isset($clients[$number])) {
        if ($library === 'phpredis') {
            $redis = new Redis();
            $redis->connect('127.0.0.1', (int) $port, 2.0);
            $redis->setOption(Redis::OPT_READ_TIMEOUT, 60);
            if ($password !== '') {
                $redis->auth($password);
            }
            $clients[$number] = function (array $words) use ($redis) {
                $reply = $redis->rawCommand(...$words);
                if ($reply === false && $redis->getLastError() !== null) {
                    throw new Exception($redis->getLastError());
                }
                return $reply;
            };
        } else {
            require_once 'Predis/Autoloader.php';
            Predis\Autoloader::register();
            $parameters = ['port' => (int) $port, 'read_write_timeout' => 60];
            $redis = new Predis\Client($password === '' ? $parameters : $parameters + ['password' => $password]);
            $clients[$number] = function (array $words) use ($redis) {
                $reply = $redis->executeRaw($words, $is_error);
                if ($is_error) {
                    throw new Exception($reply);
                }
                return $reply;
            };
        }
    }
    return $clients[$number];
}

while (($line = fgets(STDIN)) !== false) {
    $words = explode("\t", rtrim($line, "\n"));
    $number = array_shift($words);
    try {
        if ($words[0] === 'PIPELINE') {
            $sum = 0;
            for ($id = 0; $id < (int) $words[1]; $id++) {
                $sum += client($number)(['AW.ADD', (string) $id])[0];
            }
            echo $sum, "\n";
        } else {
            echo shown(client($number)($words)), "\n";
        }
    } catch (Exception $error) {
        echo 'error ', $error->getMessage(), "\n";
    }
}
