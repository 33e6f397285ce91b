//! Checks the messages that time out. A message that is not acknowledged must time out exactly once, and not too early.
//! An acknowledged message must not time out.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use hdrhistogram::Histogram;

use super::ids::Ids;
use super::records::{Counters, Errors, TickTimes, histogram};
use crate::client::Delivered;
use crate::core::BatchId;
use crate::protocol::frame::TimeoutBatch;

/// The error text for a message that timed out although the load had to acknowledge it. Either so many messages are in
/// flight that its DelMsg came too late, or the server is wrong.
const EARLY_FOR_US: &str = "a message timed out though it was to be acknowledged: if its DelMsg came too late, keep \
                            fewer --in-flight, or raise --ack-timeout-ticks";

/// A set of numbers, stored as one bit per number.
#[derive(Debug, Default)]
struct Numbers {
    words: Vec<u64>,
    /// The greatest number plus one; 0 if the set is empty.
    end: u64,
}

impl Numbers {
    /// Inserts a number. Returns whether the number is new.
    fn insert(&mut self, number: u64) -> bool {
        let place = usize::try_from(number / 64).expect("a usize can count the messages of a load");
        if place >= self.words.len() {
            self.words.resize(place + 1, 0);
        }
        let bit = 1 << (number % 64);
        let is_new = self.words[place] & bit == 0;
        self.words[place] |= bit;
        self.end = self.end.max(number + 1);
        is_new
    }
}

/// An arrived batch, for computing its lateness: its tick, its time of arrival, and how many messages of this load it
/// has.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    tick: u64,
    at: u64,
    messages: u64,
}

/// The record of all messages that have timed out.
#[derive(Debug, Default)]
pub(super) struct Timeouts {
    ids: Ids,
    /// The numbers of the messages that timed out, by connection.
    seen: BTreeMap<u64, Numbers>,
    batches: HashSet<BatchId>,
    /// Batches that are not checked yet, each with its time of arrival in ns since the load began.
    pub(super) unchecked: Vec<(Arc<Delivered>, u64)>,
    arrived: Vec<Arrived>,
    /// How many messages of this load timed out.
    pub(super) count: u64,
    /// How many messages of other clients of the same server timed out.
    pub(super) of_others: u64,
    /// How many times a batch was redelivered.
    pub(super) redelivered: u64,
}

impl Timeouts {
    pub(super) fn new(ids: Ids) -> Timeouts {
        Timeouts { ids, ..Timeouts::default() }
    }

    /// Checks all batches that have arrived.
    pub(super) fn check(&mut self, errors: &Errors) {
        for (delivered, at) in std::mem::take(&mut self.unchecked) {
            self.take(&delivered.batch, at, errors);
        }
    }

    /// Checks a batch that arrived at `at`, in ns since the load began.
    fn take(&mut self, batch: &TimeoutBatch, at: u64, errors: &Errors) {
        if !self.batches.insert(batch.id) {
            self.redelivered += 1;
            if batch.delivery_count < 2 {
                errors.record_kind("a batch came twice, but not as a redelivery", batch.id);
            }
            return;
        }
        let before = self.count;
        for timed_out in &batch.messages {
            let message = timed_out.message;
            let Some((connection, number)) = self.ids.origin(message) else {
                self.of_others += 1;
                continue;
            };
            if self.ids.is_acked(connection, number) {
                errors.record_kind(EARLY_FOR_US, message);
            } else if self.seen.entry(connection).or_default().insert(number) {
                self.count += 1;
            } else {
                errors.record_kind("a message timed out in two batches", message);
            }
        }
        // A drained batch is delivered before its tick ends, because its server shuts down. So it says nothing about
        // lateness.
        if self.count > before && !batch.counts.drained {
            self.arrived.push(Arrived { tick: batch.id.tick.0, at, messages: self.count - before });
        }
    }

    /// Records an error if messages are missing, or if a message timed out that was never added.
    pub(super) fn compare(&self, counters_of: &[Counters], errors: &Errors) {
        let expected: u64 = counters_of.iter().map(|counters| counters.left_to_time_out).sum();
        let missing = expected.saturating_sub(self.count);
        if missing > 0 {
            errors.record(format!(
                "{missing} of {expected} messages were neither acknowledged nor did they time out"
            ));
        }
        for Counters { connection, numbers, .. } in counters_of {
            let end = self.seen.get(&(*connection as u64)).map_or(0, |seen| seen.end);
            if end > *numbers {
                let number = end - 1;
                errors
                    .record(format!("message {number} of connection {connection} timed out but was never added"));
            }
        }
    }

    /// Returns how late the batches arrived, in ns, counted per message.
    ///
    /// The server publishes the batch of a tick when the tick ends. Each answer to an AddNewMsg, the request that adds
    /// messages, tells the server's current tick. If an answer told this tick or an earlier tick, its request was sent
    /// before the tick ended. Lateness counts from the time at which the last of these requests was sent. So it is
    /// never understated, and it is overstated by at most the time until the next request is answered.
    pub(super) fn lateness(&self, tick_times: &TickTimes, ticks: u16, errors: &Errors) -> Histogram<u64> {
        let mut lateness = histogram();
        for arrived in &self.arrived {
            // The deadline in an answer is the current tick plus the ack timeout.
            let Some(expired) = tick_times.last_at_or_before(arrived.tick + u64::from(ticks)) else { continue };
            match arrived.at.checked_sub(expired) {
                Some(late) => lateness.saturating_record_n(late, arrived.messages),
                None => errors.record(format!(
                    "a batch of tick {} came {} us before its tick was over",
                    arrived.tick,
                    (expired - arrived.at) / 1_000
                )),
            }
        }
        lateness
    }
}

#[cfg(test)]
mod tests;
