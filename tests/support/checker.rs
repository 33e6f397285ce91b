//! A load whose every answer is written down, and a checker that sees only what clients see.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::frames::{self, Frame};
use super::raw::{Batch, Raw};

/// Ids added in one frame; the first half of them is acknowledged once that is answered.
const FRAME: u64 = 10;

/// Requests under way at the same time.
const PIPELINED: usize = 8;

/// The answers to one loader.
#[derive(Debug, Default)]
pub struct Ledger {
    /// AddNewMsg was answered.
    pub added: BTreeSet<u64>,
    /// DelMsg was answered acked.
    pub acked: BTreeSet<u64>,
    /// DelMsg was answered late.
    pub late: BTreeSet<u64>,
    /// AddNewMsg was refused with draining.
    pub refused: BTreeSet<u64>,
    /// Requests that were not answered when the connection ended.
    pub unanswered: BTreeSet<u64>,
    pub went_away: bool,
}

/// Adds and acknowledges over a connection of its own until the sidecar closes it.
pub struct Loader {
    connection: Raw,
    ledger: Ledger,
    pending: BTreeMap<u32, (u8, Vec<u64>)>,
    next_id: u64,
    answered: Arc<AtomicU64>,
}

impl Loader {
    /// Starts with ids from `first_id` on; counts the answered AddNewMsgs of all loaders.
    pub fn start(address: SocketAddr, first_id: u64, answered: &Arc<AtomicU64>) -> JoinHandle<Ledger> {
        let loader = Loader {
            connection: Raw::greeted(address),
            ledger: Ledger::default(),
            pending: BTreeMap::new(),
            next_id: first_id,
            answered: Arc::clone(answered),
        };
        thread::spawn(move || loader.run())
    }

    fn run(mut self) -> Ledger {
        loop {
            while self.pending.len() < PIPELINED {
                let ids: Vec<u64> = (self.next_id..self.next_id + FRAME).collect();
                self.next_id += FRAME;
                let correlation = self.connection.request(&frames::add(&ids, 0, 1));
                self.pending.insert(correlation, (frames::ADD, ids));
            }
            match self.connection.receive_any() {
                Some(frame) => self.note(&frame),
                None => break,
            }
        }
        self.ledger.unanswered = self.pending.into_values().flat_map(|(_, ids)| ids).collect();
        self.ledger
    }

    fn note(&mut self, frame: &Frame) {
        match frame.kind {
            frames::PING => return self.connection.pong(frame),
            frames::GO_AWAY => {
                self.ledger.went_away = true;
                return;
            }
            _ => {}
        }
        let (asked, ids) = self.pending.remove(&frame.correlation).expect("one answer to each request");
        match (asked, frame.kind) {
            (frames::ADD, frames::ADD_ANSWER) => {
                assert!(frame.added().1.iter().all(|rearmed| !rearmed), "every id is new");
                self.answered.fetch_add(1, Ordering::Relaxed);
                let half = ids[..ids.len() / 2].to_vec();
                self.ledger.added.extend(ids);
                thread::sleep(Duration::from_micros(500));
                let correlation = self.connection.request(&frames::del(&half));
                self.pending.insert(correlation, (frames::DEL, half));
            }
            (frames::ADD, _) => {
                frame.assert_error(65, frames::RETRYABLE);
                assert!(self.ledger.went_away, "GoAway comes before the first refusal");
                self.ledger.refused.extend(ids);
                thread::sleep(Duration::from_millis(2));
            }
            _ => {
                for (id, outcome) in ids.into_iter().zip(frame.outcomes()) {
                    match *outcome {
                        frames::ACKED => self.ledger.acked.insert(id),
                        frames::LATE => self.ledger.late.insert(id),
                        other => panic!("{id} was added, and is answered {other}"),
                    };
                }
            }
        }
    }
}

/// Takes batches and acknowledges them, unless it is told to hold them for a while.
pub struct Taker {
    pub hold: Arc<AtomicBool>,
    pub taken: Arc<AtomicU64>,
    thread: JoinHandle<Vec<Batch>>,
}

impl Taker {
    /// Subscribes to the default group.
    pub fn start(address: SocketAddr) -> Taker {
        let mut connection = Raw::greeted(address).subscribed("default");
        let (hold, taken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (holds, takes) = (Arc::clone(&hold), Arc::clone(&taken));
        let thread = thread::spawn(move || {
            let (mut batches, mut held) = (Vec::new(), Vec::new());
            while let Some(frame) = connection.receive_any() {
                match frame.kind {
                    frames::PING => connection.pong(&frame),
                    frames::TIMEOUT_BATCH => {
                        let batch = Batch::of(&frame);
                        takes.fetch_add(1, Ordering::Relaxed);
                        held.push(batch.id);
                        batches.push(batch);
                    }
                    _ => {}
                }
                while !held.is_empty() && !holds.load(Ordering::Relaxed) {
                    connection.request(&frames::batch_ack(&std::mem::take(&mut held)));
                }
            }
            batches
        });
        Taker { hold, taken, thread }
    }

    /// All batches, once the sidecar has closed the connection.
    pub fn batches(self) -> Vec<Batch> {
        self.thread.join().expect("the taker saw nothing wrong")
    }
}

/// Asserts that every answered request was kept: what was added ended exactly once.
pub fn assert_every_answer_was_kept(ledgers: &[Ledger], batches: &[Batch]) {
    let mut timed_out: BTreeMap<u64, usize> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for batch in batches {
        assert_eq!(batch.delivery == 1, seen.insert(batch.id), "a duplicate is a redelivery: {:?}", batch.id);
        if batch.delivery == 1 {
            batch.messages.iter().for_each(|(id, _)| *timed_out.entry(*id).or_default() += 1);
        }
    }
    for ledger in ledgers {
        for id in &ledger.added {
            let times = timed_out.remove(id).unwrap_or_default();
            if ledger.acked.contains(id) {
                assert_eq!(times, 0, "{id} was acked, and is in a batch");
            } else if ledger.unanswered.contains(id) {
                assert!(times <= 1, "{id} is in {times} batches");
            } else {
                assert_eq!(times, 1, "{id} was added and not acked");
            }
        }
        for id in &ledger.refused {
            assert_eq!(timed_out.remove(id), None, "{id} was refused, and is in a batch");
        }
        for id in &ledger.unanswered {
            assert!(timed_out.remove(id).unwrap_or_default() <= 1, "{id} is in more than one batch");
        }
    }
    assert_eq!(timed_out, BTreeMap::new(), "in batches, and never added");
}
