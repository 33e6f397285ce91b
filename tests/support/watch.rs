//! `ackwheel watch --json`, or `consume --json` of a group: its lines as they come.

use std::sync::mpsc::Receiver;
use std::time::Instant;

use serde::Deserialize;

use super::PATIENCE;
use super::process::{Process, lines, program};
use super::sidecar::Sidecar;

/// A line: exactly the keys that are promised, ids as text.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    pub ring: u16,
    pub epoch: u64,
    pub tick: u64,
    pub seq: u32,
    pub delivery: u32,
    pub age_ms: u64,
    pub added: u64,
    pub acked: u64,
    pub storm: bool,
    pub drained: bool,
    pub ids: Vec<String>,
    pub clients: Vec<String>,
    pub attempts: Vec<u8>,
    /// When it came.
    #[serde(skip, default = "Instant::now")]
    pub arrived: Instant,
}

impl Line {
    /// The name of the batch.
    pub fn batch(&self) -> (u16, u64, u64, u32) {
        (self.ring, self.epoch, self.tick, self.seq)
    }

    /// Its messages, in order.
    pub fn messages(&self) -> Vec<(u64, u64)> {
        assert_eq!((self.ids.len(), self.ids.len()), (self.clients.len(), self.attempts.len()));
        let number = |text: &String| text.parse().expect("an id is a number");
        let mut messages: Vec<_> = self.ids.iter().map(number).zip(self.clients.iter().map(number)).collect();
        messages.sort_unstable();
        messages
    }

    /// The ids of messages without a client, in order.
    pub fn plain_ids(&self) -> Vec<u64> {
        self.messages().into_iter().map(|(id, client)| if client == 0 { id } else { panic!("{self:?}") }).collect()
    }
}

/// A running `watch`, or `consume` if its flags name a group. It ends with its test.
#[derive(Debug)]
pub struct Watch {
    process: Process,
    lines: Receiver<(Instant, String)>,
    remarks: Receiver<(Instant, String)>,
}

impl Watch {
    /// Watches, and returns once the sidecar counts it as a subscriber.
    pub fn start(sidecar: &Sidecar, flags: &[&str]) -> Watch {
        let before = sidecar.subscribers();
        let watch = Watch::spawn(&sidecar.listen.to_string(), flags);
        sidecar.wait_for_subscribers(before + 1);
        watch
    }

    /// Watches an address.
    pub fn spawn(address: &str, flags: &[&str]) -> Watch {
        let verb = if flags.contains(&"--group") { "consume" } else { "watch" };
        let mut process = Process::spawn(program(&[verb, "--json", "--addr", address]).args(flags));
        let (remarks, lines) = (lines(process.stderr()), lines(process.stdout()));
        Watch { process, lines, remarks }
    }

    /// The next line that it says beside them, after those of the start.
    #[track_caller]
    pub fn remark(&self) -> String {
        loop {
            let text = self.remarks.recv_timeout(PATIENCE).expect("it says something").1;
            if !text.contains("this command takes") && !text.contains("waiting for timeout batches") {
                return text;
            }
        }
    }

    /// The next line.
    #[track_caller]
    pub fn next(&self) -> Line {
        let (arrived, text) = match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(error) => panic!("no line came: {error}"),
        };
        let line: Line = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        Line { arrived, ..line }
    }

    /// As many lines.
    #[track_caller]
    pub fn take(&self, count: usize) -> Vec<Line> {
        (0..count).map(|_| self.next()).collect()
    }

    /// The lines that are there already.
    pub fn try_take(&self) -> Vec<Line> {
        let parse = |(_, text): (Instant, String)| serde_json::from_str(&text).expect("a line is JSON");
        self.lines.try_iter().map(parse).collect()
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        self.process.kill();
    }
}
