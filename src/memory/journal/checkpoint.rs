//! The thread that appends checkpoints: everything that the wheel and the outbox hold, in steps between which requests
//! go on.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tracing::warn;

use super::buffer::Buffer;
use super::progress::Progress;
use super::records::{self, Boundary, Event, GroupRecord};
use super::writer::MOST_UNSYNCED_SEGMENTS;
use crate::core::{GroupName, Tick};
use crate::memory::queue::Group;
use crate::memory::shard::LOCKED_STEP;
use crate::memory::wheel::MemoryWheel;

/// How often the length of the log is compared with the size of the wheel.
const LOOK: Duration = Duration::from_millis(100);

/// A pause of a checkpoint, while ticks are being published or much is unwritten.
const PAUSE: Duration = Duration::from_millis(1);

/// The number of unsynced segments at which a checkpoint syncs them before it goes on. So the writer need not wait.
const SYNC_AT_SEGMENTS: usize = MOST_UNSYNCED_SEGMENTS / 2;

/// The number of unwritten bytes at which a checkpoint pauses.
const MOST_UNWRITTEN: u64 = 1_024 * 1_024;

pub(super) struct Checkpointer {
    wheel: Weak<MemoryWheel>,
    buffer: Arc<Buffer>,
    progress: Arc<Progress>,
}

impl Checkpointer {
    pub(super) fn new(wheel: &Arc<MemoryWheel>, buffer: &Arc<Buffer>, progress: &Arc<Progress>) -> Checkpointer {
        Checkpointer { wheel: Arc::downgrade(wheel), buffer: Arc::clone(buffer), progress: Arc::clone(progress) }
    }

    /// Appends checkpoints when they are due, until the journal closes.
    pub(super) fn run(self) {
        while !self.is_closing_after(LOOK) {
            let Some(wheel) = self.wheel.upgrade() else { return };
            let held = wheel.shards.len() as u64 + wheel.outbox.queue.lock().ids;
            self.progress.in_flight.store(wheel.in_flight.count(), Ordering::Relaxed);
            self.progress.held.store(held, Ordering::Relaxed);
            self.progress.pointer.store(wheel.pointer().0, Ordering::Relaxed);
            if self.is_due() {
                self.checkpoint(&wheel);
            }
        }
    }

    /// Waits, unless a checkpoint is requested. Returns whether the journal closes.
    fn is_closing_after(&self, time: Duration) -> bool {
        let mut state = self.progress.state.lock();
        if !state.is_closing && !state.is_requested {
            self.progress.changed.wait_for(&mut state, time);
        }
        state.is_closing
    }

    fn is_due(&self) -> bool {
        if std::mem::take(&mut self.progress.state.lock().is_requested) {
            return true;
        }
        self.progress.is_checkpoint_due(self.buffer.condition())
    }

    /// Appends a checkpoint. Stops if the journal fails or closes.
    fn checkpoint(&self, wheel: &MemoryWheel) {
        let failures = self.progress.state.lock().failures;
        if !self.begin(wheel, failures) {
            return;
        }
        if self.walk(wheel, failures).is_some() {
            self.complete(failures);
        }
        wheel.expiry.lock().is_walked = false;
    }

    /// Begins once all expired messages are in batches. Returns false if the journal fails or closes before that.
    fn begin(&self, wheel: &MemoryWheel, failures: u64) -> bool {
        while self.goes_on(failures) {
            let held = wheel.shards.len() as u64;
            {
                let mut expiry = wheel.expiry.lock();
                let state = wheel.state.read();
                if expiry.is_all_published_below(state.expired_below) {
                    let begin = Event::Begin { published_below: state.expired_below, held };
                    expiry.is_walked = self.buffer.append_boundary(Boundary::Begin, &begin);
                    return expiry.is_walked;
                }
            }
            std::thread::sleep(PAUSE);
        }
        false
    }

    fn goes_on(&self, failures: u64) -> bool {
        let state = self.progress.state.lock();
        !state.is_closing && state.failures == failures
    }

    /// Waits while much is unwritten or not on the disk.
    fn wait_for_writer(&self, failures: u64) -> Option<()> {
        if self.progress.unsynced.lock().len() >= SYNC_AT_SEGMENTS {
            self.sync()?;
        }
        while self.buffer.unwritten() > MOST_UNWRITTEN {
            std::thread::sleep(PAUSE);
            self.goes_on(failures).then_some(())?;
        }
        self.goes_on(failures).then_some(())
    }

    /// Appends all entries, batches and groups.
    fn walk(&self, wheel: &MemoryWheel, failures: u64) -> Option<()> {
        for shard in &wheel.shards.list {
            let (mut position, mut is_complete) = (0, false);
            while !is_complete {
                self.wait_for_writer(failures)?;
                let _state = wheel.state.read();
                let mut shard = shard.lock();
                let stamp = wheel.stamp(self.buffer.clock.now());
                self.buffer.append(|bytes| {
                    let begin = records::begin_entries(bytes);
                    is_complete = shard.table.scan(&mut position, LOCKED_STEP, None, |entry| {
                        records::write_entry(bytes, entry, stamp);
                        true
                    });
                    records::end_entries(bytes, begin);
                });
                parking_lot::MutexGuard::unlock_fair(shard);
            }
        }
        self.append_acked(wheel);
        let positions = wheel.outbox.queue.lock().positions();
        for position in positions {
            self.wait_for_writer(failures)?;
            let queue = wheel.outbox.queue.lock();
            if let Some(stored) = queue.batches.get(&position) {
                let expired_lived_ms = self.buffer.lived_ms(stored.expired_at);
                let batch = Arc::clone(&stored.batch);
                self.buffer.append_event(&Event::Batch { position, expired_lived_ms, batch });
            }
        }
        let queue = wheel.outbox.queue.lock();
        let positions = queue.positions();
        let groups = queue.groups.iter().filter(|(_, group)| !group.ephemeral);
        let record = |(name, group): (&GroupName, &Group)| {
            let held = group.taken.iter().chain(&group.released);
            let held = held.map(|(position, count)| (*position, *count)).collect();
            GroupRecord { name: name.clone(), next: group.next, held }
        };
        let groups = groups.map(record).collect();
        self.buffer.append_event(&Event::Groups { begin: positions.start, end: positions.end, groups });
        Some(())
    }

    /// Appends the number of Acks of each tick that has not expired. No request is processed meanwhile, so later Acks are
    /// those behind this record.
    fn append_acked(&self, wheel: &MemoryWheel) {
        let state = wheel.state.write();
        let mut ticks: Vec<(Tick, u64)> =
            wheel.shards.open_ticks(state.expired_below).map(|tick| (tick, 0)).collect();
        for shard in &wheel.shards.list {
            let mut shard = shard.lock();
            for (tick, acked) in &mut ticks {
                *acked += shard.of_tick(*tick, wheel.shards.options.wheel).acked;
            }
        }
        ticks.retain(|(_, acked)| *acked > 0);
        self.buffer.append_event(&Event::Acked { ticks });
    }

    /// Completes a checkpoint. All of it is on the disk before a block says that recovery begins with it, and that block is
    /// on the disk before older segments are used again. This thread syncs, so no answer waits for that.
    fn complete(&self, failures: u64) -> Option<()> {
        self.wait_until_written(failures)?;
        self.sync()?;
        {
            // A checkpoint that began before a failure is never complete.
            let state = self.progress.state.lock();
            (state.failures == failures).then_some(())?;
            self.buffer.append_boundary(Boundary::Complete, &Event::Complete);
        }
        self.wait_until_written(failures)?;
        self.sync()?;
        let mut state = self.progress.state.lock();
        state.is_complete = state.failures == failures;
        Some(())
    }

    fn sync(&self) -> Option<()> {
        let synced = self.progress.sync(&self.buffer.clock);
        synced.inspect_err(|error| warn!(%error, "a checkpoint could not be synced")).ok()
    }

    /// Waits until all records so far are written. Returns `None` if the journal fails or closes before that.
    fn wait_until_written(&self, failures: u64) -> Option<()> {
        let mut state = self.progress.state.lock();
        if state.failures == failures {
            // If that record is written already, the writer notices when it looks for records the next time.
            state.awaited = Some(self.buffer.last_appended());
        }
        while state.awaited.is_some() && !state.is_closing {
            self.progress.changed.wait(&mut state);
        }
        (state.failures == failures && !state.is_closing).then_some(())
    }
}
