//! Runs commands of the scenario with redis-rs: `redis-rs PORT PASSWORD`.

use std::collections::HashMap;
use std::env::args;
use std::io::stdin;

use redis::{Connection, Value, cmd};
use resp_clients::shown;

fn main() {
    let (port, password) = (args().nth(1).unwrap(), args().nth(2).unwrap());
    let user = if password.is_empty() { String::new() } else { format!(":{password}@") };
    let client = redis::Client::open(format!("redis://{user}127.0.0.1:{port}")).unwrap();
    let mut connections: HashMap<String, Connection> = HashMap::new();
    for line in stdin().lines().map(Result::unwrap) {
        let words: Vec<&str> = line.split('\t').collect();
        let connection = connections.entry(words[0].to_owned()).or_insert_with(|| client.get_connection().unwrap());
        if words[1] == "PIPELINE" {
            let mut pipe = redis::pipe();
            (0..words[2].parse().unwrap()).for_each(|id: u64| drop(pipe.cmd("AW.ADD").arg(id)));
            let replies: Vec<(u64, u64, u64)> = pipe.query(connection).unwrap();
            println!("{}", replies.iter().map(|(added, ..)| added).sum::<u64>());
            continue;
        }
        match cmd(words[1]).arg(&words[2..]).query::<Value>(connection) {
            Ok(value) => println!("{}", shown(&value)),
            Err(error) => println!("error {} {}", error.code().unwrap_or_default(), error.detail().unwrap_or_default()),
        }
    }
}
