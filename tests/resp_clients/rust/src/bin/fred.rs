//! Runs commands of the scenario with fred: `fred PORT PASSWORD`.

use std::collections::HashMap;
use std::env::args;
use std::io::stdin;

use fred::prelude::*;
use fred::types::{ClusterHash, CustomCommand};

fn shown(value: &Value) -> String {
    match value {
        Value::Integer(number) => number.to_string(),
        Value::String(text) => format!("{:?}", &**text),
        Value::Array(elements) => format!("[{}]", elements.iter().map(shown).collect::<Vec<_>>().join(",")),
        other => format!("{other:?}"),
    }
}

async fn call(client: &Client, name: &str, arguments: Vec<String>) -> Result<Value, Error> {
    client.custom(CustomCommand::new(name.to_owned(), ClusterHash::FirstKey, false), arguments).await
}

#[tokio::main]
async fn main() {
    let (port, password) = (args().nth(1).unwrap(), args().nth(2).unwrap());
    let mut clients: HashMap<String, Client> = HashMap::new();
    for line in stdin().lines().map(Result::unwrap) {
        let words: Vec<String> = line.split('\t').map(String::from).collect();
        if !clients.contains_key(&words[0]) {
            let mut config = Config::from_url(&format!("redis://127.0.0.1:{port}")).unwrap();
            config.password = (!password.is_empty()).then(|| password.clone());
            let client = Builder::from_config(config).build().unwrap();
            client.init().await.unwrap();
            clients.insert(words[0].clone(), client);
        }
        let client = &clients[&words[0]];
        if words[1] == "PIPELINE" {
            let pipeline = client.pipeline();
            let count: u64 = words[2].parse().unwrap();
            for id in 0..count {
                let command = CustomCommand::new("AW.ADD", ClusterHash::FirstKey, false);
                let _: () = pipeline.custom(command, vec![id.to_string()]).await.unwrap();
            }
            let replies: Vec<(u64, u64, u64)> = pipeline.all().await.unwrap();
            println!("{}", replies.iter().map(|(added, ..)| added).sum::<u64>());
            continue;
        }
        match call(client, &words[1], words[2..].to_vec()).await {
            Ok(value) => println!("{}", shown(&value)),
            Err(error) => println!("error {}", error.details()),
        }
    }
}
