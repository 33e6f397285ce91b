//! The buffer between the threads that change the wheel and the thread that writes the journal, and the output gate: no
//! answer leaves the store before the changes on which it depends are written.
//!
//! A thread appends a record while it holds the lock under which it made the change. So the order of the records is the
//! order of the changes. The buffer is the last lock in the order of locks.
//!
//! The writer is woken late, because waking a thread costs more than the records of a request batch: when a thread of
//! the runtime has nothing else to do, when much is unwritten, or when something is unwritten for long.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::condition::{Condition, Refusals};
use super::records::{self, Boundary, Event, Taken};
use super::segment::BLOCK_HEAD_LENGTH;
use super::waiting::{self, Waiting};
use crate::clock::Clock;
use crate::core::{Completions, Refusal, RequestBatch, Submitted};
use crate::memory::batch_by_shard::Item;

/// The number of unwritten bytes at which the writer is woken at once.
const LARGE: usize = 64 * 1_024;

/// The age of unwritten bytes at which the next append wakes the writer.
const OLD: Duration = Duration::from_micros(100);

/// The age of unwritten bytes at which the disk counts as slow, and adds are refused.
const SLOW_MS: u64 = 500;

/// The number of unwritten bytes at which all requests are refused.
const MOST_UNWRITTEN: u64 = 64 * 1_024 * 1_024;

/// The memory of waiting requests, in bytes, at which all others are refused.
const MOST_WAITING: u64 = 256 * 1_024 * 1_024;

/// The number of copies of request batches whose memory is kept.
const MOST_SPARE: usize = 64;

/// The maximum capacity with which the memory of written records is kept.
const MOST_KEPT_BYTES: usize = 4 * 1_024 * 1_024;

/// The maximum capacity, in messages, with which such a copy is kept.
const MOST_KEPT: usize = 4 * 4_096;

/// The records that are not written yet, and everything that waits for them.
pub(in crate::memory) struct Buffer {
    pending: Mutex<Pending>,
    /// Wakes the writer.
    work: Condvar,
    /// Whether there are records that the writer has not taken.
    is_waiting: AtomicBool,
    /// When the oldest unwritten record was appended, in ms since `origin`, plus 1. 0 if all are written.
    oldest_ms: AtomicU64,
    unwritten: AtomicU64,
    /// The memory of the requests that wait, in bytes.
    waiting: AtomicU64,
    condition: AtomicU8,
    pub(super) clock: Arc<Clock>,
    /// The beginning of the wheel's life, without the time in which no process ran.
    origin: Instant,
    /// Whether threads of the runtime call [`Buffer::wake_writer`] when they have nothing to do.
    wakes_late: bool,
    refusals: Refusals,
}

struct Pending {
    /// The head of a block, still empty, and records.
    block: Vec<u8>,
    /// The number of records so far, and of those that are written.
    appended: u64,
    written: u64,
    first_at: Option<Instant>,
    /// Whether a checkpoint begins or is complete in `block`.
    boundary: Option<Boundary>,
    waiting: VecDeque<(u64, Waiting)>,
    spare: Vec<RequestBatch>,
    is_closing: bool,
}

impl Pending {
    /// Forgets the records that the writer has not taken, because the journal has failed.
    fn forget(&mut self) {
        self.block.truncate(BLOCK_HEAD_LENGTH);
        (self.boundary, self.first_at) = (None, None);
    }
}

impl Buffer {
    pub(super) fn new(clock: &Arc<Clock>, origin: Instant, wakes_late: bool) -> Buffer {
        Buffer {
            pending: Mutex::new(Pending {
                block: vec![0; BLOCK_HEAD_LENGTH],
                appended: 0,
                written: 0,
                first_at: None,
                boundary: None,
                waiting: VecDeque::new(),
                spare: Vec::new(),
                is_closing: false,
            }),
            work: Condvar::new(),
            is_waiting: AtomicBool::new(false),
            oldest_ms: AtomicU64::new(0),
            unwritten: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            condition: AtomicU8::new(Condition::Recording as u8),
            clock: Arc::clone(clock),
            origin,
            wakes_late,
            refusals: Refusals::new(),
        }
    }

    pub(in crate::memory) fn condition(&self) -> Condition {
        Condition::of(self.condition.load(Ordering::Relaxed))
    }

    /// Returns whether the journal gets everything, so that a drain can leave the messages in it.
    pub(in crate::memory) fn is_complete(&self) -> bool {
        matches!(self.condition(), Condition::Recording | Condition::Full)
    }

    /// Returns whether the disk answers.
    pub(in crate::memory) fn is_prompt(&self) -> bool {
        let oldest = self.oldest_ms.load(Ordering::Relaxed);
        oldest == 0 || self.lived_ms(self.clock.now()).saturating_sub(oldest - 1) < SLOW_MS
    }

    /// Refuses requests of a batch, if the journal cannot record what they do.
    pub(in crate::memory) fn refuse(&self, batch: &mut RequestBatch) {
        let refusals = &self.refusals;
        let is_over = |bytes: &AtomicU64, most| bytes.load(Ordering::Relaxed) > most;
        if is_over(&self.unwritten, MOST_UNWRITTEN) || is_over(&self.waiting, MOST_WAITING) {
            for request in &mut batch.requests {
                request.refusal.get_or_insert_with(|| Arc::clone(&refusals.unwritten));
            }
            return;
        }
        let refusal = match self.condition() {
            Condition::Recording if self.is_prompt() => return,
            Condition::Recording => &refusals.slow,
            Condition::Full => &refusals.full,
            Condition::Failed | Condition::Rebuilding => &refusals.failed,
        };
        batch.refuse_adds(Arc::clone(refusal));
    }

    /// Appends the changes of a request batch to a shard. The caller has locked the shard.
    pub(in crate::memory) fn append_changes(
        &self,
        items: &[Item],
        batch: &RequestBatch,
        overtaken: impl Iterator<Item = Event>,
    ) {
        let mut pending = self.pending.lock();
        let before = pending.block.len();
        records::write_changes(&mut pending.block, items, batch);
        overtaken.for_each(|event| event.write(&mut pending.block));
        if pending.block.len() == before {
            return;
        }
        let now = self.clock.now();
        let since = self.appended(&mut pending, now);
        if !self.wakes_late || pending.block.len() >= LARGE || now.saturating_duration_since(since) >= OLD {
            self.work.notify_one();
        }
    }

    /// Appends what `write` writes, and wakes the writer.
    pub(in crate::memory) fn append(&self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut pending = self.pending.lock();
        write(&mut pending.block);
        self.appended(&mut pending, self.clock.now());
        self.work.notify_one();
    }

    /// Appends an event, and wakes the writer.
    pub(in crate::memory) fn append_event(&self, event: &Event) {
        self.append(|bytes| event.write(bytes));
    }

    /// Appends the first or the last record of a checkpoint. Returns false if the journal has failed.
    pub(super) fn append_boundary(&self, boundary: Boundary, event: &Event) -> bool {
        let mut pending = self.pending.lock();
        pending.boundary = Some(boundary);
        event.write(&mut pending.block);
        self.appended(&mut pending, self.clock.now());
        self.work.notify_one();
        pending.boundary.is_some()
    }

    /// Counts a record. Returns when the first record that the writer has not taken was appended.
    fn appended(&self, pending: &mut Pending, now: Instant) -> Instant {
        if self.condition() == Condition::Failed {
            pending.forget();
            return now;
        }
        pending.appended += 1;
        self.unwritten.store(pending.block.len() as u64, Ordering::Relaxed);
        self.is_waiting.store(true, Ordering::Relaxed);
        if self.oldest_ms.load(Ordering::Relaxed) == 0 {
            self.oldest_ms.store(self.lived_ms(now) + 1, Ordering::Relaxed);
        }
        *pending.first_at.get_or_insert(now)
    }

    /// Wakes the writer if there is something to write. A thread of the runtime calls this before it waits for events.
    pub(super) fn wake_writer(&self) {
        if self.is_waiting.load(Ordering::Relaxed) {
            let _pending = self.pending.lock();
            self.work.notify_one();
        }
    }

    /// Returns a completed batch at once if everything is written. Otherwise it waits, and only its requests stay. A batch
    /// that is refused depends on nothing. Adds that were not recorded, because a write failed meanwhile, are refused.
    pub(in crate::memory) fn hold(&self, batch: &mut RequestBatch, completions: &Arc<Completions>) -> Submitted {
        if batch.requests.iter().all(|request| request.refusal.is_some()) {
            return Submitted::Completed;
        }
        let mut pending = self.pending.lock();
        if self.condition() == Condition::Failed {
            batch.refuse_adds(Arc::clone(&self.refusals.unknown));
            return Submitted::Completed;
        }
        if pending.written == pending.appended {
            return Submitted::Completed;
        }
        let mut held = pending.spare.pop().unwrap_or_default();
        held.take_outcomes(batch);
        let last = pending.appended;
        let waiting = Waiting::Batch(Arc::clone(completions), held);
        self.waiting.fetch_add(waiting.bytes(), Ordering::Relaxed);
        pending.waiting.push_back((last, waiting));
        Submitted::Pending
    }

    /// Waits until all records so far are written, or the journal has failed.
    pub(in crate::memory) async fn all_written(&self) {
        let written = {
            let mut pending = self.pending.lock();
            if pending.written == pending.appended {
                return;
            }
            let (sender, receiver) = oneshot::channel();
            let last = pending.appended;
            let waiting = Waiting::Task(sender);
            self.waiting.fetch_add(waiting.bytes(), Ordering::Relaxed);
            pending.waiting.push_back((last, waiting));
            receiver
        };
        // The sender is dropped only if the writer has ended.
        let _ = written.await;
    }

    /// Takes all records for the writer, once there are some. Returns without any after `patience`, or when the journal
    /// closes. `taken` is what the writer took before; its memory is used again.
    pub(super) fn take(&self, taken: &mut Taken, patience: Duration) {
        let mut pending = self.pending.lock();
        if pending.block.len() == BLOCK_HEAD_LENGTH && !pending.is_closing {
            self.work.wait_for(&mut pending, patience);
        }
        if taken.block.capacity() > MOST_KEPT_BYTES {
            taken.block = Vec::new();
        }
        taken.block.clear();
        taken.block.resize(BLOCK_HEAD_LENGTH, 0);
        mem::swap(&mut taken.block, &mut pending.block);
        (taken.last, taken.is_closing) = (pending.appended, pending.is_closing);
        taken.boundary = pending.boundary.take();
        self.is_waiting.store(false, Ordering::Relaxed);
        pending.first_at = None;
    }

    /// Releases everything that waited for the records up to `last`.
    pub(super) fn written(&self, last: u64) {
        self.release(last, None);
    }

    /// Stops recording, and releases everything that waits. The outcome of adds is then unknown.
    pub(super) fn fail(&self) {
        self.condition.store(Condition::Failed as u8, Ordering::Relaxed);
        let last = {
            let mut pending = self.pending.lock();
            pending.forget();
            pending.appended
        };
        self.release(last, Some(&self.refusals.unknown));
    }

    pub(super) fn set_condition(&self, condition: Condition) {
        self.condition.store(condition as u8, Ordering::Relaxed);
    }

    fn release(&self, last: u64, refusal: Option<&Arc<Refusal>>) {
        let mut pending = self.pending.lock();
        pending.written = last;
        let oldest = pending.first_at.map_or(0, |first| self.lived_ms(first) + 1);
        self.oldest_ms.store(oldest, Ordering::Relaxed);
        self.unwritten.store((pending.block.len() - BLOCK_HEAD_LENGTH) as u64, Ordering::Relaxed);
        let count = pending.waiting.partition_point(|(waits_for, _)| *waits_for <= last);
        let released: Vec<Waiting> = pending.waiting.drain(..count).map(|(_, waiting)| waiting).collect();
        drop(pending);
        self.waiting.fetch_sub(released.iter().map(Waiting::bytes).sum(), Ordering::Relaxed);
        let mut spare = waiting::release(released, refusal);
        if !spare.is_empty() {
            for batch in &mut spare {
                batch.clear(MOST_KEPT);
            }
            let mut pending = self.pending.lock();
            pending.spare.append(&mut spare);
            pending.spare.truncate(MOST_SPARE);
        }
    }

    /// Has the writer write what is there, and end.
    pub(super) fn close(&self) {
        self.pending.lock().is_closing = true;
        self.work.notify_one();
    }

    /// Returns how long the wheel has lived at a time, without the time in which no process ran.
    pub(in crate::memory) fn lived_ms(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.origin).as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn last_appended(&self) -> u64 {
        self.pending.lock().appended
    }

    pub(super) fn unwritten(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Message, Operation, Tick};

    fn add(id: u64) -> RequestBatch {
        let mut batch = RequestBatch::default();
        batch.push_single(1, Operation::Add { ack_timeout_ticks: 15, attempt: 1 }, Message::from(id));
        batch.open();
        batch
    }

    fn buffer() -> Buffer {
        let clock = Arc::new(Clock::start());
        Buffer::new(&clock, clock.now(), false)
    }

    #[test]
    fn adds_that_were_not_recorded_are_not_answered_as_added() {
        let buffer = buffer();
        buffer.append(|bytes| bytes.push(0));
        buffer.fail();
        let mut batch = add(1);
        assert!(matches!(buffer.hold(&mut batch, &Arc::default()), Submitted::Completed));
        let refusal = batch.requests[0].refusal.as_ref().expect("its outcome is unknown");
        assert!(Arc::ptr_eq(refusal, &buffer.refusals.unknown));
        let begin = Event::Begin { published_below: Tick(1), held: 0 };
        assert!(!buffer.append_boundary(Boundary::Begin, &begin), "nothing is recorded");
    }

    #[test]
    fn a_journal_that_has_failed_waits_for_nothing() {
        let buffer = buffer();
        buffer.append(|bytes| bytes.push(0));
        let mut taken = Taken::default();
        buffer.take(&mut taken, Duration::ZERO);
        buffer.append(|bytes| bytes.push(0));
        buffer.fail();
        assert_eq!(buffer.oldest_ms.load(Ordering::Relaxed), 0, "the store answers");
    }

    #[test]
    fn requests_are_refused_before_those_that_wait_fill_the_memory() {
        let buffer = buffer();
        buffer.append(|bytes| bytes.push(0));
        let (completions, mut held) = (Arc::default(), 0);
        loop {
            let mut batch = RequestBatch::default();
            for id in 0..1_000 {
                batch.push_single(id, Operation::Del { withdraw: false }, Message::from(id));
            }
            batch.open();
            buffer.refuse(&mut batch);
            if batch.requests[0].refusal.is_some() {
                break;
            }
            assert!(matches!(buffer.hold(&mut batch, &completions), Submitted::Pending));
            held += 1;
        }
        assert_eq!(held, MOST_WAITING / (1_024 + 64 * 1_000 + 1_000) + 1);
        let mut taken = Taken::default();
        buffer.take(&mut taken, Duration::ZERO);
        buffer.written(taken.last);
        let mut batch = add(1);
        buffer.refuse(&mut batch);
        assert!(batch.requests[0].refusal.is_none(), "nothing waits any more");
    }
}
