//! The operations of a subject, and their time.

use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use ackwheel::core::Message;

use super::Found;
use crate::child::resident_bytes;
use crate::numbers::{figure, messages};

/// Messages that are added or deleted at once.
const BATCH: usize = 256;

/// Something that keeps messages in flight.
pub trait Subject {
    /// Takes messages into flight; says how many were not in flight before.
    fn add(&mut self, messages: &[Message]) -> usize;

    /// Takes messages out of flight; says how many were there.
    fn del(&mut self, messages: &[Message]) -> usize;
}

/// The load of a subject.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Messages in flight at any time.
    pub in_flight: u64,
    /// How long the measured part lasts.
    pub seconds: f64,
}

/// Messages in the order in which they are added, and in the one in which they are acknowledged: by their ids, which
/// are random. Phones do not answer in the order of the pushes, and some subjects would live on that.
struct Half {
    added: Vec<Message>,
    acked: Vec<Message>,
}

impl Half {
    fn new(numbers: Range<u64>) -> Half {
        let added = messages(numbers);
        let mut acked = added.clone();
        acked.sort_unstable_by_key(|message| message.msg_id);
        Half { added, acked }
    }
}

/// The ids of one thread: as many that are in flight at first as that come after them.
struct Ids {
    oldest: Half,
    fresh: Half,
}

impl Ids {
    fn new(thread: u64, count: u64) -> Ids {
        let first = thread << 40;
        Ids { oldest: Half::new(first..first + count), fresh: Half::new(first + count..first + 2 * count) }
    }

    fn fill(&self, subject: &mut impl Subject) {
        for batch in self.oldest.added.chunks(BATCH) {
            assert_eq!(subject.add(batch), batch.len(), "an id that was not in flight is added");
        }
    }

    /// Adds what is new and deletes what was there, batch by batch, for so long; returns the number of pairs.
    fn run(&mut self, subject: &mut impl Subject, duration: Duration) -> u64 {
        let start = Instant::now();
        let mut pairs = 0;
        loop {
            for (fresh, oldest) in self.fresh.added.chunks(BATCH).zip(self.oldest.acked.chunks(BATCH)) {
                assert_eq!(subject.add(fresh), fresh.len(), "an id that was not in flight is added");
                assert_eq!(subject.del(oldest), oldest.len(), "an id that was in flight is deleted");
                pairs += fresh.len() as u64;
                if start.elapsed() >= duration {
                    return pairs;
                }
            }
            // Messages added in this pass are deleted in the next, and the other way round.
            std::mem::swap(&mut self.fresh, &mut self.oldest);
        }
    }
}

impl Load {
    fn duration(self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// One thread.
    pub fn on<S: Subject>(self, make: impl FnOnce() -> S) -> anyhow::Result<Found> {
        let mut ids = Ids::new(0, self.in_flight);
        let before = resident_bytes("self")?;
        let mut subject = make();
        ids.fill(&mut subject);
        let bytes_a_message = |now: u64| figure(now.saturating_sub(before)) / figure(self.in_flight);
        let bytes = bytes_a_message(resident_bytes("self")?);
        let start = Instant::now();
        let pairs = ids.run(&mut subject, self.duration());
        let pair_ns = ns_a_pair(start.elapsed(), pairs);
        let bytes_after = bytes_a_message(resident_bytes("self")?);
        Ok(Found { pair_ns: Some(pair_ns), bytes: Some(bytes), bytes_after: Some(bytes_after), decide_ms: None })
    }

    /// Several threads, each with a handle to one subject and ids of its own.
    pub fn on_threads<S: Subject + Send>(self, handles: Vec<S>) -> anyhow::Result<Found> {
        let threads = handles.len() as u64;
        let barrier = Barrier::new(handles.len());
        let run = |thread: u64, mut subject: S| {
            let mut ids = Ids::new(thread, self.in_flight / threads);
            ids.fill(&mut subject);
            barrier.wait();
            let start = Instant::now();
            let pairs = ids.run(&mut subject, self.duration());
            figure(pairs) / start.elapsed().as_secs_f64()
        };
        let run = &run;
        let rates = std::thread::scope(|scope| {
            let running: Vec<_> =
                (0..).zip(handles).map(|(thread, subject)| scope.spawn(move || run(thread, subject))).collect();
            running.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Result<Vec<f64>, _>>()
        });
        let rates = rates.map_err(|_| anyhow::anyhow!("a thread of this subject panicked"))?;
        Ok(Found { pair_ns: Some(1e9 / rates.iter().sum::<f64>()), ..Found::default() })
    }
}

fn ns_a_pair(elapsed: Duration, pairs: u64) -> f64 {
    elapsed.as_secs_f64() * 1e9 / figure(pairs)
}
