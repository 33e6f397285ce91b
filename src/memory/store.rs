//! The memory store: a ring, its outbox, a lease that never ends, and the journal.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tracing::error;

use super::journal::{Condition, Journal, JournalError, JournalOptions, Recovered};
use super::options::MemoryOptions;
use super::outbox::MemoryOutbox;
use super::wheel::MemoryWheel;
use crate::clock::Clock;
use crate::core::{
    Advance, Completions, ConnectionId, DrainOutcome, JournalStatus, Leadership, Lease, Message, MessageState,
    Moment, PublishStep, Reason, Refusal, RequestBatch, Ring, RingParts, RingStatus, Store, Submitted, Tick,
    Wheel,
};

/// A store in the memory of the process.
pub struct MemoryStore {
    ring: Arc<MemoryRing>,
    parts: RingParts,
    journal: Option<Arc<Journal>>,
}

/// How long the pointer waits after a restart. In this time logic nodes can connect again and send the
/// acknowledgements that they got during the restart.
const RESTART_GRACE: Duration = Duration::from_secs(2);

impl MemoryStore {
    /// Opens a store whose content ends with the process.
    pub fn new(options: MemoryOptions, moment: Moment) -> MemoryStore {
        let (now, start_ms) = (moment.now, moment.unix_ms());
        let pointer = Tick(start_ms / u64::from(options.wheel.tick_ms()));
        let outbox = Arc::new(MemoryOutbox::new(options.retention, now));
        MemoryStore::of(Arc::new(MemoryWheel::new(options, (start_ms, pointer), outbox, now)), None)
    }

    /// Opens a store with a journal, and rebuilds what the journal keeps.
    ///
    /// # Errors
    ///
    /// If the journal cannot be read or written, if another process uses it, or if it was written by a ring of other
    /// dimensions.
    pub fn open(
        options: MemoryOptions,
        journal: &JournalOptions,
        clock: &Arc<Clock>,
    ) -> Result<(MemoryStore, Recovered), JournalError> {
        let (journal, wheel, recovered) = Journal::open(journal, options, clock)?;
        Ok((MemoryStore::of(wheel, Some(Arc::new(journal))), recovered))
    }

    pub(super) fn of(wheel: Arc<MemoryWheel>, journal: Option<Arc<Journal>>) -> MemoryStore {
        let (epoch, outbox) = (wheel.epoch, Arc::clone(&wheel.outbox));
        let ring = Arc::new(MemoryRing { wheel });
        let parts = RingParts { ring: Arc::clone(&ring) as _, outbox, lease: Arc::new(AlwaysLeads { epoch }) };
        MemoryStore { ring, parts, journal }
    }

    /// Delays the next move of the pointer to 2 s and a tick after `now`. Must be called when logic nodes can connect
    /// to a restored ring, because no Ack could arrive before.
    pub fn wait_for_clients(&self, now: Instant) {
        self.ring.wheel.state.write().schedule.delay_until(now + RESTART_GRACE);
    }
}

#[async_trait]
impl Store for MemoryStore {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn rings(&self) -> &[RingParts] {
        std::slice::from_ref(&self.parts)
    }

    fn is_up(&self) -> bool {
        self.journal.as_ref().is_none_or(|journal| journal.buffer.is_prompt())
    }

    fn journal(&self) -> Option<JournalStatus> {
        self.journal.as_ref().map(|journal| journal.status())
    }

    fn is_full(&self) -> bool {
        self.journal.as_ref().is_some_and(|journal| journal.buffer.condition() != Condition::Recording)
    }

    async fn close(&self) -> Result<String, Refusal> {
        let Some(journal) = &self.journal else { return self.end_with("the process") };
        let wheel = &self.ring.wheel;
        let (in_flight, batches) = (wheel.in_flight.count(), wheel.outbox.queue.lock().batches.len());
        let closing = Arc::clone(journal);
        let closed = tokio::task::spawn_blocking(move || closing.close()).await;
        if let Err(error) = closed.unwrap_or_else(|error| Err(error.to_string())) {
            return self.end_with(&format!("the process, because the journal could not be written ({error})"));
        }
        let batches = match batches {
            0 => String::new(),
            count => format!(", with {count} batches that were not acknowledged"),
        };
        Ok(format!("{in_flight} messages in flight are kept in {}{batches}", journal.path.display()))
    }
}

impl MemoryStore {
    /// Returns what is lost because the wheel ends. Refuses if something is.
    fn end_with(&self, end: &str) -> Result<String, Refusal> {
        let wheel = &self.ring.wheel;
        let messages = wheel.in_flight.count() + wheel.expiry.lock().unpublished();
        if messages > 0 {
            error!(
                messages,
                "the drain ended before all messages in flight were delivered, and no subscriber gets the others: \
                 keep the wheel with --journal, or raise --drain-timeout, and let the logic nodes add the \
                 undelivered messages again"
            );
        }
        let (batches, in_batches) = {
            let queue = wheel.outbox.queue.lock();
            (queue.batches.len(), queue.ids)
        };
        if messages > 0 || batches > 0 {
            let text = format!(
                "the drain lost {messages} messages that were not delivered, and {batches} batches with \
                 {in_batches} messages that a group did not acknowledge: keep the wheel with --journal, or subscribe \
                 before the sidecar stops"
            );
            return Err(Refusal::new(Reason::Draining, text));
        }
        Ok(format!("the wheel ends with {end}"))
    }
}

/// A ring in the memory of the process.
pub struct MemoryRing {
    pub(super) wheel: Arc<MemoryWheel>,
}

impl MemoryRing {
    /// Creates an empty ring that publishes its batches to `outbox`. `start` is the epoch, and the tick at which the
    /// pointer stands.
    pub fn new(options: MemoryOptions, start: (u64, Tick), outbox: Arc<MemoryOutbox>, now: Instant) -> MemoryRing {
        MemoryRing { wheel: Arc::new(MemoryWheel::new(options, start, outbox, now)) }
    }
}

#[async_trait]
impl Ring for MemoryRing {
    fn wheel(&self) -> Wheel {
        self.wheel.shards.options.wheel
    }

    fn submit(
        &self,
        batch: &mut RequestBatch,
        _connection: ConnectionId,
        completions: &Arc<Completions>,
        now: Instant,
    ) -> Submitted {
        self.wheel.complete(batch, now);
        match &self.wheel.journal {
            None => Submitted::Completed,
            Some(journal) => journal.hold(batch, completions),
        }
    }

    async fn get(&self, messages: &[Message], now: Instant) -> Result<Vec<MessageState>, Refusal> {
        let states = self.wheel.get(messages, now);
        self.wheel.outbox.recorded().await;
        Ok(states)
    }

    async fn advance(&self, now: Instant) -> Result<Advance, Refusal> {
        let advance = self.wheel.advance(now);
        if matches!(advance, Advance::Moved { .. }) {
            // The next tick does not expire before this is written. A slow disk thus shifts deadlines.
            self.wheel.outbox.recorded().await;
        }
        Ok(advance)
    }

    async fn publish_expired(&self, now: Instant) -> Result<PublishStep, Refusal> {
        Ok(self.wheel.publish_expired(now))
    }

    fn prelist(&self) -> bool {
        let mut expiry = self.wheel.expiry.lock();
        self.wheel.next_expired().is_some_and(|tick| expiry.prelist(tick, &self.wheel.shards))
    }

    async fn drain(&self, now: Instant) -> Result<DrainOutcome, Refusal> {
        if std::mem::replace(&mut self.wheel.state.write().draining, true) {
            return Ok(DrainOutcome::Kept);
        }
        match &self.wheel.journal {
            Some(journal) if journal.is_complete() => Ok(DrainOutcome::Kept),
            Some(_) => {
                error!(
                    "the wheel cannot be kept, because the journal cannot be written: the messages in flight are \
                     delivered now instead, in batches flagged drained"
                );
                Ok(self.wheel.expire_all(now))
            }
            None => Ok(self.wheel.expire_all(now)),
        }
    }

    async fn status(&self, now: Instant) -> Result<RingStatus, Refusal> {
        let wheel = &self.wheel;
        let schedule = wheel.state.read().schedule;
        let ticks = wheel.shards.open_ticks(schedule.pointer());
        let counts = wheel.shards.counts(&ticks, |count| *count);
        let mut slots = vec![0; usize::from(wheel.shards.options.wheel.slots())];
        for (tick, count) in ticks.zip(&counts).skip(1) {
            slots[wheel.shards.options.wheel.slot(tick)] += count.in_flight;
        }
        Ok(RingStatus {
            pointer: schedule.pointer(),
            pointer_lag_seconds: now.saturating_duration_since(schedule.next_advance()).as_secs_f64(),
            epoch: wheel.epoch,
            leader: Some(String::from("this process")),
            leads: true,
            in_flight: wheel.in_flight.count(),
            slots,
            closing: counts[0].in_flight,
            ..RingStatus::default()
        })
    }
}

/// The lease of a memory store. The process always leads.
#[derive(Clone, Copy, Debug)]
pub struct AlwaysLeads {
    /// The epoch of the process.
    pub epoch: u64,
}

#[async_trait]
impl Lease for AlwaysLeads {
    async fn maintain(&self, _now: Instant) -> Result<Leadership, Refusal> {
        Ok(Leadership::Leads { epoch: self.epoch, renew_at: None })
    }

    async fn release(&self, _now: Instant) -> Result<(), Refusal> {
        Ok(())
    }

    /// Ignores the callback, because the lease is never free.
    fn on_lease_free(&self, _notify: Box<dyn Fn() + Send + Sync>) {}
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::core::single_request::{AddNewMsg, SingleRequest};
    use crate::core::{Message, Retention, StormRule, Tick};

    const TICK: Duration = Duration::from_secs(1);

    #[test]
    fn a_ticker_that_was_held_up_after_it_read_the_time_shifts_all_the_same() {
        let start = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), start));
        let options = MemoryOptions {
            wheel: Wheel::new(3, TICK).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 10,
            threads: 1,
        };
        let ring = MemoryRing::new(options, (1, Tick(7)), outbox, start);
        // The move is due at second 1. The ticker reads this time and is then delayed. An add arrives at second 2.5,
        // before the ticker moves the pointer.
        let woken = start + TICK * 5 / 2;
        let request = AddNewMsg { messages: &[Message::new(1, 0)], ack_timeout_ticks: 1, attempt: 1 };
        let answer = ring.add_new_msg(request, woken).now_or_never().unwrap().unwrap();
        assert_eq!(answer.deadline, Tick(8));
        let advance = |now| ring.advance(now).now_or_never().unwrap().unwrap();
        assert_eq!(advance(start + TICK), Advance::Waiting(woken + TICK));
        // The stall shifts all deadlines, so tick 8 expires two ticks after the end of the stall, not at once.
        assert_eq!(advance(woken), Advance::Waiting(woken + TICK));
        let moved = |expired, shifted, next| Advance::Moved { expired, lateness: Duration::ZERO, shifted, next };
        assert_eq!(advance(woken + TICK), moved(Tick(7), 1, woken + TICK * 2));
        assert_eq!(advance(woken + TICK * 2), moved(Tick(8), 0, woken + TICK * 3));
    }

    /// While the status waits for the last shard, the counts of the first one change. A status that locked a shard for
    /// each tick would contain the change.
    #[test]
    fn the_status_locks_each_shard_once() {
        let start = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), start));
        let options = MemoryOptions {
            wheel: Wheel::new(3_600, TICK).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 10,
            threads: 2,
        };
        let ring = MemoryRing::new(options, (1, Tick(7)), outbox, start);
        let shards = &ring.wheel.shards;
        let [first, .., last] = &*shards.list else { panic!("two threads have several shards") };
        let mut at_first = first.lock();
        let at_last = last.lock();
        let (begin, thread) = std::sync::mpsc::channel();
        let status = std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                begin.send(rustix::thread::gettid()).unwrap();
                ring.status(start).now_or_never().unwrap().unwrap()
            });
            let state = format!("/proc/self/task/{}/stat", thread.recv().unwrap());
            let sleeps = || std::fs::read_to_string(&state).unwrap().contains(") S ");
            // It waits for the first shard, and then for the last one.
            while !sleeps() {
                std::thread::yield_now();
            }
            parking_lot::MutexGuard::bump(&mut at_first);
            while !sleeps() {
                std::thread::yield_now();
            }
            for tick in shards.open_ticks(Tick(7)) {
                at_first.of_tick(tick, options.wheel).in_flight += 1;
            }
            drop((at_first, at_last));
            asking.join().unwrap()
        });
        assert_eq!((status.closing, status.slots.iter().sum::<u64>()), (0, 0));
    }
}
