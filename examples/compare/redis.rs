//! Redis by hand: the commands that one would write without ackwheel.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use crate::by_hand::Dialect;
use crate::child::{Child, free_port, installed};
use crate::numbers::{id, push_decimal};

/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long after its add a message is due; there is a set for each of these seconds.
const ACK_TIMEOUT: Duration = Duration::from_secs(15);

/// Seconds in which messages were added that are remembered: more than any is kept.
const REMEMBERED: usize = 128;

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
    /// One sorted set by deadline in seconds, as are ackwheel's ticks: ZADD and ZREM.
    SortedSet,
    /// The same in ms. New entries go to the end of the set, where Redis finds their place sooner than among thousands
    /// of the same second.
    SortedSetByMs,
    /// As ackwheel does it: a hash from message to tick and a set a tick. HSET and SADD, HDEL and SREM, written
    /// together.
    HashAndSets,
    /// The same, and the second command waits for the answer to the first.
    HashThenSets,
}

/// The argument of a command for each message.
#[derive(Clone, Copy, PartialEq)]
enum Words {
    Id,
    ScoreAndId(u64),
    IdAndTick(u64),
}

/// The protocol of Redis. The commands of an operation name all of its messages.
#[derive(Debug)]
pub struct Commands {
    keys: Keys,
    /// Time since 1970. All connections have the same, so that their messages are in the same ticks.
    clock: fn() -> Duration,
    /// The answer to every command: that all of its messages were there, or none.
    answer: Vec<u8>,
    /// The first message of each tick, and that tick: to know of each message which set it is in.
    ticks: VecDeque<(u64, u64)>,
    /// The second command of an operation, where it waits for the first.
    waiting: Vec<u8>,
    /// Commands that are answered of an operation that is not complete.
    answered: usize,
    word: Vec<u8>,
}

impl Commands {
    /// Operations of so many messages.
    pub fn new(keys: Keys, ids: u64) -> Commands {
        Commands {
            keys,
            clock: || UNIX_EPOCH.elapsed().unwrap_or_default(),
            answer: format!(":{ids}\r\n").into_bytes(),
            ticks: VecDeque::new(),
            waiting: Vec::new(),
            answered: 0,
            word: Vec::new(),
        }
    }

    fn commands(&self) -> usize {
        match self.keys {
            Keys::SortedSet | Keys::SortedSetByMs => 1,
            Keys::HashAndSets | Keys::HashThenSets => 2,
        }
    }

    /// When what is added now is due, since 1970.
    fn deadline(&self) -> Duration {
        (self.clock)() + ACK_TIMEOUT
    }

    /// Notes the tick of a message that is added, and of those after it.
    fn note(&mut self, number: u64, tick: u64) {
        if self.ticks.back().is_none_or(|(_, last)| *last != tick) {
            self.ticks.push_back((number, tick));
        }
        if self.ticks.len() > REMEMBERED {
            self.ticks.pop_front();
        }
    }

    /// The tick of what was added.
    fn tick_of(&self, number: u64) -> u64 {
        let began = self.ticks.iter().rev().find(|(first, _)| *first <= number);
        began.expect("it was added, and not long ago").1
    }

    fn write(&mut self, name: &str, key: &str, messages: Range<u64>, words: Words, to: &mut Vec<u8>) {
        let each = if words == Words::Id { 1 } else { 2 };
        to.push(b'*');
        push_decimal(to, (messages.end - messages.start) * each + 2);
        to.extend_from_slice(b"\r\n");
        self.push_word(to, |word| word.extend_from_slice(name.as_bytes()));
        self.push_word(to, |word| word.extend_from_slice(key.as_bytes()));
        for number in messages {
            if let Words::ScoreAndId(score) = words {
                self.push_word(to, |word| push_decimal(word, score));
            }
            self.push_word(to, |word| push_decimal(word, id(number)));
            if let Words::IdAndTick(tick) = words {
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

    /// The second command of an operation, on the set of a tick.
    fn second(&mut self, name: &str, tick: u64, messages: Range<u64>, output: &mut Vec<u8>) {
        let set = format!("tick:{}", tick % ACK_TIMEOUT.as_secs());
        if self.keys == Keys::HashThenSets {
            let mut waiting = std::mem::take(&mut self.waiting);
            self.write(name, &set, messages, Words::Id, &mut waiting);
            self.waiting = waiting;
        } else {
            self.write(name, &set, messages, Words::Id, output);
        }
    }
}

impl Dialect for Commands {
    fn add(&mut self, numbers: Range<u64>, output: &mut Vec<u8>) {
        let deadline = self.deadline();
        let seconds = deadline.as_secs();
        let score = match self.keys {
            Keys::SortedSet => seconds,
            Keys::SortedSetByMs => seconds * 1_000 + u64::from(deadline.subsec_millis()),
            Keys::HashAndSets | Keys::HashThenSets => {
                self.note(numbers.start, seconds);
                self.write("HSET", "messages", numbers.clone(), Words::IdAndTick(seconds), output);
                return self.second("SADD", seconds, numbers, output);
            }
        };
        self.write("ZADD", "deadlines", numbers, Words::ScoreAndId(score), output);
    }

    fn del(&mut self, numbers: Range<u64>, output: &mut Vec<u8>) {
        if self.commands() == 1 {
            return self.write("ZREM", "deadlines", numbers, Words::Id, output);
        }
        self.write("HDEL", "messages", numbers.clone(), Words::Id, output);
        self.second("SREM", self.tick_of(numbers.start), numbers, output);
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

    fn commands(keys: Keys) -> Commands {
        Commands { clock: || Duration::from_millis(6_789), ..Commands::new(keys, 1) }
    }

    fn word(word: &str) -> String {
        format!("${}\r\n{word}\r\n", word.len())
    }

    #[test]
    fn a_sorted_set_has_its_score_first_and_a_hash_its_field() {
        let id = id(3).to_string();
        for (keys, score) in [(Keys::SortedSet, "21"), (Keys::SortedSetByMs, "21789")] {
            let mut output = Vec::new();
            commands(keys).add(3..4, &mut output);
            let expected = format!("*4\r\n{}{}{}{}", word("ZADD"), word("deadlines"), word(score), word(&id));
            assert_eq!(String::from_utf8(output).unwrap(), expected);
        }

        let mut output = Vec::new();
        commands(Keys::HashAndSets).add(3..4, &mut output);
        let hash = format!("*4\r\n{}{}{}{}", word("HSET"), word("messages"), word(&id), word("21"));
        let set = format!("*3\r\n{}{}{}", word("SADD"), word("tick:6"), word(&id));
        assert_eq!(String::from_utf8(output).unwrap(), hash + &set);
    }

    #[test]
    fn a_message_is_taken_out_of_the_set_that_it_was_put_into() {
        let (mut commands, mut output) = (commands(Keys::HashAndSets), Vec::new());
        commands.add(3..4, &mut output);
        commands.clock = || Duration::from_secs(7);
        commands.add(4..5, &mut output);
        for (number, set) in [(4, "tick:7"), (3, "tick:6")] {
            output.clear();
            commands.del(number..number + 1, &mut output);
            let expected = format!("{}{}{}", word("SREM"), word(set), word(&id(number).to_string()));
            assert!(std::str::from_utf8(&output).unwrap().ends_with(&expected), "{number}");
        }
    }

    #[test]
    fn the_second_command_waits_where_it_is_to_wait() {
        let (mut commands, mut output) = (commands(Keys::HashThenSets), Vec::new());
        commands.add(0..1, &mut output);
        assert!(output.starts_with(b"*4\r\n$4\r\nHSET") && !output.windows(4).any(|word| word == b"SADD"));
        output.clear();
        assert_eq!(commands.answered(b":1\r\n", &mut output).unwrap(), (4, 0));
        assert!(output.starts_with(b"*3\r\n$4\r\nSADD"));
        output.clear();
        assert_eq!(commands.answered(b":1\r\n:1", &mut output).unwrap(), (4, 1));
        assert!(output.is_empty());
        assert!(commands.answered(b":0\r\n", &mut output).is_err());
    }
}
