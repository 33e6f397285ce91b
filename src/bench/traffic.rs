//! Makes the requests of one connection and checks the answers. This module does no I/O: it reads and writes buffers.
//!
//! ```text
//!   numbers   0 ......... next_del ............ next_add ......
//!             acknowledged |<---- the window --->|  not yet added
//!             or left      |  to time out later  |
//! ```
//!
//! The window of a connection holds the numbers of its messages in flight. The connection adds new messages at the
//! right end. At the left end, it deletes the old messages that it must acknowledge, in a scattered order. The server
//! applies the requests of a connection in order. So the connection stores only the two ends of the window.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::BytesMut;

use super::frames::{self, Kind, Outstanding, Sent};
use super::ids::acknowledged;
use super::load_state::{LoadState, Phase};
use super::records::{Counters, Recorder, Run};
use super::schedule::Schedule;
use super::{Op, Order};
use crate::core::{Message, Operation};
use crate::protocol::Codec;

/// The maximum number of encoded bytes that wait to be written. At this limit, the connection makes no more requests.
pub(super) const WRITE_AHEAD: usize = 256 * 1024;

/// How many messages may be in flight beyond the window with [`Order::Mixed`], which adds and deletes in random order.
/// If two frames hold more messages than this, adds and deletes alternate.
const MOST_AHEAD: u64 = 8;

/// How long after the end of the measurement the connection still makes requests that were due before the end, in ns.
/// Without a limit, a server that is slower than the rate would never let the phase end.
const GRACE: u64 = 1_000_000_000;

/// The first correlation id of the load. The handshake uses lower ids.
const FIRST_CORRELATION: u32 = 16;

/// The attempt number of every message: a load adds each message only once.
const ATTEMPT: u8 = 1;

/// The traffic of one connection.
#[derive(Debug)]
pub(super) struct Traffic {
    shared: Arc<LoadState>,
    connection: u64,
    /// The number of messages to keep in flight.
    window: u64,
    /// The number of messages in a full frame.
    frame: u64,
    ping_length: usize,
    phase: Phase,
    schedule: Option<Schedule>,
    /// When the current pair of an add and a delete was due.
    due_at: u64,
    /// When requests were last made.
    made_at: u64,
    outstanding: Outstanding,
    next_add: u64,
    next_del: u64,
    /// The messages of the current request.
    messages: Vec<Message>,
    add_run: Run,
    del_run: Run,
    counters: Counters,
}

impl Traffic {
    /// Creates the traffic of a connection that keeps `window` messages in flight.
    pub(super) fn new(shared: Arc<LoadState>, connection: usize, window: u64) -> Traffic {
        let options = &shared.options;
        Traffic {
            connection: connection as u64,
            window,
            frame: options.ids_per_frame as u64,
            ping_length: options.ping_length(),
            phase: Phase::Rest,
            schedule: None,
            due_at: 0,
            made_at: 0,
            outstanding: Outstanding::new(options.pipeline(), FIRST_CORRELATION),
            next_add: 0,
            next_del: 0,
            messages: Vec::with_capacity(options.ids_per_frame),
            add_run: Run::default(),
            del_run: Run::default(),
            counters: Counters { connection, ..Counters::default() },
            shared,
        }
    }

    /// Starts a phase. At a fixed rate, `schedule` says when requests are due.
    pub(super) const fn start(&mut self, phase: Phase, schedule: Option<Schedule>) {
        self.phase = phase;
        self.schedule = schedule;
    }

    /// Returns whether requests are unanswered.
    pub(super) const fn is_waiting(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// Returns whether the phase is done.
    pub(super) fn is_done(&self, now: u64) -> bool {
        let made = match self.phase {
            Phase::Rest | Phase::Done => true,
            Phase::Fill => self.next_add >= self.window,
            Phase::Measure { until, .. } => now >= until && !self.is_behind(now, until),
            Phase::Clean => self.next_del >= self.next_add,
        };
        made && self.outstanding.is_empty()
    }

    /// Appends the requests that can be made now.
    pub(super) fn requests(&mut self, now: u64, out: &mut BytesMut) {
        self.made_at = now;
        while self.outstanding.has_room() && out.len() < WRITE_AHEAD {
            let more = match self.phase {
                Phase::Rest | Phase::Done => false,
                Phase::Fill => self.next_add < self.window && self.add(now, self.window - self.next_add, out),
                Phase::Measure { until, .. } => {
                    (now < until || self.is_behind(now, until)) && self.next_of_pair(now, until, out)
                }
                Phase::Clean => self.next_del < self.next_add && self.del(now, self.next_add, out),
            };
            if !more {
                break;
            }
        }
    }

    /// Returns whether, at a fixed rate, requests that were due before `until` are still to be made. Returns false once
    /// [`GRACE`] has passed after `until`.
    fn is_behind(&self, now: u64, until: u64) -> bool {
        let is_due =
            |schedule: &Schedule| now < until.saturating_add(GRACE) && (schedule.due_at < until || self.can_del());
        self.schedule.as_ref().is_some_and(is_due)
    }

    /// Returns whether the add of a pair is made and its delete is not.
    fn can_del(&self) -> bool {
        self.next_add - self.next_del >= self.window + self.frame
    }

    /// Counts the requests that were due before the end and never made. Records them as if they were answered `now`,
    /// because no earlier answer was possible.
    pub(super) fn count_missed(&mut self, now: u64) {
        let (Phase::Measure { until, .. }, Some(schedule)) = (self.phase, &mut self.schedule) else { return };
        let with_dels = self.shared.options.op == Op::Wheel && self.shared.options.acked > 0.0;
        let mut recorder = self.shared.recorder(self.counters.connection).lock();
        while schedule.due_at < until {
            let mut missed = Run { sent_at: schedule.due_at, count: schedule.skip() };
            self.counters.not_made += missed.count;
            if with_dels {
                missed.clone().record(now, &mut recorder.dels);
            }
            missed.record(now, &mut recorder.adds);
        }
    }

    /// Makes the next add or delete of a pair, or a Ping, if it is due. Returns false if nothing is due.
    fn next_of_pair(&mut self, now: u64, until: u64, out: &mut BytesMut) -> bool {
        let can_del = self.can_del();
        if can_del && !self.adds_first() {
            return self.del_of_pair(now, out);
        }
        let due_at = self.schedule.as_ref().map_or(now, |schedule| schedule.due_at);
        if due_at > now || due_at >= until {
            return can_del && self.del_of_pair(now, out);
        }
        self.due_at = due_at;
        if let Some(schedule) = &mut self.schedule {
            schedule.advance();
        }
        match self.shared.options.op {
            Op::Wheel => self.add(self.due_at, self.frame, out),
            Op::Ping => self.ping(self.due_at, out),
        }
    }

    /// Makes the delete of a pair.
    fn del_of_pair(&mut self, now: u64, out: &mut BytesMut) -> bool {
        let at = if self.schedule.is_some() { self.due_at } else { now };
        self.del(at, self.next_del + self.frame, out)
    }

    /// Returns whether the add of another pair comes before the delete of this pair.
    fn adds_first(&self) -> bool {
        let ahead = self.next_add - self.next_del - self.window;
        self.shared.options.order == Order::Mixed
            && ahead + self.frame <= MOST_AHEAD
            && self.shared.ids.draw(self.connection, self.next_add + self.next_del)
    }

    /// Makes an AddNewMsg of up to `most` messages, at most one full frame.
    fn add(&mut self, at: u64, most: u64, out: &mut BytesMut) -> bool {
        let (ids, connection, first) = (self.shared.ids, self.connection, self.next_add);
        self.next_add += most.min(self.frame);
        self.messages.clear();
        self.messages.extend((first..self.next_add).map(|number| ids.message(connection, number)));
        let ack_timeout_ticks = self.shared.options.ack_timeout_ticks.unwrap_or_default();
        self.request(Operation::Add { ack_timeout_ticks, attempt: ATTEMPT }, at, first, out)
    }

    /// Makes a DelMsg for the next messages at the left end of the window: at most a full frame, and only up to `end`.
    /// Leaves out messages that must time out. Makes no request if no message remains. Always returns true.
    fn del(&mut self, at: u64, end: u64, out: &mut BytesMut) -> bool {
        let (ids, connection, window, added) = (self.shared.ids, self.connection, self.window, self.next_add);
        let first = self.next_del;
        self.next_del = end.min(first + self.frame);
        let scattered = (first..self.next_del).map(|nth| acknowledged(nth, window, added));
        let acked = scattered.filter(|number| ids.is_acked(connection, *number));
        self.messages.clear();
        self.messages.extend(acked.map(|number| ids.message(connection, number)));
        self.messages.is_empty() || self.request(Operation::Del { withdraw: false }, at, first, out)
    }

    /// Appends a request for `self.messages`, and returns true.
    #[expect(clippy::cast_possible_truncation, reason = "a frame has at most 32,768 messages")]
    fn request(&mut self, operation: Operation, at: u64, first: u64, out: &mut BytesMut) -> bool {
        let kind = if operation.is_add() { Kind::Add } else { Kind::Del };
        Codec::default().encode_request(self.outstanding.next_correlation(), operation, &self.messages, out);
        self.outstanding.push(Sent::new(kind, first, self.messages.len() as u32, at, self.made_at));
        true
    }

    fn ping(&mut self, at: u64, out: &mut BytesMut) -> bool {
        frames::put_ping(out, self.outstanding.next_correlation(), self.next_add, self.ping_length);
        self.outstanding.push(Sent::new(Kind::Ping, self.next_add, 1, at, self.made_at));
        // A Ping has no delete, so both ends move and the window keeps its size.
        (self.next_add, self.next_del) = (self.next_add + 1, self.next_del + 1);
        true
    }

    /// Handles all complete frames at the front of `input`, which were read at `now`. Returns how many bytes they take.
    /// Answers the server's Pings in `out`.
    ///
    /// # Errors
    ///
    /// Fails if the connection can no longer be used.
    pub(super) fn answers(&mut self, input: &[u8], now: u64, out: &mut BytesMut) -> Result<usize, String> {
        let shared = Arc::clone(&self.shared);
        let mut recorder = shared.recorder(self.counters.connection).lock();
        let measured = matches!(self.phase, Phase::Measure { until, .. } if now < until);
        // At a fixed rate, the latency of every due request counts, however late its answer is.
        let timed = measured || (matches!(self.phase, Phase::Measure { .. }) && self.schedule.is_some());
        let (mut taken, mut messages, mut frames) = (0, 0, 0);
        while let Some(frame) = frames::next_frame(&input[taken..])? {
            taken += frame.len();
            let Some(sent) = self.outstanding.take(frames::correlation(frame)) else {
                if let Some(error) = frames::unsolicited(frame, out)? {
                    shared.errors.record(error);
                }
                continue;
            };
            let count = u64::from(sent.count);
            (frames, messages) = (frames + 1, messages + count);
            let is_right = match sent.kind {
                Kind::Add => frames::added(frame, sent.count)
                    .map(|deadline| self.added(sent, deadline, &mut recorder))
                    .is_some(),
                Kind::Del => frames::acked(frame, sent.count),
                Kind::Ping => frames::echoed(frame, sent.first, self.ping_length),
            };
            if !is_right {
                shared.errors.record(frames::wrong(frame, sent)?);
                continue;
            }
            let Counters { added, acked, all_added, all_acked, .. } = &mut self.counters;
            let (run, histogram, counter, of_all) = match sent.kind {
                Kind::Add | Kind::Ping => (&mut self.add_run, &mut recorder.adds, added, all_added),
                Kind::Del => (&mut self.del_run, &mut recorder.dels, acked, all_acked),
            };
            *of_all += count;
            if measured {
                *counter += count;
            }
            if timed {
                run.extend(sent.at, now, histogram);
            }
        }
        if timed {
            self.add_run.record(now, &mut recorder.adds);
            self.del_run.record(now, &mut recorder.dels);
        }
        self.counters.frames += if measured { frames } else { 0 };
        shared.frames.fetch_add(frames, Ordering::Relaxed);
        shared.messages.fetch_add(messages, Ordering::Relaxed);
        Ok(taken)
    }

    /// Counts the added messages that must time out. Records when the request that got this deadline was made.
    fn added(&mut self, sent: Sent, deadline: u64, recorder: &mut Recorder) {
        let (ids, connection) = (self.shared.ids, self.connection);
        if !ids.all_are_acked {
            let numbers = sent.first..sent.first + u64::from(sent.count);
            for number in numbers.filter(|number| !ids.is_acked(connection, *number)) {
                self.counters.left_to_time_out += 1;
                recorder.timing_out = Some((connection, number));
            }
            recorder.tick_times.record(deadline, sent.made_at());
        }
    }

    /// Returns the counters so far.
    pub(super) fn counters(&self) -> Counters {
        Counters { numbers: self.next_add, ..self.counters }
    }
}

#[cfg(test)]
mod tests;
