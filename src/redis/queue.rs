//! What waits to be sent to a ring, and what was sent and is not answered: the coalescing without its I/O.
//!
//! Requests are *frames*, in the order in which they were made. A *chunk* is what one script carries: slices of
//! frames, at most [`MAX_CHUNK`] messages. Chunks are numbered; a script applies number n only after n - 1.
//!
//! # Invariants
//!
//! 1. Every frame is answered exactly once, and none before all its messages have an outcome or it is refused.
//! 2. Messages are sent in the order of their frames, and a message of a del is sent again only if its chunk is
//!    known not to have been applied.
//! 3. A message of an add is never sent again.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use redis::Cmd;
use tokio::sync::oneshot;

use super::request::{Frame, Request, Work, away, outcome, silent, too_many};
use crate::core::message::AddOutcome;
use crate::core::refusal::Refusal;
use crate::core::ring::{AddNewMsgAnswer, DelMsgAnswer};
use crate::core::tick::Tick;

/// The most messages that one script carries: about a millisecond of Redis' time.
pub(super) const MAX_CHUNK: usize = 1_000;

/// Messages `from..to` of a frame.
#[derive(Clone, Copy, Debug)]
struct Slice {
    frame: u64,
    from: usize,
    to: usize,
}

enum Entry {
    Slice(Slice),
    Barrier(oneshot::Sender<()>),
}

/// What one script carries.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) number: u64,
    slices: Vec<Slice>,
    barriers: Vec<oneshot::Sender<()>>,
}

impl Chunk {
    /// Whether it carries no message.
    pub(super) fn is_barrier(&self) -> bool {
        self.slices.is_empty()
    }

    /// Lets whoever waits at a chunk without messages pass with this one.
    pub(super) fn wait_for_it(&mut self, barrier: Chunk) {
        self.barriers.extend(barrier.barriers);
    }

    /// Lets whoever waits pass.
    pub(super) fn pass(self) {
        self.barriers.into_iter().for_each(tell);
    }
}

/// A script's answer to a chunk.
#[derive(Debug)]
pub(super) struct Applied<'a> {
    pub(super) tick_due: Tick,
    /// A letter a message.
    pub(super) letters: &'a str,
    /// ms, comma-separated.
    pub(super) latencies: &'a str,
    /// Messages in flight after it; not known of an answer that was asked for again.
    pub(super) in_flight: Option<u64>,
}

/// Everything that is not answered.
#[derive(Default)]
pub(super) struct Queue {
    frames: HashMap<u64, Frame>,
    next_frame: u64,
    entries: VecDeque<Entry>,
    /// Chunks whose answer did not come, oldest first.
    unanswered: Vec<Chunk>,
}

impl Queue {
    /// Takes a request in.
    pub(super) fn push(&mut self, request: Request) {
        let (messages, work) = match request {
            Request::Barrier(told) => return self.entries.push_back(Entry::Barrier(told)),
            Request::Add { messages, ack_timeout_ticks, attempt, reply } => {
                let answer = AddNewMsgAnswer { deadline: Tick(0), outcomes: Vec::with_capacity(messages.len()) };
                (messages, Work::Add { ack_timeout_ticks, attempt, answer, reply })
            }
            Request::Del { messages, withdraw, counted, reply } => {
                (messages, Work::Del { withdraw, answer: DelMsgAnswer::default(), counted, reply })
            }
        };
        let frame = Frame { messages, sent: false, work };
        if frame.messages.is_empty() {
            return frame.answer();
        }
        let name = self.next_frame;
        self.next_frame += 1;
        self.entries.push_back(Entry::Slice(Slice { frame: name, from: 0, to: frame.messages.len() }));
        self.frames.insert(name, frame);
    }

    /// Takes a request in while Redis is away: an add is refused, a del held.
    pub(super) fn push_while_away(&mut self, request: Request) {
        match request {
            Request::Add { reply, .. } => {
                let _ = reply.send(Err(away()));
            }
            // Whoever waits for what was before it waits no longer.
            Request::Barrier(_) => {}
            del @ Request::Del { .. } => self.push(del),
        }
    }

    /// Whether a chunk adds something.
    pub(super) fn has_adds(&self, chunk: &Chunk) -> bool {
        chunk.slices.iter().any(|slice| self.frames.get(&slice.frame).is_some_and(Frame::is_add))
    }

    /// The next chunk, if anything waits. One without messages carries barriers only.
    pub(super) fn next_chunk(&mut self, number: u64) -> Option<Chunk> {
        let mut chunk = Chunk { number, slices: Vec::new(), barriers: Vec::new() };
        let mut room = MAX_CHUNK;
        while room > 0 {
            match self.entries.pop_front() {
                None => break,
                Some(Entry::Barrier(told)) => chunk.barriers.push(told),
                Some(Entry::Slice(slice)) => {
                    // Its frame was refused meanwhile.
                    let Some(frame) = self.frames.get_mut(&slice.frame) else { continue };
                    frame.sent = true;
                    let to = slice.to.min(slice.from + room);
                    room -= to - slice.from;
                    chunk.slices.push(Slice { to, ..slice });
                    if to < slice.to {
                        self.entries.push_front(Entry::Slice(Slice { from: to, ..slice }));
                    }
                }
            }
        }
        (!chunk.slices.is_empty() || !chunk.barriers.is_empty()).then_some(chunk)
    }

    /// Writes the frames of a chunk as the script reads them.
    pub(super) fn encode(&self, chunk: &Chunk, call: &mut Cmd) {
        let parts: Vec<(&Slice, &Frame)> =
            chunk.slices.iter().filter_map(|slice| Some((slice, self.frames.get(&slice.frame)?))).collect();
        call.arg(parts.len());
        for (slice, frame) in &parts {
            let count = slice.to - slice.from;
            let whole = if slice.from == 0 { frame.messages.len() } else { 0 };
            match &frame.work {
                Work::Add { ack_timeout_ticks, attempt, .. } => {
                    call.arg("a").arg(ack_timeout_ticks).arg(attempt).arg(count).arg(whole)
                }
                Work::Del { withdraw, .. } => {
                    call.arg(if *withdraw { "w" } else { "d" }).arg(0).arg(0).arg(count).arg(0)
                }
            };
            call.arg(slice.frame);
        }
        let mut text = String::with_capacity(42);
        for (slice, frame) in &parts {
            for message in &frame.messages[slice.from..slice.to] {
                text.clear();
                let _ = write!(text, "{message}");
                call.arg(&text);
            }
        }
    }

    /// Notes what became of a chunk, and answers the frames that are complete.
    pub(super) fn applied(&mut self, chunk: Chunk, applied: &Applied<'_>, max_in_flight: u64) {
        let mut letters = applied.letters.bytes();
        let mut latencies = applied.latencies.split(',').map(|ms| ms.parse().unwrap_or_default());
        let Chunk { slices, barriers, .. } = chunk;
        for Slice { frame: name, from, to } in slices {
            let letters = letters.by_ref().take(to - from);
            let Some(frame) = self.frames.get_mut(&name) else {
                // Its answer has been given; its latencies are skipped.
                let measured = letters.filter(|letter| matches!(letter, b'k' | b'l')).count();
                latencies.by_ref().take(measured).for_each(drop);
                continue;
            };
            let mut refused = false;
            match &mut frame.work {
                Work::Add { answer, ack_timeout_ticks, .. } => {
                    answer.deadline = applied.tick_due.plus(u64::from(*ack_timeout_ticks));
                    for letter in letters {
                        refused |= letter == b'x';
                        let rearmed = letter == b'r';
                        answer.outcomes.push(if rearmed { AddOutcome::Rearmed } else { AddOutcome::Added });
                    }
                }
                Work::Del { answer, .. } => {
                    for letter in letters {
                        answer.outcomes.push(outcome(letter));
                        if matches!(letter, b'k' | b'l') {
                            let ms = latencies.next().unwrap_or_default();
                            answer.ack_latency.record(Duration::from_millis(ms), 1);
                        }
                    }
                }
            }
            if refused || frame.is_complete() {
                let frame = self.frames.remove(&name).expect("it was there");
                if refused {
                    let refusal = too_many(applied.in_flight, frame.messages.len(), max_in_flight);
                    frame.refuse(refusal);
                } else {
                    frame.answer();
                }
            }
        }
        barriers.into_iter().for_each(tell);
    }

    /// The answer to a chunk did not come.
    pub(super) fn unanswered(&mut self, chunk: Chunk) {
        self.unanswered.push(chunk);
    }

    /// Chunks that were certainly not applied are to be sent again, with all behind them: their dels. Their adds
    /// are refused, where a refusal is given.
    pub(super) fn send_again(&mut self, chunks: Vec<Chunk>, refusal: Option<&Refusal>) {
        for chunk in chunks.into_iter().rev() {
            for told in chunk.barriers {
                self.entries.push_front(Entry::Barrier(told));
            }
            for slice in chunk.slices.into_iter().rev() {
                let Some(frame) = self.frames.get(&slice.frame) else { continue };
                match refusal {
                    Some(refusal) if frame.is_add() => {
                        // What was applied of it before cannot be taken back.
                        let partly = slice.from > 0;
                        let frame = self.frames.remove(&slice.frame).expect("it was there");
                        frame.refuse(if partly { silent(&refusal.text) } else { refusal.clone() });
                    }
                    _ => self.entries.push_front(Entry::Slice(slice)),
                }
            }
        }
    }

    /// Redis is away: adds are refused, dels held.
    pub(super) fn refuse_adds(&mut self) {
        self.refuse_adds_with(&away());
        // Whoever waits for what was before it waits no longer.
        self.entries.retain(|entry| matches!(entry, Entry::Slice(_)));
    }

    /// Refuses all adds; those of which a part was sent, with their outcome unknown.
    pub(super) fn refuse_adds_with(&mut self, refusal: &Refusal) {
        let adds: Vec<u64> =
            self.frames.iter().filter(|(_, frame)| frame.is_add()).map(|(name, _)| *name).collect();
        for name in adds {
            let frame = self.frames.remove(&name).expect("it was there");
            let refusal = if frame.sent { silent("no answer came in time") } else { refusal.clone() };
            frame.refuse(refusal);
        }
    }

    /// Refuses every frame of a chunk that Redis will not carry out.
    pub(super) fn refuse(&mut self, chunk: Chunk, refusal: &Refusal) {
        for slice in &chunk.slices {
            if let Some(frame) = self.frames.remove(&slice.frame) {
                frame.refuse(refusal.clone());
            }
        }
        chunk.pass();
    }

    /// A new session says which chunk was applied last, and the answers to it and to the one before.
    pub(super) fn recall(&mut self, last: u64, answers: &[String; 2], max_in_flight: u64) {
        let mut not_applied = Vec::new();
        for chunk in std::mem::take(&mut self.unanswered) {
            let answer = last.checked_sub(chunk.number).and_then(|back| answers.get(usize::try_from(back).ok()?));
            match answer.and_then(|answer| Applied::parse(answer)) {
                Some(applied) => self.applied(chunk, &applied, max_in_flight),
                None => not_applied.push(chunk),
            }
        }
        self.send_again(not_applied, Some(&silent("no answer came in time")));
    }
}

impl<'a> Applied<'a> {
    /// An answer as the script keeps it: `tick due|outcomes|latencies`.
    fn parse(text: &'a str) -> Option<Applied<'a>> {
        let mut parts = text.split('|');
        Some(Applied {
            tick_due: Tick(parts.next()?.parse().ok()?),
            letters: parts.next()?,
            latencies: parts.next()?,
            in_flight: None,
        })
    }
}

fn tell(told: oneshot::Sender<()>) {
    // Whoever waited may have given up.
    let _ = told.send(());
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::request::Counted;
    use super::*;
    use crate::core::message::{DelOutcome, Message};
    use crate::core::refusal::{Promise, Reason};

    const MAX: u64 = 1_000_000;

    type Added = oneshot::Receiver<Result<AddNewMsgAnswer, Refusal>>;
    type Deleted = oneshot::Receiver<Result<DelMsgAnswer, Refusal>>;

    fn messages(count: u64) -> Vec<Message> {
        (0..count).map(Message::from).collect()
    }

    fn add(queue: &mut Queue, count: u64) -> Added {
        let (reply, answer) = oneshot::channel();
        queue.push(Request::Add { messages: messages(count), ack_timeout_ticks: 3, attempt: 1, reply });
        answer
    }

    fn del(queue: &mut Queue, count: u64) -> Deleted {
        let (reply, answer) = oneshot::channel();
        let (counted, _) = Counted::new(count, &Arc::default());
        queue.push(Request::Del { messages: messages(count), withdraw: false, counted, reply });
        answer
    }

    fn applied<'a>(letters: &'a str, latencies: &'a str) -> Applied<'a> {
        Applied { tick_due: Tick(7), letters, latencies, in_flight: Some(9) }
    }

    fn words(call: &Cmd) -> String {
        String::from_utf8(call.get_packed_command()).unwrap()
    }

    #[test]
    fn frames_travel_together_in_order_and_each_gets_its_answer() {
        let mut queue = Queue::default();
        let (mut added, mut deleted) = (add(&mut queue, 2), del(&mut queue, 3));
        let chunk = queue.next_chunk(1).unwrap();
        let mut call = redis::cmd("x");
        queue.encode(&chunk, &mut call);
        let plain = words(&call).split("\r\n").filter(|word| !word.starts_with('$')).collect::<Vec<_>>().join(" ");
        assert_eq!(plain.trim(), "*19 x 2 a 3 1 2 2 0 d 0 0 3 0 1 0 1 0 1 2");
        queue.applied(chunk, &applied("arklu", "12,40"), MAX);
        let added = added.try_recv().unwrap().unwrap();
        assert_eq!((added.deadline, added.rearmed()), (Tick(10), 1));
        let deleted = deleted.try_recv().unwrap().unwrap();
        assert_eq!(deleted.outcomes, [DelOutcome::Acked, DelOutcome::Late, DelOutcome::Unknown]);
        assert_eq!(deleted.ack_latency.sum_micros, 52_000);
        assert!(queue.next_chunk(2).is_none());
    }

    #[test]
    fn a_long_frame_is_cut_and_answered_when_all_of_it_is() {
        let mut queue = Queue::default();
        let mut added = add(&mut queue, 2_500);
        for (number, count) in [(1, MAX_CHUNK), (2, MAX_CHUNK), (3, 500)] {
            assert!(added.try_recv().is_err());
            let chunk = queue.next_chunk(number).unwrap();
            queue.applied(chunk, &applied(&"a".repeat(count), ""), MAX);
        }
        assert_eq!(added.try_recv().unwrap().unwrap().outcomes.len(), 2_500);
    }

    #[test]
    fn a_frame_that_is_too_many_is_refused_once_and_the_rest_of_it_not_sent() {
        let mut queue = Queue::default();
        let (mut added, mut deleted) = (add(&mut queue, 1_500), del(&mut queue, 1));
        let chunk = queue.next_chunk(1).unwrap();
        queue.applied(chunk, &applied(&"x".repeat(MAX_CHUNK), ""), MAX);
        assert_eq!(added.try_recv().unwrap().unwrap_err().reason, Reason::MaxInFlight);
        let chunk = queue.next_chunk(2).unwrap();
        queue.applied(chunk, &applied("k", "1"), MAX);
        assert_eq!(deleted.try_recv().unwrap().unwrap().outcomes, [DelOutcome::Acked]);
    }

    #[test]
    fn when_redis_goes_adds_are_refused_with_what_is_true_and_dels_are_held() {
        let mut queue = Queue::default();
        let mut sent = add(&mut queue, 600);
        let mut acked = del(&mut queue, 400);
        let chunk = queue.next_chunk(1).unwrap();
        let mut unsent = add(&mut queue, 1);
        queue.unanswered(chunk);
        queue.refuse_adds();
        assert_eq!(sent.try_recv().unwrap().unwrap_err().reason.promise(), Promise::OutcomeUnknown);
        assert_eq!(unsent.try_recv().unwrap().unwrap_err().reason, Reason::StoreAway);
        assert!(acked.try_recv().is_err());

        // It was applied, and the link has kept the answer.
        let answer = format!("7|{}{}|{}", "a".repeat(600), "k".repeat(400), vec!["5"; 400].join(","));
        queue.recall(1, &[answer, String::new()], MAX);
        assert_eq!(acked.try_recv().unwrap().unwrap().outcomes, [DelOutcome::Acked; 400]);
        assert!(queue.next_chunk(2).is_none());
    }

    #[test]
    fn what_was_not_applied_is_sent_again_before_what_came_later() {
        let mut queue = Queue::default();
        let mut first = del(&mut queue, 2);
        let chunk = queue.next_chunk(5).unwrap();
        let mut second = del(&mut queue, 1);
        queue.unanswered(chunk);
        queue.recall(4, &["7|u|".into(), String::new()], MAX);
        let chunk = queue.next_chunk(5).unwrap();
        queue.applied(chunk, &applied("kku", "1,1"), MAX);
        assert_eq!(first.try_recv().unwrap().unwrap().outcomes, [DelOutcome::Acked; 2]);
        assert_eq!(second.try_recv().unwrap().unwrap().outcomes, [DelOutcome::Unknown]);
    }

    #[test]
    fn a_barrier_is_passed_with_what_was_before_it() {
        let mut queue = Queue::default();
        let _acked = del(&mut queue, 1);
        let (told, mut passed) = oneshot::channel();
        queue.push(Request::Barrier(told));
        let chunk = queue.next_chunk(1).unwrap();
        assert!(passed.try_recv().is_err());
        queue.applied(chunk, &applied("k", "1"), MAX);
        assert_eq!(passed.try_recv(), Ok(()));
    }
}
