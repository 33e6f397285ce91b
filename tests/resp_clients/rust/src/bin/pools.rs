//! Runs each command over a connection that is borrowed from a pool: `pools POOL PORT PASSWORD`.

use std::env::args;
use std::io::stdin;
use std::process::exit;

use bb8_redis::RedisConnectionManager;
use redis::{Cmd, RedisResult, Value, cmd};
use resp_clients::shown;

enum Pool {
    Deadpool(deadpool_redis::Pool),
    Bb8(bb8_redis::bb8::Pool<RedisConnectionManager>),
}

impl Pool {
    async fn query(&self, command: &Cmd) -> RedisResult<Value> {
        match self {
            Pool::Deadpool(pool) => command.query_async(&mut pool.get().await.unwrap()).await,
            Pool::Bb8(pool) => command.query_async(&mut *pool.get().await.unwrap()).await,
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let [_, name, port, password] = <[String; 4]>::try_from(args().collect::<Vec<_>>()).unwrap();
    let user = if password.is_empty() { String::new() } else { format!(":{password}@") };
    let url = format!("redis://{user}127.0.0.1:{port}");
    let pool = match &*name {
        "deadpool" => {
            let runtime = deadpool_redis::Runtime::Tokio1;
            Pool::Deadpool(deadpool_redis::Config::from_url(url).create_pool(Some(runtime)).unwrap())
        }
        "bb8" => {
            let manager = RedisConnectionManager::new(url).unwrap();
            Pool::Bb8(bb8_redis::bb8::Pool::builder().max_size(4).build(manager).await.unwrap())
        }
        _ => exit(64),
    };
    for line in stdin().lines().map(Result::unwrap) {
        let words: Vec<&str> = line.split('\t').skip(1).collect();
        match pool.query(cmd(words[0]).arg(&words[1..])).await {
            Ok(value) => println!("{}", shown(&value)),
            Err(error) => println!("error {} {}", error.code().unwrap_or_default(), error.detail().unwrap_or_default()),
        }
    }
}
