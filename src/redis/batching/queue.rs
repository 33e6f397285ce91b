//! What waits to be sent to a ring, and what was sent and is not answered: the coalescing without its I/O.
//!
//! Requests are *frames*, in the order in which they were made. A *chunk* is what one script carries: slices of
//! frames, at most [`MAX_CHUNK`] messages. Chunks are numbered; a script applies number n only after n - 1.
//!
//! # Invariants
//!
//! 1. Every frame is answered exactly once, and none before all its messages have an outcome or it is refused.
//! 2. Messages are sent in the order of their connection's frames, and a message of a del is sent again only if its
//!    chunk is known not to have been applied.
//! 3. A message of an add is never sent again.
//! 4. Connections have turns ([`FairQueue`]), and a frame of which a part was sent goes on before all others.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use redis::Cmd;
use tokio::sync::oneshot;

use crate::core::message::Message;
use crate::core::refusal::Refusal;
use crate::core::request_batch::Operation;
use crate::core::ring::ConnectionId;
use crate::core::tick::Tick;
use crate::redis::batching::applied::Applied;
use crate::redis::batching::chunk::{Chunk, MAX_CHUNK, Slice, Writer};
use crate::redis::batching::fair_queue::FairQueue;
use crate::redis::batching::frames::{Frame, Frames};
use crate::redis::batching::inbox::Item;
use crate::redis::batching::request::{Progress, Run, away, silent, too_many};
use crate::redis::connection::answered::{Ack, Answered, Lost};

/// Everything that is not answered.
#[derive(Default)]
pub(crate) struct Queue {
    frames: Frames,
    lanes: FairQueue,
    /// Messages in the lanes, those of refused frames included.
    waiting: usize,
    /// Who waits until all frames before this one are answered, in this order.
    barriers: VecDeque<(u64, oneshot::Sender<()>)>,
    /// Chunks whose answer did not come, oldest first, each with the generation in which it was sent.
    unanswered: Vec<(i64, Chunk)>,
    /// How far all is answered; its Acks are those that were not taken in yet too.
    progress: Arc<Progress>,
    answered: Answered,
    writer: Writer,
    /// Slices of chunks that are answered, for those to come.
    spare: Vec<Vec<Slice>>,
    /// What a chunk has done, until it is answered.
    run: Run,
    /// How long messages of a slice were in flight that are acknowledged; empty again once it is dealt with.
    latencies: Vec<Duration>,
    /// Who was answered, and is woken when all that are answered together are.
    wakers: Vec<Waker>,
}

impl Queue {
    pub(crate) fn new(progress: Arc<Progress>, kept_acks: usize) -> Queue {
        Queue { progress, answered: Answered::new(kept_acks), ..Queue::default() }
    }

    /// Takes a frame or a barrier in.
    pub(crate) fn push(&mut self, item: Item, messages: &[Message]) {
        match item {
            Item::Barrier(told) => self.barriers.push_back((self.frames.next(), told)),
            Item::Frame(asked, _) if messages.is_empty() => self.wakers.extend(asked.answer(Tick(0), &[])),
            Item::Frame(asked, count) => {
                let of = asked.connection;
                let frame = self.frames.push(asked, messages);
                self.lanes.push_back(of, Slice { frame, from: 0, to: count });
                self.waiting += count;
            }
        }
    }

    /// Takes a frame or a barrier in while Redis is away: an add is refused, a del held.
    pub(crate) fn push_while_away(&mut self, item: Item, messages: &[Message]) {
        match item {
            Item::Frame(asked, _) if asked.is_add() => self.wakers.extend(asked.refuse(away())),
            // Whoever waits for what was before it waits no longer.
            Item::Barrier(_) => {}
            del @ Item::Frame(..) => self.push(del, messages),
        }
    }

    /// Wakes those that were answered, and tells who waited for that.
    pub(crate) fn wake(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
        let first = self.frames.first();
        while self.barriers.front().is_some_and(|(before, _)| *before <= first) {
            let (_, told) = self.barriers.pop_front().expect("it is there");
            // Whoever waited may have given up.
            let _ = told.send(());
        }
    }

    /// How many messages wait to be sent.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether at least so many messages wait, or somebody waits for those that are under way.
    pub(crate) fn is_worth_a_script(&self, messages: usize) -> bool {
        self.waiting >= messages || !self.barriers.is_empty()
    }

    /// The next chunk, of so many messages at most, if anything waits.
    pub(crate) fn next_chunk(&mut self, number: u64, most: usize) -> Option<Chunk> {
        let mut chunk = Chunk { number, slices: self.spare.pop().unwrap_or_default(), has_adds: false };
        let mut room = most.min(MAX_CHUNK);
        self.writer.begin();
        while room > 0
            && let Some((connection, slice)) = self.lanes.pop()
        {
            self.waiting -= slice.to - slice.from;
            // Its frame was refused meanwhile.
            let Some(frame) = self.frames.frame(slice.frame) else { continue };
            let Some(class) = self.writer.admit(frame.asked.operation) else {
                self.put_back(connection, slice);
                break;
            };
            chunk.has_adds |= frame.is_add();
            let to = slice.to.min(slice.from + room);
            let messages = self.frames.messages(frame, slice.from..to);
            self.writer.push(class, slice.from == 0, messages);
            room -= to - slice.from;
            chunk.slices.push(Slice { to, ..slice });
            if to < slice.to {
                self.put_back(connection, Slice { from: to, ..slice });
            }
            self.frames.frame_mut(slice.frame).expect("it is there").sent = true;
        }
        if chunk.slices.is_empty() {
            self.spare.push(chunk.slices);
            return None;
        }
        Some(chunk)
    }

    /// What is to be sent next.
    fn put_back(&mut self, connection: ConnectionId, slice: Slice) {
        self.waiting += slice.to - slice.from;
        self.lanes.push_front(connection, slice);
    }

    /// Room for the arguments of the chunk that was made last: their number, and their bytes.
    pub(crate) fn room(&self) -> (usize, usize) {
        self.writer.room()
    }

    /// Writes the chunk that was made last as the script reads it.
    pub(crate) fn encode(&mut self, chunk: &Chunk, call: &mut Cmd) {
        self.writer.write(chunk, &self.frames, call);
    }

    /// Notes what became of a chunk, and answers the frames that are complete.
    pub(crate) fn applied(&mut self, chunk: Chunk, applied: &Applied<'_>, max_in_flight: u64, at: Instant) {
        let mut rest = applied.letters.as_bytes();
        let mut times = applied.times();
        let now_ms = times.next().unwrap_or_default();
        let Chunk { mut slices, number, .. } = chunk;
        let (mut added, mut acks) = (0, Vec::new());
        for Slice { frame: name, from, to } in slices.drain(..) {
            let (letters, others) = rest.split_at((to - from).min(rest.len()));
            rest = others;
            let with_time = letters.iter().filter(|letter| matches!(letter, b'k' | b'w' | b'l')).count();
            let Some(frame) = self.frames.frame(name) else {
                // Its answer has been given; its times are skipped.
                times.by_ref().take(with_time).for_each(drop);
                continue;
            };
            if frame.is_add() {
                added += letters.iter().filter(|letter| matches!(letter, b'a' | b'r')).count() as u64;
            } else if with_time > 0 {
                for (message, letter) in self.frames.messages(frame, from..to).zip(letters) {
                    let (b'k' | b'w' | b'l') = letter else { continue };
                    let added_ms = times.next().unwrap_or_default();
                    if *letter != b'w' {
                        // A clock that was set back makes it none.
                        self.latencies.push(Duration::from_millis(now_ms.saturating_sub(added_ms)));
                    }
                    if *letter != b'l' {
                        acks.push(Ack { message: *message, added_ms, is_withdrawal: *letter == b'w' });
                    }
                }
            }
            let frame = self.frames.frame_mut(name).expect("it is there");
            if let Operation::Add { ack_timeout_ticks, .. } = frame.asked.operation {
                frame.deadline = applied.tick_due.plus(u64::from(ack_timeout_ticks));
            }
            let is_refused = frame.is_add() && letters.contains(&b'x');
            if letters.len() == frame.count && !is_refused {
                let Frame { asked, deadline, .. } = self.frames.take(name).expect("it is there");
                if !self.run.takes(&asked) {
                    self.answer_run();
                }
                self.run.push(asked, deadline, letters, self.latencies.drain(..));
                continue;
            }
            // What was asked for before it is answered before it.
            self.answer_run();
            let frame = self.frames.frame_mut(name).expect("it is there");
            if with_time > 0 {
                let latencies = self.latencies.drain(..);
                frame.asked.note(|batch| latencies.for_each(|latency| batch.ack_latency.record(latency, 1)));
            }
            if is_refused {
                let refusal = too_many(applied.in_flight, frame.count, max_in_flight);
                self.end(name, |frame| frame.asked.refuse(refusal));
                continue;
            }
            frame.letters.extend_from_slice(letters);
            if frame.letters.len() == frame.count {
                self.end(name, |Frame { asked, deadline, letters, .. }| asked.answer(deadline, &letters));
            }
        }
        self.answered.push(number, at, added, acks);
        self.progress.answered_chunk.store(number, Ordering::Relaxed);
        self.answer_run();
        self.spare.push(slices);
        self.wake();
    }

    /// What Redis has lost of what it had answered, if the last chunk that it applied is this one.
    pub(crate) fn take_lost(&mut self, applied: u64) -> Option<Lost> {
        self.answered.take_lost(self.progress.answered_chunk.swap(applied, Ordering::Relaxed), applied)
    }

    /// The name that the next frame will have.
    pub(crate) fn next_frame(&self) -> u64 {
        self.frames.next()
    }

    /// Whether all frames before this one are answered.
    pub(crate) fn has_answered_all_before(&self, frame: u64) -> bool {
        self.frames.first() >= frame
    }

    fn answer_run(&mut self) {
        self.acks_end(self.run.acks());
        self.wakers.extend(self.run.answer());
    }

    /// Messages of dels are about to be answered: whoever has the answer may ask how many are held.
    fn acks_end(&self, messages: u64) {
        self.progress.unanswered_acks.fetch_sub(messages, Ordering::Relaxed);
    }

    /// Ends a frame, if it is not answered.
    fn end(&mut self, name: u64, with: impl FnOnce(Frame) -> Option<Waker>) {
        if let Some(frame) = self.frames.take(name) {
            self.ended(frame, with);
        }
    }

    fn ended(&mut self, frame: Frame, with: impl FnOnce(Frame) -> Option<Waker>) {
        if !frame.is_add() {
            self.acks_end(frame.count as u64);
        }
        self.wakers.extend(with(frame));
    }

    /// The answer to a chunk that was sent in this generation did not come.
    pub(crate) fn unanswered(&mut self, generation: i64, chunk: Chunk) {
        self.unanswered.push((generation, chunk));
    }

    /// Chunks that were certainly not applied are to be sent again, with all behind them: their dels. Their adds
    /// are refused, where a refusal is given.
    pub(crate) fn send_again(&mut self, chunks: Vec<Chunk>, refusal: Option<&Refusal>) {
        for chunk in chunks.into_iter().rev() {
            for slice in chunk.slices.into_iter().rev() {
                let Some(frame) = self.frames.frame(slice.frame) else { continue };
                match refusal {
                    Some(refusal) if frame.is_add() => {
                        // What was applied of it before cannot be taken back.
                        let partly = slice.from > 0;
                        let refusal = if partly { silent(&refusal.text) } else { refusal.clone() };
                        self.end(slice.frame, |frame| frame.asked.refuse(refusal));
                    }
                    _ => self.put_back(frame.asked.connection, slice),
                }
            }
        }
        self.wake();
    }

    /// Redis is away: adds are refused, dels held.
    pub(crate) fn refuse_adds(&mut self) {
        self.refuse_adds_with(&away());
        // Whoever waits for what was before it waits no longer.
        self.barriers.clear();
    }

    /// Refuses all adds; those of which a part was sent, with their outcome unknown.
    pub(crate) fn refuse_adds_with(&mut self, refusal: &Refusal) {
        for frame in self.frames.take_adds() {
            let refusal = if frame.sent { silent("no answer came in time") } else { refusal.clone() };
            self.ended(frame, |frame| frame.asked.refuse(refusal));
        }
        self.wake();
    }

    /// Refuses every frame of a chunk that Redis will not carry out.
    pub(crate) fn refuse(&mut self, chunk: Chunk, refusal: &Refusal) {
        let Chunk { mut slices, .. } = chunk;
        for slice in slices.drain(..) {
            self.end(slice.frame, |frame| frame.asked.refuse(refusal.clone()));
        }
        self.spare.push(slices);
        self.wake();
    }

    /// A new session has the answers to the last two chunks that were applied. Numbers come again where Redis lost
    /// writes, so the generation must be that of the chunk too.
    pub(crate) fn recall(&mut self, answers: &[String; 2], max_in_flight: u64, at: Instant) {
        let mut not_applied = Vec::new();
        for (generation, chunk) in std::mem::take(&mut self.unanswered) {
            match answers.iter().find_map(|answer| Applied::parse(answer, generation, chunk.number)) {
                Some(applied) => self.applied(chunk, &applied, max_in_flight, at),
                None => not_applied.push(chunk),
            }
        }
        self.send_again(not_applied, Some(&silent("no answer came in time")));
    }
}

#[cfg(test)]
mod tests;
