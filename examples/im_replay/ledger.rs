//! The outcome of each message, compared with the trace.
//!
//! It has no clock: each report names its time. So it can be tested without waiting.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use ackwheel::client::ClientError;
use ackwheel::core::{AddOutcome, BatchId, DelOutcome, Message};
use ackwheel::protocol::frame::TimeoutBatch;
use hdrhistogram::Histogram;
use tokio::time::Instant;

use crate::mismatch::{Kind, Mismatches};
use crate::plan::Planned;

/// The attempt that every message is added with.
const ATTEMPT: u8 = 1;
/// The lateness beyond one tick that the sidecar promises to keep, for work and scheduling.
const PROMISED_LATENESS: Duration = Duration::from_millis(200);
/// The time that this program may need beyond that to see a batch: it shares the machine with others.
const SCHEDULING_SLACK: Duration = Duration::from_millis(500);

/// Whatever takes longer counts as this: an hour.
const LONGEST_MICROSECONDS: u64 = 3_600_000_000;

/// The state of a message.
#[derive(Clone, Debug, Default)]
struct Entry {
    client: u64,
    online: bool,
    /// Just before its AddNewMsg was sent.
    sent: Option<Instant>,
    /// When that was answered.
    answered: Option<Instant>,
    acked: bool,
    timed_out_in: Option<BatchId>,
    /// A request failed: what becomes of the message is then not to be known.
    failed: bool,
}

/// The account of a replay.
pub struct Ledger {
    ack_timeout: Duration,
    latest: Duration,
    entries: Vec<Entry>,
    /// Each batch seen, and with which delivery counts.
    batches: HashMap<BatchId, HashSet<u32>>,
    /// Batches that arrived before the first message was pushed are left over from others.
    opened: bool,
    leftover_batches: u64,
    mismatches: Mismatches,
    ack_latency: Histogram<u64>,
    timeout_lateness: Histogram<u64>,
}

impl Ledger {
    /// The ledger of a plan, for a ring with this default ack timeout and this tick.
    pub fn new(plan: &[Planned], ack_timeout: Duration, tick: Duration) -> Ledger {
        let mut entries = vec![Entry::default(); plan.len()];
        for planned in plan {
            let entry = &mut entries[usize::try_from(planned.message.msg_id.0).expect("an index")];
            entry.client = planned.message.client.0;
            entry.online = planned.round_trip.is_some();
        }
        let microseconds = || Histogram::new_with_max(LONGEST_MICROSECONDS, 3).expect("an hour in three digits");
        Ledger {
            ack_timeout,
            latest: ack_timeout + tick + PROMISED_LATENESS + SCHEDULING_SLACK,
            entries,
            batches: HashMap::new(),
            opened: false,
            leftover_batches: 0,
            mismatches: Mismatches::default(),
            ack_latency: microseconds(),
            timeout_lateness: microseconds(),
        }
    }

    /// How long after the last add was answered its batch may arrive.
    pub fn latest(&self) -> Duration {
        self.latest
    }

    /// The replay begins: what comes from now on is judged. How many batches were left over.
    pub fn open(&mut self) -> u64 {
        self.opened = true;
        self.leftover_batches
    }

    /// An AddNewMsg is about to be sent.
    pub fn sending(&mut self, messages: &[Message], now: Instant) {
        for message in messages {
            self.entry(*message).sent = Some(now);
        }
    }

    /// It was answered.
    pub fn added(&mut self, messages: &[Message], outcomes: &[AddOutcome], now: Instant) {
        for (message, outcome) in messages.iter().zip(outcomes) {
            self.entry(*message).answered = Some(now);
            if *outcome == AddOutcome::Rearmed {
                self.mismatches.add(Kind::Rearmed, || {
                    format!(
                        "{message} was in flight already; was another replay here less than an ack timeout ago?"
                    )
                });
            }
        }
    }

    /// A DelMsg was answered.
    pub fn deleted(&mut self, messages: &[Message], outcomes: &[DelOutcome], now: Instant) {
        for (message, outcome) in messages.iter().zip(outcomes) {
            if *outcome != DelOutcome::Acked {
                self.mismatches.add(Kind::NotAcked, || format!("the Ack of {message} was answered {outcome}"));
                continue;
            }
            let entry = self.entry(*message);
            entry.acked = true;
            if let Some(sent) = entry.sent {
                record(&mut self.ack_latency, now - sent);
            }
        }
    }

    /// A request was not answered well: a mismatch for each of its messages, and the end of what is known.
    pub fn failed(&mut self, kind: Kind, messages: &[Message], error: &ClientError) {
        for message in messages {
            self.entry(*message).failed = true;
            self.mismatches.add(kind, || format!("{message}: {error}"));
        }
    }

    /// A batch arrived.
    pub fn delivered(&mut self, batch: &TimeoutBatch, now: Instant) {
        if !self.opened {
            self.leftover_batches += 1;
            return;
        }
        let (id, count) = (batch.id, batch.delivery_count);
        let seen = self.batches.entry(id).or_default();
        let first = seen.is_empty();
        if !seen.insert(count) {
            self.mismatches
                .add(Kind::DuplicateDelivery, || format!("batch {id} came twice as its delivery {count}"));
        }
        for timed_out in &batch.messages {
            if first {
                self.time_out(batch, timed_out.message, timed_out.attempt, now);
            } else if self.known(timed_out.message).is_none_or(|entry| entry.timed_out_in != Some(id)) {
                let message = timed_out.message;
                self.mismatches.add(Kind::ChangedRedelivery, || {
                    format!("delivery {count} of batch {id} holds {message}, which its first did not")
                });
            }
        }
    }

    fn time_out(&mut self, batch: &TimeoutBatch, message: Message, attempt: u8, now: Instant) {
        let id = batch.id;
        let Some(entry) = self.known(message).cloned() else {
            return self.mismatches.add(Kind::Stranger, || {
                format!("batch {id} holds {message}, which this replay did not push; who else uses this sidecar?")
            });
        };
        self.entry(message).timed_out_in = Some(id);
        if entry.failed {
            return;
        }
        if let Some(earlier) = entry.timed_out_in {
            return self
                .mismatches
                .add(Kind::TimedOutTwice, || format!("{message} is in batch {earlier} and in batch {id}"));
        }
        if entry.online {
            self.mismatches.add(Kind::TimedOutThoughOnline, || {
                format!("{message} is in batch {id}, but its phone was online")
            });
        }
        if attempt != ATTEMPT {
            self.mismatches
                .add(Kind::WrongAttempt, || format!("{message} is in batch {id} with attempt {attempt}"));
        }
        if batch.counts.drained {
            self.mismatches.add(Kind::Drained, || format!("{message} is in the drained batch {id}"));
        }
        self.judge_time(batch, message, &entry, now);
    }

    /// The add was accepted somewhere between its sending and its answer, so each bound is counted from the
    /// side that is safe.
    fn judge_time(&mut self, batch: &TimeoutBatch, message: Message, entry: &Entry, now: Instant) {
        let (id, ack_timeout, latest) = (batch.id, self.ack_timeout, self.latest);
        if let Some(after) = entry.sent.map(|sent| now - sent)
            && after < ack_timeout
        {
            self.mismatches.add(Kind::Early, || {
                format!("{message} is in batch {id} {after:?} after it was sent, before {ack_timeout:?} were over")
            });
        }
        // A redelivery is late by nature.
        if let Some(after) = entry.answered.map(|answered| now - answered)
            && batch.delivery_count == 1
        {
            record(&mut self.timeout_lateness, after.saturating_sub(ack_timeout));
            if after > latest {
                self.mismatches.add(Kind::Late, || {
                    format!("{message} is in batch {id} {after:?} after it was added, {latest:?} were allowed")
                });
            }
        }
    }

    /// The replay is over: what is still missing will not come any more.
    pub fn close(&mut self) {
        for (index, entry) in self.entries.iter().enumerate() {
            if !entry.failed && !entry.online && entry.timed_out_in.is_none() {
                self.mismatches.add(Kind::NeverTimedOut, || {
                    format!("{index}:{} was never acknowledged, and is in no batch", entry.client)
                });
            }
        }
    }

    /// How many messages have an outcome, or will have none.
    pub fn settled(&self) -> usize {
        self.count(|entry| entry.failed || entry.acked || entry.timed_out_in.is_some())
    }

    /// How many messages were added.
    pub fn pushed(&self) -> usize {
        self.count(|entry| entry.answered.is_some())
    }

    /// How many messages were acknowledged.
    pub fn acked(&self) -> usize {
        self.count(|entry| entry.acked)
    }

    /// How many messages were in a batch.
    pub fn timed_out(&self) -> usize {
        self.count(|entry| entry.timed_out_in.is_some())
    }

    /// Clients of whose messages the last in the plan timed out: where an online table would have them.
    pub fn clients_without_ack(&self, plan: &[Planned]) -> usize {
        let mut offline = HashMap::new();
        for planned in plan {
            if let Some(entry) = self.known(planned.message) {
                offline.insert(planned.message.client, entry.timed_out_in.is_some());
            }
        }
        offline.into_values().filter(|offline| *offline).count()
    }

    /// All that went otherwise than the trace says.
    pub fn mismatches(&self) -> &Mismatches {
        &self.mismatches
    }

    /// From sending the add to the answer `acked`, the phone's round trip included; in µs.
    pub fn ack_latency(&self) -> &Histogram<u64> {
        &self.ack_latency
    }

    /// From the end of the ack timeout, counted from the add's answer, to the batch; in µs.
    pub fn timeout_lateness(&self) -> &Histogram<u64> {
        &self.timeout_lateness
    }

    fn count(&self, holds: impl Fn(&Entry) -> bool) -> usize {
        self.entries.iter().filter(|entry| holds(entry)).count()
    }

    /// A message that was pushed by this replay.
    fn known(&self, message: Message) -> Option<&Entry> {
        let entry = self.entries.get(usize::try_from(message.msg_id.0).ok()?)?;
        (entry.client == message.client.0 && entry.sent.is_some()).then_some(entry)
    }

    fn entry(&mut self, message: Message) -> &mut Entry {
        let index = usize::try_from(message.msg_id.0).ok();
        index.and_then(|index| self.entries.get_mut(index)).expect("msg_ids are indices of the plan")
    }
}

fn record(histogram: &mut Histogram<u64>, duration: Duration) {
    histogram.saturating_record(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
}

#[cfg(test)]
mod tests;
