//! Makes the requests of one connection and checks the answers. No I/O: bytes come in, bytes go out.
//!
//! ```text
//!   numbers   0 ......... next_del ............ next_add ......
//!             acknowledged |<---- the window --->|  not yet added
//!             or left      |  to time out later  |
//! ```
//!
//! A connection adds new messages at the right end of its window and deletes old ones that are to be acknowledged at
//! its left end, scattered among their neighbours. Requests of one connection are applied in order, so that nothing of
//! this has to be remembered but the two ends.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::frames;
use super::ids::acknowledged;
use super::latency::{Recorder, Run};
use super::requests::{Kind, Outstanding, Sent};
use super::schedule::Schedule;
use super::shared::{Counters, Plan};
use super::{Op, Order};

/// Requests are put together up to so many bytes ahead of what the server takes.
pub(super) const WRITE_AHEAD: usize = 256 * 1024;

/// Messages that a connection adds beyond its window at most, where adds and dels are drawn. With more of them in a
/// frame they take turns.
const MOST_AHEAD: u64 = 8;

/// For how long after the end, in ns, requests are still made that were due before it: where the server is slower than
/// the rate there may be no end of them.
const GRACE: u64 = 1_000_000_000;

/// The first correlation id that the handshake leaves free.
const FIRST_CORRELATION: u32 = 16;

/// The work of a connection in the current phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// Nothing.
    Rest,
    /// Add until the window is full.
    Fill,
    /// Add and delete, or ping, until then, in ns since the load began, and make what was due before that. This is
    /// what is measured.
    Steady { until: u64 },
    /// Delete what is left.
    Clean,
}

/// The traffic of one connection.
#[derive(Debug)]
pub(super) struct Traffic {
    plan: Arc<Plan>,
    connection: u64,
    /// Messages that are kept in flight.
    window: u64,
    goal: Goal,
    schedule: Option<Schedule>,
    /// When the pair that is being made was due.
    due_at: u64,
    /// When requests were made last.
    made_at: u64,
    outstanding: Outstanding,
    next_add: u64,
    next_del: u64,
    recorder: Arc<Mutex<Recorder>>,
    add_run: Run,
    del_run: Run,
    pub(super) counters: Counters,
}

impl Traffic {
    pub(super) fn new(plan: Arc<Plan>, connection: usize, window: u64, recorder: Arc<Mutex<Recorder>>) -> Traffic {
        Traffic {
            outstanding: Outstanding::new(plan.pipeline, FIRST_CORRELATION),
            plan,
            connection: connection as u64,
            window,
            goal: Goal::Rest,
            schedule: None,
            due_at: 0,
            made_at: 0,
            next_add: 0,
            next_del: 0,
            recorder,
            add_run: Run::default(),
            del_run: Run::default(),
            counters: Counters { connection, ..Counters::default() },
        }
    }

    /// Sets what to do next; at a fixed rate, when.
    pub(super) const fn set_goal(&mut self, goal: Goal, schedule: Option<Schedule>) {
        self.goal = goal;
        self.schedule = schedule;
    }

    /// Whether requests are unanswered.
    pub(super) const fn is_waiting(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// Whether what was to be done is done.
    pub(super) fn is_done(&self, now: u64) -> bool {
        let made = match self.goal {
            Goal::Rest => true,
            Goal::Fill => self.next_add >= self.window,
            Goal::Steady { until } => now >= until && !self.is_behind(now, until),
            Goal::Clean => self.next_del >= self.next_add,
        };
        made && self.outstanding.is_empty()
    }

    /// Appends the requests that can be made now.
    pub(super) fn requests(&mut self, now: u64, out: &mut Vec<u8>) {
        self.made_at = now;
        while self.outstanding.has_room() && out.len() < WRITE_AHEAD {
            let more = match self.goal {
                Goal::Rest => false,
                Goal::Fill => self.next_add < self.window && self.add(now, self.window - self.next_add, out),
                Goal::Steady { until } => {
                    (now < until || self.is_behind(now, until)) && self.next_of_pair(now, until, out)
                }
                Goal::Clean => self.next_del < self.next_add && self.del(now, self.next_add, out),
            };
            if !more {
                break;
            }
        }
    }

    /// Whether, at a fixed rate, something is still to be made that was due before the end.
    fn is_behind(&self, now: u64, until: u64) -> bool {
        let is_due =
            |schedule: &Schedule| now < until.saturating_add(GRACE) && (schedule.next() < until || self.can_del());
        self.schedule.as_ref().is_some_and(is_due)
    }

    /// Whether a pair has begun.
    fn can_del(&self) -> bool {
        self.next_add - self.next_del >= self.window + self.plan.ids_per_frame
    }

    /// Counts what was due before the end and never made as if it had been answered `now`: it would not have been before.
    pub(super) fn count_missed(&mut self, now: u64) {
        let (Goal::Steady { until }, Some(schedule)) = (self.goal, &mut self.schedule) else { return };
        let with_dels = self.plan.op == Op::Wheel && self.plan.ids.some_are_acked();
        let mut recorder = self.recorder.lock();
        while schedule.next() < until {
            let missed = Run { sent_at: schedule.next(), count: schedule.skip() };
            self.counters.not_made += missed.count;
            recorder.miss(missed, with_dels, now);
        }
    }

    /// The next of a pair, or a Ping, if it is due.
    fn next_of_pair(&mut self, now: u64, until: u64, out: &mut Vec<u8>) -> bool {
        let (frame, can_del) = (self.plan.ids_per_frame, self.can_del());
        if can_del && !self.adds_first() {
            return self.del_of_pair(now, out);
        }
        let due_at = self.schedule.as_ref().map_or(now, Schedule::next);
        if due_at > now || due_at >= until {
            return can_del && self.del_of_pair(now, out);
        }
        self.due_at = due_at;
        if let Some(schedule) = &mut self.schedule {
            schedule.advance();
        }
        match self.plan.op {
            Op::Wheel => self.add(self.due_at, frame, out),
            Op::Ping => self.ping(self.due_at, out),
        }
    }

    /// The del of a pair.
    fn del_of_pair(&mut self, now: u64, out: &mut Vec<u8>) -> bool {
        let at = if self.schedule.is_some() { self.due_at } else { now };
        self.del(at, self.next_del + self.plan.ids_per_frame, out)
    }

    /// Whether another pair begins before this one ends.
    fn adds_first(&self) -> bool {
        let ahead = self.next_add - self.next_del - self.window;
        self.plan.order == Order::Mixed
            && ahead + self.plan.ids_per_frame <= MOST_AHEAD
            && self.plan.ids.draw(self.connection, self.next_add + self.next_del)
    }

    /// Adds up to `most` messages, at most a frame.
    fn add(&mut self, at: u64, most: u64, out: &mut Vec<u8>) -> bool {
        let (ids, connection) = (self.plan.ids, self.connection);
        let numbers = self.next_add..self.next_add + most.min(self.plan.ids_per_frame);
        let correlation = self.outstanding.next_correlation();
        if self.plan.is_single_message() {
            let id = ids.message(connection, numbers.start).msg_id;
            frames::put_single_add(out, correlation, self.plan.ack_timeout_ticks, id);
        } else {
            let messages = numbers.clone().map(|number| ids.message(connection, number));
            frames::put_add(out, correlation, self.plan.ack_timeout_ticks, ids.with_clients(), messages);
        }
        self.remember(at, numbers.start, length(&numbers), Kind::Add);
        self.next_add = numbers.end;
        true
    }

    /// Deletes those of a frame's messages, up to `end`, that are to be acknowledged; perhaps none.
    fn del(&mut self, at: u64, end: u64, out: &mut Vec<u8>) -> bool {
        let (ids, connection, window, added) = (self.plan.ids, self.connection, self.window, self.next_add);
        let numbers = self.next_del..end.min(self.next_del + self.plan.ids_per_frame);
        let correlation = self.outstanding.next_correlation();
        let scattered = numbers.clone().map(|nth| acknowledged(nth, window, added));
        let mut acked = scattered.filter(|number| ids.is_acked(connection, *number));
        let count = if self.plan.is_single_message() {
            let number = acked.next();
            if let Some(number) = number {
                frames::put_single_del(out, correlation, ids.message(connection, number).msg_id);
            }
            u32::from(number.is_some())
        } else {
            let messages = acked.map(|number| ids.message(connection, number));
            frames::put_del(out, correlation, ids.with_clients(), messages)
        };
        if count > 0 {
            self.remember(at, numbers.start, count, Kind::Del);
        }
        self.next_del = numbers.end;
        true
    }

    fn ping(&mut self, at: u64, out: &mut Vec<u8>) -> bool {
        let correlation = self.outstanding.next_correlation();
        frames::put_ping(out, correlation, self.next_add, self.plan.ping_length);
        self.remember(at, self.next_add, 1, Kind::Ping);
        // A Ping has no second half: the window stays as it is.
        (self.next_add, self.next_del) = (self.next_add + 1, self.next_del + 1);
        true
    }

    /// Remembers a request that was just made.
    fn remember(&mut self, at: u64, first: u64, count: u32, kind: Kind) {
        self.outstanding.push(Sent { at, made_at: self.made_at, first, count, kind });
    }

    /// Takes all whole answers at the beginning of `input`, which were read at `now`; returns how many bytes they had.
    /// Pings of the server are answered in `out`.
    ///
    /// # Errors
    ///
    /// When the connection is of no more use.
    pub(super) fn answers(&mut self, input: &[u8], now: u64, out: &mut Vec<u8>) -> Result<usize, String> {
        let recorder = Arc::clone(&self.recorder);
        let mut recorder = recorder.lock();
        let measured = matches!(self.goal, Goal::Steady { until } if now < until);
        // At a fixed rate everything counts that was due, however late its answer.
        let timed = measured || (matches!(self.goal, Goal::Steady { .. }) && self.schedule.is_some());
        let (mut taken, mut messages, mut frames) = (0, 0, 0);
        let before = (self.counters.added, self.counters.acked);
        while let Some(frame) = frames::next_frame(&input[taken..]).map_err(frames::broken)? {
            taken += frame.len();
            let Some(sent) = self.outstanding.take(frames::correlation(frame)) else {
                if let Some(error) = frames::unsolicited(frame, out)? {
                    self.plan.errors.record(error);
                }
                continue;
            };
            frames += 1;
            messages += u64::from(sent.count);
            self.answer(frame, sent, now, timed.then_some(&mut *recorder))?;
        }
        if timed {
            self.add_run.record(now, &mut recorder.adds);
            self.del_run.record(now, &mut recorder.dels);
        }
        if measured {
            self.counters.frames += frames;
        } else {
            (self.counters.added, self.counters.acked) = before;
        }
        self.plan.live.count(frames, messages);
        self.plan.live.record_tick(self.counters.tick_times.latest_at());
        Ok(taken)
    }

    fn answer(
        &mut self,
        frame: &[u8],
        sent: Sent,
        now: u64,
        recorder: Option<&mut Recorder>,
    ) -> Result<(), String> {
        let right = match sent.kind {
            Kind::Add => frames::added(frame, sent.count).map(|deadline| self.added(sent, deadline)),
            Kind::Del => frames::acked(frame, sent.count).then(|| self.counters.acked += u64::from(sent.count)),
            Kind::Ping => frames::echoed(frame, sent.first, self.plan.ping_length).then_some(()),
        };
        if right.is_none() {
            self.plan.errors.record(frames::wrong(frame, sent)?);
            return Ok(());
        }
        let Some(recorder) = recorder else { return Ok(()) };
        let (run, histogram) = match sent.kind {
            Kind::Add | Kind::Ping => (&mut self.add_run, &mut recorder.adds),
            Kind::Del => (&mut self.del_run, &mut recorder.dels),
        };
        if let Some(mut ended) = run.extend(sent.at) {
            ended.record(now, histogram);
        }
        Ok(())
    }

    fn added(&mut self, sent: Sent, deadline: u64) {
        self.counters.added += u64::from(sent.count);
        if self.plan.ids.all_are_acked() {
            return;
        }
        let (ids, connection) = (self.plan.ids, self.connection);
        let numbers = sent.first..sent.first + u64::from(sent.count);
        self.counters.left_to_time_out +=
            numbers.filter(|number| !ids.is_acked(connection, *number)).count() as u64;
        self.counters.tick_times.record(deadline, sent.made_at);
    }

    /// The counters so far.
    pub(super) fn counters(&self) -> Counters {
        Counters { numbers: self.next_add, ..self.counters.clone() }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a frame has at most 32,768 messages")]
const fn length(numbers: &Range<u64>) -> u32 {
    (numbers.end - numbers.start) as u32
}

#[cfg(test)]
mod tests;
