//! Calls the script of adds and dels without a sidecar, to measure the speed of Redis itself.

use std::hash::{BuildHasher, RandomState};

use ackwheel::core::{Client, Message};
use ackwheel::redis::SCHEMA;
use anyhow::{Context, ensure};
use redis::io::tcp::TcpSettings;
use redis::{Cmd, Connection, IntoConnectionInfo, Script, Value};

/// The number of lists of a ring with 15 slots, as `src/redis/keys.rs` has it.
const LISTS: usize = 15 + 34;

/// The most messages of a call, as for a sidecar.
const MAX_MESSAGES: usize = 1_000;

/// Marks the first message of a frame.
const BEGINS: u8 = 128;

/// A connection to Redis that calls the script of adds and dels, as often in flight as its user likes.
pub struct DirectCalls {
    connection: Connection,
    /// The script, its keys, and the generation of the link: the beginning of each call.
    prefix: Cmd,
    last: u64,
}

impl DirectCalls {
    /// Connects to the Redis at `url`, loads the script, and joins ring 0 of `namespace`, which has the default
    /// dimensions.
    ///
    /// # Errors
    ///
    /// When Redis cannot be reached or does not run the scripts.
    pub fn open(url: &str, namespace: &str) -> anyhow::Result<DirectCalls> {
        let info = url.into_connection_info()?.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let mut connection = redis::Client::open(info)?.get_connection()?;
        // Redis keeps the last chunk of each name, so each connection has a new one.
        let name = format!("compare-{:016x}", RandomState::new().hash_one(0));
        let key = |name: &str| format!("{{{namespace}:0}}:{name}");
        let lists: Vec<String> = (0..LISTS).map(|list| key(&format!("tick:{list}"))).collect();
        let link = key(&format!("link:{name}"));

        let mut open = redis::cmd("EVAL");
        open.arg(include_str!("../../src/redis/scripts/open.lua")).arg(10 + LISTS).arg(key("meta")).arg(&link);
        open.arg(&["outbox", "groups", "sidecars", "held_acks", "lease", "messages", "ticks", "late"].map(key));
        open.arg(&lists).arg((SCHEMA, SCHEMA, 15, 1_000, 1, LISTS, &name, &name, 0, 0, 0));
        let opened: Vec<Value> = open.query(&mut connection)?;
        let generation: i64 = redis::from_redis_value(opened.into_iter().nth(1).context("the ring differs")?)?;

        let source = concat!(
            include_str!("../../src/redis/scripts/refuse_stale_connection.lua"),
            include_str!("../../src/redis/scripts/apply.lua")
        );
        redis::cmd("SCRIPT").arg("LOAD").arg(source).exec(&mut connection)?;
        let mut prefix = redis::cmd("EVALSHA");
        prefix.arg(Script::new(source).get_hash()).arg(4 + LISTS).arg(key("meta")).arg(&link);
        prefix.arg(key("messages")).arg(key("ticks")).arg(&lists).arg(generation);
        Ok(DirectCalls { connection, prefix, last: 0 })
    }

    /// The bytes of a call that adds distinct messages, at most 1,000. Calls are sent in the order in which they are
    /// made.
    pub fn add(&mut self, messages: &[Message]) -> Vec<u8> {
        self.call("a 15 1 ", messages)
    }

    /// The bytes of a call that deletes distinct messages, at most 1,000. Calls are sent in the order in which they are
    /// made.
    pub fn del(&mut self, messages: &[Message]) -> Vec<u8> {
        self.call("d 0 0 ", messages)
    }

    /// One frame of the class `class`, with the arguments that the header of `apply.lua` names.
    fn call(&mut self, class: &str, messages: &[Message]) -> Vec<u8> {
        assert!((1..=MAX_MESSAGES).contains(&messages.len()), "a call carries 1 to {MAX_MESSAGES} messages");
        let is_add = class.starts_with('a');
        let mut kinds = vec![1; messages.len()];
        kinds[0] |= BEGINS;
        self.last += 1;
        let mut call = self.prefix.clone();
        call.arg((self.last, u64::MAX >> 12, u8::from(is_add), if is_add { messages.len() } else { 0 }));
        call.arg(class).arg(kinds).arg(("", "", "", 0));
        for message in messages {
            if message.client == Client(0) {
                call.arg(message.msg_id.0)
            } else {
                call.arg(message.to_string())
            };
        }
        call.get_packed_command()
    }

    /// Sends a call, and does not wait for its answer.
    ///
    /// # Errors
    ///
    /// When the connection is lost.
    pub fn send(&mut self, call: &[u8]) -> anyhow::Result<()> {
        Ok(self.connection.send_packed_command(call)?)
    }

    /// Waits for the next answer; returns how many messages it added or acknowledged.
    ///
    /// # Errors
    ///
    /// When the connection is lost, or Redis did not run the call.
    pub fn receive(&mut self) -> anyhow::Result<usize> {
        let answer = self.connection.recv_response()?.extract_error()?;
        let (word, _tick_due, outcomes): (String, u64, String) = read(answer)?;
        ensure!(word == "ok", "the script of adds and dels answers {word}");
        Ok(outcomes.bytes().filter(|letter| matches!(letter, b'a' | b'k')).count())
    }
}

/// The first three values of an answer.
fn read(answer: Value) -> anyhow::Result<(String, u64, String)> {
    let Value::Array(mut values) = answer else { anyhow::bail!("the answer {answer:?} is no array") };
    ensure!(values.len() >= 3, "the answer {values:?} is too short");
    values.truncate(3);
    Ok(redis::from_redis_value(Value::Array(values))?)
}
