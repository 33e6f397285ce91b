//! Redis by hand: the commands that one would write without ackwheel.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use crate::by_hand::Dialect;
use crate::child::{Child, free_port, installed};
use crate::numbers::{id, push_decimal};

/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(10);

/// Messages of one second, where time is told by numbers.
const A_SECOND: u64 = 8_192;

/// A server of its own, which keeps nothing.
#[derive(Debug)]
pub struct Redis {
    _process: Child,
    _folder: TempDir,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Redis {
    /// Starts it; `None` where it is not installed.
    ///
    /// # Errors
    ///
    /// When it does not start.
    pub fn start() -> anyhow::Result<Option<Redis>> {
        let Some(program) = installed("REDIS_SERVER", "redis-server") else { return Ok(None) };
        let folder = tempfile::tempdir()?;
        let directory = folder.path().to_str().context("the temporary folder has a name that is no text")?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let port = address.port().to_string();
        let arguments = ["--port", &port, "--bind", "127.0.0.1", "--dir", directory];
        let keeps_nothing = ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"];
        let mut process = Child::guarded(&program, &[&arguments[..], &keeps_nothing].concat())?;
        wait_for(address, &mut process).context("Redis does not start")?;
        Ok(Some(Redis { _process: process, _folder: folder, address }))
    }

    /// Where it is, for a sidecar.
    pub fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// Seconds of a processor that it has had, as it says itself.
    ///
    /// # Errors
    ///
    /// When it does not say.
    pub fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let mut connection = ::redis::Client::open(self.url())?.get_connection()?;
        let info: String = ::redis::cmd("INFO").arg("cpu").query(&mut connection)?;
        let seconds = |name| info.lines().find_map(|line| line.strip_prefix(name)?.parse::<f64>().ok());
        let (user, system) = (seconds("used_cpu_user:"), seconds("used_cpu_sys:"));
        user.zip(system).map(|(user, system)| user + system).context("Redis does not say what it used")
    }
}

/// Waits until a server listens.
///
/// # Errors
///
/// When it ends before, or takes too long.
pub fn wait_for(address: SocketAddr, process: &mut Child) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect(address).is_err() {
        ensure!(!process.has_ended(), "it ended before it listened at {address}");
        ensure!(Instant::now() < deadline, "it does not listen at {address} within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// How a wheel is kept in Redis by hand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keys {
    /// One sorted set by deadline: ZADD and ZREM.
    SortedSet,
    /// As ackwheel does it: a hash from message to tick and a set a tick. HSET and SADD, HDEL and SREM, written
    /// together.
    HashAndSets,
    /// The same, and the second command waits for the answer to the first.
    HashThenSets,
}

/// The protocol of Redis. The commands of an operation name all of its messages.
#[derive(Debug)]
pub struct Commands {
    keys: Keys,
    /// The answer to every command: that all of its messages were there, or none.
    answer: Vec<u8>,
    /// The second command of an operation, where it waits for the first.
    waiting: Vec<u8>,
    /// Commands that are answered of an operation that is not complete.
    answered: usize,
    word: Vec<u8>,
}

impl Commands {
    /// Operations of so many messages.
    pub fn new(keys: Keys, ids: u64) -> Commands {
        let answer = format!(":{ids}\r\n").into_bytes();
        Commands { keys, answer, waiting: Vec::new(), answered: 0, word: Vec::new() }
    }

    fn commands(&self) -> usize {
        if self.keys == Keys::SortedSet { 1 } else { 2 }
    }

    /// A command on a key, with one or two words a message.
    fn write(
        &mut self,
        name: &str,
        key: &str,
        words: Range<u64>,
        pairs: bool,
        tick_first: bool,
        to: &mut Vec<u8>,
    ) {
        let count = (words.end - words.start) * (1 + u64::from(pairs)) + 2;
        to.push(b'*');
        push_decimal(to, count);
        to.extend_from_slice(b"\r\n");
        self.push_word(to, |word| word.extend_from_slice(name.as_bytes()));
        self.push_word(to, |word| word.extend_from_slice(key.as_bytes()));
        let tick = words.start / A_SECOND;
        for number in words {
            if pairs && tick_first {
                self.push_word(to, |word| push_decimal(word, tick));
            }
            self.push_word(to, |word| push_decimal(word, id(number)));
            if pairs && !tick_first {
                self.push_word(to, |word| push_decimal(word, tick));
            }
        }
    }

    fn push_word(&mut self, to: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
        self.word.clear();
        write(&mut self.word);
        to.push(b'$');
        push_decimal(to, self.word.len() as u64);
        to.extend_from_slice(b"\r\n");
        to.extend_from_slice(&self.word);
        to.extend_from_slice(b"\r\n");
    }

    /// Where the second command of an operation goes.
    fn second(&mut self, tick_command: &str, numbers: Range<u64>, output: &mut Vec<u8>) {
        let list = format!("tick:{}", numbers.start / A_SECOND % 15);
        if self.keys == Keys::HashThenSets {
            let mut waiting = std::mem::take(&mut self.waiting);
            self.write(tick_command, &list, numbers, false, false, &mut waiting);
            self.waiting = waiting;
        } else {
            self.write(tick_command, &list, numbers, false, false, output);
        }
    }
}

impl Dialect for Commands {
    fn add(&mut self, numbers: Range<u64>, output: &mut Vec<u8>) {
        if self.keys == Keys::SortedSet {
            return self.write("ZADD", "deadlines", numbers, true, true, output);
        }
        self.write("HSET", "messages", numbers.clone(), true, false, output);
        self.second("SADD", numbers, output);
    }

    fn del(&mut self, numbers: Range<u64>, output: &mut Vec<u8>) {
        if self.keys == Keys::SortedSet {
            return self.write("ZREM", "deadlines", numbers, false, false, output);
        }
        self.write("HDEL", "messages", numbers.clone(), false, false, output);
        self.second("SREM", numbers, output);
    }

    fn answered(&mut self, input: &[u8], output: &mut Vec<u8>) -> anyhow::Result<(usize, u64)> {
        let answers = input.chunks_exact(self.answer.len());
        let mut count = 0;
        for answer in answers {
            if answer != self.answer {
                bail!("Redis answers {:?}", String::from_utf8_lossy(answer));
            }
            count += 1;
        }
        output.append(&mut self.waiting);
        self.answered += count;
        let operations = self.answered / self.commands();
        self.answered %= self.commands();
        Ok((count * self.answer.len(), operations as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sorted_set_has_its_score_first_and_a_hash_its_field() {
        let mut output = Vec::new();
        Commands::new(Keys::SortedSet, 1).add(0..1, &mut output);
        let id = id(0).to_string();
        let word = |word: &str| format!("${}\r\n{word}\r\n", word.len());
        let expected = format!("*4\r\n{}{}{}{}", word("ZADD"), word("deadlines"), word("0"), word(&id));
        assert_eq!(String::from_utf8(output).unwrap(), expected);

        let mut output = Vec::new();
        Commands::new(Keys::HashAndSets, 1).add(0..1, &mut output);
        let hash = format!("*4\r\n{}{}{}{}", word("HSET"), word("messages"), word(&id), word("0"));
        let set = format!("*3\r\n{}{}{}", word("SADD"), word("tick:0"), word(&id));
        assert_eq!(String::from_utf8(output).unwrap(), hash + &set);
    }

    #[test]
    fn the_second_command_waits_where_it_is_to_wait() {
        let (mut commands, mut output) = (Commands::new(Keys::HashThenSets, 1), Vec::new());
        commands.del(0..1, &mut output);
        assert!(output.starts_with(b"*3\r\n$4\r\nHDEL") && !output.windows(4).any(|word| word == b"SREM"));
        output.clear();
        assert_eq!(commands.answered(b":1\r\n", &mut output).unwrap(), (4, 0));
        assert!(output.starts_with(b"*3\r\n$4\r\nSREM"));
        output.clear();
        assert_eq!(commands.answered(b":1\r\n:1", &mut output).unwrap(), (4, 1));
        assert!(output.is_empty());
        assert!(commands.answered(b":0\r\n", &mut output).is_err());
    }
}
