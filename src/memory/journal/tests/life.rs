//! A wheel with a journal, random requests for it, and the content that recovery finds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::clock::Clock;
use crate::core::{
    BatchId, Completions, ConnectionId, GroupName, GroupOptions, Message, Operation, RequestBatch, Retention,
    RingParts, Store, StormRule, Tick, Wheel,
};
use crate::memory::journal::segment::{HEAD_LENGTH, SegmentHead, block_at};
use crate::memory::journal::{Event, Journal, JournalOptions, Recovered, SyncPolicy};
use crate::memory::wheel::MemoryWheel;
use crate::memory::{MemoryOptions, MemoryStore};

const TICK: Duration = Duration::from_secs(1);

pub(super) fn options(threads: usize) -> MemoryOptions {
    MemoryOptions {
        wheel: Wheel::new(5, TICK).unwrap(),
        storm: StormRule::default(),
        retention: Retention::default(),
        max_in_flight: 1_000_000,
        threads,
    }
}

/// The content of a wheel and its outbox, as far as clients can see it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Content {
    pointer: Tick,
    /// The messages in flight, with their deadlines and attempts.
    pub(super) in_flight: BTreeMap<Message, (Tick, u8)>,
    /// The Acks of each tick that has not expired.
    acked: BTreeMap<Tick, u64>,
    /// The messages that timed out and are in no batch yet.
    unpublished: u64,
    /// The batches, with their messages.
    batches: BTreeMap<BatchId, Vec<Message>>,
    /// The groups, with the batches that each has not settled, and the delivery counts of these.
    groups: BTreeMap<GroupName, Vec<(u64, u32)>>,
}

impl Content {
    pub(super) fn of(wheel: &MemoryWheel) -> Content {
        let (pointer, mut in_flight) = (wheel.pointer(), BTreeMap::new());
        for shard in &wheel.shards.list {
            for entry in shard.lock().table.iter() {
                let deadline = entry.deadline.seen_from(pointer);
                if deadline >= pointer {
                    in_flight.insert(entry.message, (deadline, entry.attempt));
                }
            }
        }
        let ticks = wheel.shards.open_ticks(pointer);
        let acked = ticks
            .clone()
            .zip(wheel.shards.counts(&ticks, |count| *count))
            .map(|(tick, counts)| (tick, counts.acked));
        let queue = wheel.outbox.queue.lock();
        let batches = queue.batches.values().map(|stored| {
            let mut messages: Vec<Message> =
                stored.batch.messages.iter().map(|timed_out| timed_out.message).collect();
            messages.sort_unstable();
            (stored.batch.id, messages)
        });
        let groups = queue.groups.iter().map(|(name, group)| {
            let held = group.taken.iter().chain(&group.released).map(|(position, count)| (*position, *count));
            let untaken = queue.batches.range(group.next..).map(|(position, _)| (*position, 0));
            let unsettled: BTreeSet<(u64, u32)> = held.chain(untaken).collect();
            (name.clone(), unsettled.into_iter().collect())
        });
        let counts: BTreeMap<Tick, u64> = acked.filter(|(_, acked)| *acked > 0).collect();
        Content {
            pointer,
            in_flight,
            acked: counts,
            unpublished: wheel.expiry.lock().unpublished(),
            batches: batches.collect(),
            groups: groups.collect(),
        }
    }
}

/// A wheel with a journal, and random requests for it.
pub(super) struct Life {
    runtime: Runtime,
    folder: TempDir,
    journal: Journal,
    pub(super) wheel: Arc<MemoryWheel>,
    parts: RingParts,
    random: SmallRng,
    now: Instant,
    /// The batches that the group has taken and not settled.
    taken: Vec<BatchId>,
}

pub(super) fn journal_options(folder: &Path) -> JournalOptions {
    JournalOptions { folder: folder.to_owned(), sync: SyncPolicy::None }
}

fn group() -> GroupName {
    "logic".parse().unwrap()
}

/// A group that comes and goes.
fn other_group() -> GroupName {
    "audit".parse().unwrap()
}

impl Life {
    pub(super) fn begin(threads: usize, seed: u64) -> Life {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(Clock::start());
        let (journal, wheel, _) =
            Journal::open(&journal_options(folder.path()), options(threads), &clock).unwrap();
        let store = MemoryStore::of(Arc::clone(&wheel), None);
        let parts = store.rings()[0].clone();
        Life {
            runtime: Builder::new_current_thread().build().unwrap(),
            folder,
            journal,
            wheel,
            parts,
            random: SmallRng::seed_from_u64(seed),
            now: clock.now(),
            taken: Vec::new(),
        }
    }

    /// Does one thing, and waits until it is written.
    pub(super) fn step(&mut self) {
        let RingParts { ring, outbox, .. } = self.parts.clone();
        match self.random.random_range(0..22) {
            0..14 => {
                let mut batch = RequestBatch::default();
                for id in 0..self.random.random_range(1..4) {
                    let operation = match self.random.random_range(0..5) {
                        0..3 => Operation::Add {
                            ack_timeout_ticks: self.random.random_range(1..=5),
                            attempt: self.random.random_range(1..4),
                        },
                        3 => Operation::Del { withdraw: true },
                        _ => Operation::Del { withdraw: false },
                    };
                    let message = Message::new(self.random.random_range(0..40), self.random.random_range(0..2));
                    batch.push_single(id, operation, message);
                }
                let _ =
                    ring.submit(&mut batch, ConnectionId::default(), &Arc::new(Completions::default()), self.now);
            }
            14..16 => {
                self.now += TICK;
                self.runtime.block_on(ring.advance(self.now)).unwrap();
            }
            16 => drop(self.runtime.block_on(ring.publish_expired(self.now)).unwrap()),
            17 => while self.runtime.block_on(ring.publish_expired(self.now)).unwrap().more {},
            18 => {
                self.runtime.block_on(outbox.open_group(&group(), GroupOptions::default(), self.now)).unwrap();
                let taken = self.runtime.block_on(outbox.take(&group(), 10, self.now)).unwrap();
                self.taken.extend(taken.iter().map(|delivery| delivery.batch.id));
            }
            19 => {
                let runtime = &self.runtime;
                runtime.block_on(outbox.open_group(&other_group(), GroupOptions::default(), self.now)).unwrap();
                let taken = runtime.block_on(outbox.take(&other_group(), 2, self.now)).unwrap();
                let settled: Vec<BatchId> = taken.iter().map(|delivery| delivery.batch.id).collect();
                runtime.block_on(outbox.settle(&other_group(), &settled[..settled.len() / 2])).unwrap();
            }
            20 => drop(self.runtime.block_on(outbox.delete_group(&other_group())).unwrap()),
            _ => {
                let settled = Vec::from_iter(self.taken.choose(&mut self.random).copied());
                self.runtime.block_on(outbox.settle(&group(), &settled)).unwrap();
                self.runtime.block_on(outbox.settle(&GroupName::default_group(), &settled)).unwrap();
            }
        }
        self.runtime.block_on(self.journal.buffer.all_written());
    }

    /// Has a checkpoint written, once everything that has expired is published.
    pub(super) fn checkpoint(&mut self) {
        while self.runtime.block_on(self.parts.ring.publish_expired(self.now)).unwrap().more {}
        let checkpoints = || self.journal.progress.state.lock().checkpoints;
        let before = checkpoints();
        self.journal.progress.request_checkpoint();
        wait_until("a checkpoint is complete", || {
            // The writer notices with the next record.
            self.journal.buffer.append_event(&Event::Complete);
            checkpoints() > before
        });
        self.runtime.block_on(self.journal.buffer.all_written());
    }

    /// Ends the process, and begins another that finds the same.
    pub(super) fn restart(&mut self, threads: usize) {
        let before = Content::of(&self.wheel);
        self.journal.close().unwrap();
        let clock = Arc::new(Clock::start());
        let (journal, wheel, _) =
            Journal::open(&journal_options(self.folder.path()), options(threads), &clock).unwrap();
        assert_eq!(Content::of(&wheel), before);
        self.parts = MemoryStore::of(Arc::clone(&wheel), None).rings()[0].clone();
        (self.journal, self.wheel, self.now) = (journal, wheel, clock.now());
    }

    /// The segments, in the order of their numbers.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(self.folder.path())
            .unwrap()
            .map(|file| file.unwrap().path())
            .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("log-"))
            .collect();
        files.sort();
        files
    }
}

impl Drop for Life {
    /// Ends the threads before the folder is removed.
    fn drop(&mut self) {
        self.journal.close().unwrap();
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let clock = Clock::start();
    let until = clock.now() + Duration::from_secs(20);
    while !condition() {
        assert!(clock.now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The content that recovery finds in copies of these files.
pub(super) fn recovered(files: &[(PathBuf, Vec<u8>)], threads: usize) -> (Content, Recovered) {
    let folder = tempfile::tempdir().unwrap();
    for (path, bytes) in files {
        let copy = folder.path().join(path.file_name().unwrap());
        fs::write(&copy, bytes).unwrap();
        fs::set_permissions(copy, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
    let clock = Arc::new(Clock::start());
    let (journal, wheel, recovered) =
        Journal::open(&journal_options(folder.path()), options(threads), &clock).unwrap();
    journal.close().unwrap();
    (Content::of(&wheel), recovered)
}

pub(super) fn copies(files: &[PathBuf]) -> Vec<(PathBuf, Vec<u8>)> {
    // Behind the last block the file is zero. The block itself may end with some zeros.
    let read = |path: &PathBuf| {
        let mut bytes = fs::read(path).unwrap();
        bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).unwrap() + 64);
        (path.clone(), bytes)
    };
    files.iter().map(read).collect()
}

/// The number of valid blocks of a segment, and the offset at which the last one ends.
pub(super) fn blocks_of(bytes: &[u8]) -> (usize, usize) {
    let head = SegmentHead::decode(bytes).unwrap();
    let (mut count, mut at) = (0, HEAD_LENGTH);
    while let Some(block) = block_at(head.number, head.epoch, &bytes[at..]) {
        at += block.length();
        count += 1;
    }
    (count, at)
}
