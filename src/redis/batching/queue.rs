//! Queues the requests of a ring until they are answered. This is the part of batching without I/O.
//!
//! A *frame* is one request: an add or a del of one or more messages. Frames are numbered in the order of their
//! arrival. The number of a frame is its *name*. A *slice* is a part of a frame. A *chunk* is the content of one
//! script: slices of frames, with at most [`MAX_CHUNK`] messages. Chunks are numbered too, and Redis applies chunk n
//! only after chunk n - 1. A *session* is one registered connection to Redis. While there is no session, Acks (the
//! messages of dels) are *held*.
//!
//! # Invariants
//!
//! 1. Every frame is answered exactly once: when all its messages have an outcome, or when it is refused.
//! 2. The frames of one connection are sent in order. A message of a del is sent again only if Redis certainly did not
//!    apply its chunk.
//! 3. An add is sent again only within a session, and only if Redis certainly did not apply its chunk.
//! 4. Client connections take turns ([`FairQueue`]). If a part of a frame was sent, the rest goes before all other
//!    frames.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use redis::Cmd;
use tokio::sync::oneshot;

use crate::core::{ConnectionId, Operation, Reason, Refusal};
use crate::redis::batching::chunk::{Applied, Chunk, ChunkWriter, MAX_CHUNK, Slice};
use crate::redis::batching::fair_queue::FairQueue;
use crate::redis::batching::incoming_requests::{Frame, Item};
use crate::redis::connection::errors::{refusal_while_unreachable, refusal_without_answer};
use crate::redis::connection::link::Progress;
use crate::redis::connection::lost_writes::{Ack, AnsweredChunks, Lost};

/// The cause in a refusal, if the session ended before the answer to the request arrived.
const NO_ANSWER: &str = "no answer came in time";

/// Maximum capacity of an empty queue of frames. If the capacity is greater, the memory is freed when no frame is left.
const KEEP: usize = 65_536;

/// All requests without an answer, and the state that is necessary to answer them.
#[derive(Default)]
pub(crate) struct Queue {
    pub(super) frames: Frames,
    by_connection: FairQueue,
    /// Number of messages in `by_connection`. If a frame was refused, its messages count until they are removed there.
    pub(super) waiting: usize,
    /// The barriers in order, each with the number of the first frame after it. A barrier is notified when all frames
    /// before it are answered.
    pub(super) barriers: VecDeque<(u64, oneshot::Sender<()>)>,
    /// The chunks whose session ended before their answer arrived, oldest first. Each has the generation of that
    /// session, a number that Redis never uses twice for this sidecar.
    unanswered: Vec<(i64, Chunk)>,
    /// The number of the last answered chunk, and the number of Acks without an answer. Acks that still wait in the
    /// inbox count too.
    progress: Arc<Progress>,
    max_in_flight: u64,
    answered: AnsweredChunks,
    writer: ChunkWriter,
    /// The wakers of the connections that have new answers. A connection is woken once for all requests that are
    /// answered together.
    wakers: Vec<Waker>,
}

impl Queue {
    pub(crate) fn new(progress: Arc<Progress>, max_in_flight: u64, kept_acks: usize) -> Queue {
        let mut queue = Queue { progress, max_in_flight, ..Queue::default() };
        queue.answered.max_acks = kept_acks;
        queue
    }

    /// Appends a frame or a barrier.
    pub(crate) fn push(&mut self, item: Item) {
        match item {
            Item::Barrier(passed) => self.barriers.push_back((self.frames.next(), passed)),
            Item::Frame(frame) if frame.messages.is_empty() => {
                self.wakers.extend(frame.complete(&[], std::iter::empty()));
            }
            Item::Frame(frame) => {
                let (connection, to) = (frame.connection, frame.messages.len());
                let frame = self.frames.push(frame);
                self.by_connection.push_back(connection, Slice { frame, from: 0, to });
                self.waiting += to;
            }
        }
    }

    /// Processes a frame or a barrier while there is no session. Refuses an add, queues a del, and drops a barrier.
    pub(crate) fn push_while_unreachable(&mut self, item: Item) {
        match item {
            Item::Frame(mut frame) if frame.is_add() => {
                self.wakers.extend(frame.refuse(refusal_while_unreachable()));
            }
            Item::Frame(_) => self.push(item),
            Item::Barrier(passed) => drop(passed),
        }
    }

    /// Wakes the connections that have new answers. Notifies each barrier if all frames before it are answered.
    pub(crate) fn wake(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
        let passed = self.barriers.partition_point(|(before, _)| *before <= self.frames.first);
        for (_, sender) in self.barriers.drain(..passed) {
            // The receiver may be gone, because it waits only for a limited time.
            let _ = sender.send(());
        }
    }

    /// Removes slices from the queue, and returns them as the chunk with this number. Takes at most `most` messages.
    /// Returns `None` if no message waits.
    pub(crate) fn next_chunk(&mut self, number: u64, most: usize) -> Option<Chunk> {
        let mut chunk = Chunk { number, slices: Vec::new(), has_adds: false };
        let mut room = most.min(MAX_CHUNK);
        self.writer.clear();
        while room > 0
            && let Some((connection, waiting)) = self.by_connection.pop()
        {
            self.waiting -= waiting.len();
            // The frame may have been refused since it was queued. Then its slice is skipped.
            let Some(frame) = self.frames.get_mut(waiting.frame) else { continue };
            let slice = Slice { to: waiting.to.min(waiting.from + room), ..waiting };
            if !self.writer.push(slice, frame) {
                self.put_back(connection, waiting);
                break;
            }
            frame.is_sent = true;
            chunk.has_adds |= frame.is_add();
            chunk.slices.push(slice);
            room -= slice.len();
            if slice.to < waiting.to {
                self.put_back(connection, Slice { from: slice.to, ..waiting });
            }
        }
        (!chunk.slices.is_empty()).then_some(chunk)
    }

    /// Puts a slice back into the queue, before all others.
    fn put_back(&mut self, connection: ConnectionId, slice: Slice) {
        self.waiting += slice.len();
        self.by_connection.push_front(connection, slice);
    }

    /// Appends the arguments of a chunk to the call of its script. The caller must pass the chunk that `next_chunk`
    /// returned last.
    pub(crate) fn write(&self, chunk: &Chunk, call: &mut Cmd) {
        call.arg(chunk.number).arg(self.max_in_flight).arg(u8::from(chunk.has_adds));
        self.writer.write(call);
    }

    /// Processes the answer to a chunk. Answers each frame whose messages all have an outcome now.
    pub(crate) fn apply(&mut self, chunk: Chunk, applied: &Applied, now: Instant) {
        self.progress.answered_chunk.store(chunk.number, Ordering::Relaxed);
        let mut rest = applied.letters.as_bytes();
        let mut times = applied.times();
        let now_ms = times.next().unwrap_or_default();
        let (mut added, mut acks, mut latencies) = (0, Vec::new(), Vec::new());
        for slice in chunk.slices {
            let letters;
            (letters, rest) = rest.split_at(slice.len().min(rest.len()));
            let mut frame = self.frames.get_mut(slice.frame);
            for (nth, letter) in letters.iter().enumerate().filter(|(_, letter)| b"kwl".contains(letter)) {
                let added_ms = times.next().unwrap_or_default();
                // The frame may have been refused since it was sent.
                let Some(frame) = &mut frame else { continue };
                if *letter != b'w' {
                    // The latency is 0 if Redis' clock was set back.
                    latencies.push(Duration::from_millis(now_ms.saturating_sub(added_ms)));
                }
                if *letter != b'l' {
                    let message = frame.messages[slice.from + nth];
                    acks.push(Ack { message, added_ms, is_withdrawal: *letter == b'w' });
                }
            }
            let Some(frame) = frame else { continue };
            if let Operation::Add { ack_timeout_ticks, .. } = frame.operation {
                added += letters.iter().filter(|letter| b"ar".contains(letter)).count() as u64;
                frame.deadline = applied.tick_due.plus(u64::from(ack_timeout_ticks));
            }
            if letters.contains(&b'x') {
                let (in_flight, max) = (applied.in_flight.unwrap_or(self.max_in_flight), self.max_in_flight);
                let text = format!(
                    "{in_flight} messages are in flight and {count} more would exceed the limit of {max}: try again \
                     when some are acknowledged or have timed out, or raise --max-in-flight",
                    count = frame.messages.len(),
                );
                let refusal = Refusal::new(Reason::MaxInFlight, text);
                self.end(slice.frame, |mut frame| frame.refuse(refusal));
            } else if frame.letters.len() + letters.len() == frame.messages.len() {
                self.end(slice.frame, |frame| frame.complete(letters, latencies.drain(..)));
            } else {
                frame.letters.extend_from_slice(letters);
                frame.record_latencies(latencies.drain(..));
            }
        }
        self.answered.push(chunk.number, now, added, acks);
        self.wake();
    }

    /// Removes and returns the answered writes that Redis has lost, or returns `None` if nothing is lost. `applied` is
    /// the number of the last chunk that Redis has.
    pub(crate) fn take_lost(&mut self, applied: u64) -> Option<Lost> {
        self.answered.take_lost(self.progress.answered_chunk.swap(applied, Ordering::Relaxed), applied)
    }

    /// Removes a frame, and calls `with` to answer it. Does nothing if the frame is already answered.
    fn end(&mut self, name: u64, with: impl FnOnce(Frame) -> Option<Waker>) {
        let Some(frame) = self.frames.take(name) else { return };
        if !frame.is_add() {
            // The number of unanswered Acks is reduced before the answer is sent, because the client may read the
            // number of held Acks right after the answer.
            self.progress.unanswered_acks.fetch_sub(frame.messages.len() as u64, Ordering::Relaxed);
        }
        self.wakers.extend(with(frame));
    }

    /// Queues the slices of `chunks` again. If there is a `refusal`, refuses the adds instead, and queues only the
    /// dels. Must be called only if Redis applied neither these chunks nor any later chunk.
    pub(crate) fn send_again(&mut self, chunks: Vec<Chunk>, refusal: Option<&Refusal>) {
        for slice in chunks.into_iter().rev().flat_map(|chunk| chunk.slices.into_iter().rev()) {
            let Some(frame) = self.frames.get_mut(slice.frame) else { continue };
            match refusal {
                Some(refusal) if frame.is_add() => {
                    // Redis applied an earlier part of this frame, so the refusal must not say that nothing was
                    // applied.
                    let is_partly_applied = slice.from > 0;
                    let refusal =
                        if is_partly_applied { refusal_without_answer(&refusal.text) } else { refusal.clone() };
                    self.end(slice.frame, |mut frame| frame.refuse(refusal));
                }
                _ => {
                    let connection = frame.connection;
                    self.put_back(connection, slice);
                }
            }
        }
        self.wake();
    }

    /// Refuses all adds. If a part of an add was sent, the refusal says that its outcome is unknown.
    pub(crate) fn refuse_adds(&mut self, refusal: &Refusal) {
        for mut frame in self.frames.take_adds() {
            let refusal = if frame.is_sent { refusal_without_answer(NO_ANSWER) } else { refusal.clone() };
            self.wakers.extend(frame.refuse(refusal));
        }
        self.wake();
    }

    /// Refuses every frame that has a slice in `chunk`. Must be called only if Redis cannot apply the chunk.
    pub(crate) fn refuse(&mut self, chunk: Chunk, refusal: &Refusal) {
        for slice in chunk.slices {
            self.end(slice.frame, |mut frame| frame.refuse(refusal.clone()));
        }
        self.wake();
    }

    /// Ends the session with this generation. Refuses all adds, keeps the dels, and drops the barriers. `unanswered`
    /// are the chunks that were sent in the session and not answered.
    pub(crate) fn end_session(&mut self, generation: i64, unanswered: impl Iterator<Item = Chunk>) {
        self.unanswered.extend(unanswered.map(|chunk| (generation, chunk)));
        self.refuse_adds(&refusal_while_unreachable());
        self.barriers.clear();
    }

    /// Begins a session. `answers` are the answers to the last two chunks that Redis applied in earlier sessions. An
    /// unanswered chunk with such an answer was applied. The other unanswered chunks were not applied, so their dels
    /// are queued again. After Redis lost writes, chunk numbers repeat. So an answer must also match the generation of
    /// the chunk.
    pub(crate) fn begin_session(&mut self, answers: &[String; 2], now: Instant) {
        let mut not_applied = Vec::new();
        for (generation, chunk) in mem::take(&mut self.unanswered) {
            match answers.iter().find_map(|answer| Applied::parse(answer, generation, chunk.number)) {
                Some(applied) => self.apply(chunk, &applied, now),
                None => not_applied.push(chunk),
            }
        }
        self.send_again(not_applied, Some(&refusal_without_answer(NO_ANSWER)));
    }
}

/// The frames without an answer, in the order of their names.
#[derive(Default)]
pub(super) struct Frames {
    /// An element becomes `None` when its frame is answered. It is removed when all earlier frames are answered too.
    frames: VecDeque<Option<Frame>>,
    /// The name of the first frame in `frames`. If `frames` is empty, the name of the next frame.
    pub(super) first: u64,
}

impl Frames {
    /// Appends a frame, and returns its name.
    fn push(&mut self, frame: Frame) -> u64 {
        self.frames.push_back(Some(frame));
        self.next() - 1
    }

    /// Returns the name for the next frame.
    pub(super) fn next(&self) -> u64 {
        self.first + self.frames.len() as u64
    }

    /// Returns a frame, unless it is already answered.
    fn get_mut(&mut self, name: u64) -> Option<&mut Frame> {
        let index = usize::try_from(name.checked_sub(self.first)?).ok()?;
        self.frames.get_mut(index)?.as_mut()
    }

    /// Removes and returns a frame, unless it is already answered.
    fn take(&mut self, name: u64) -> Option<Frame> {
        let index = usize::try_from(name.checked_sub(self.first)?).ok()?;
        let frame = self.frames.get_mut(index)?.take();
        self.trim();
        frame
    }

    /// Removes and returns all add frames.
    fn take_adds(&mut self) -> Vec<Frame> {
        let adds = self.frames.iter_mut().filter_map(|frame| frame.take_if(|frame| frame.is_add())).collect();
        self.trim();
        adds
    }

    fn trim(&mut self) {
        while let Some(None) = self.frames.front() {
            self.first += 1;
            self.frames.pop_front();
        }
        if self.frames.is_empty() && self.frames.capacity() > KEEP {
            self.frames = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod frame_tests {
    use std::ops::Range;

    use super::*;
    use crate::core::Message;

    fn push(frames: &mut Frames, ids: Range<u64>) -> u64 {
        let messages: Vec<Message> = ids.map(Message::from).collect();
        let operation = if messages.len() == 1 {
            Operation::Add { ack_timeout_ticks: 1, attempt: 1 }
        } else {
            Operation::Del { withdraw: false }
        };
        frames.push(Frame::new(operation, ConnectionId::default(), 1, &messages, &Arc::default()))
    }

    fn messages(frames: &mut Frames, name: u64) -> Vec<u64> {
        frames.get_mut(name).unwrap().messages.iter().map(|message| message.msg_id.0).collect()
    }

    #[test]
    fn a_frame_keeps_its_name_when_others_are_taken() {
        let mut frames = Frames::default();
        let names = [0..2, 2..3, 3..7, 7..8].map(|ids| push(&mut frames, ids));
        assert_eq!(frames.take(names[2]).unwrap().messages.len(), 4);
        assert!(frames.get_mut(names[2]).is_none() && frames.take(names[2]).is_none());
        assert_eq!(messages(&mut frames, names[3]), [7]);
        assert!(frames.take(names[0]).is_some());
        assert_eq!((messages(&mut frames, names[1]), messages(&mut frames, names[3])), (vec![2], vec![7]));
        assert_eq!(frames.take_adds().len(), 2);
        let last = push(&mut frames, 8..10);
        assert_eq!((last, messages(&mut frames, last)), (names[3] + 1, vec![8, 9]));
    }

    #[test]
    fn memory_for_many_frames_is_freed_when_none_is_left() {
        let mut frames = Frames::default();
        let names: Vec<u64> = (0..2 * KEEP as u64).map(|id| push(&mut frames, id..id + 1)).collect();
        assert!(names.into_iter().all(|name| frames.take(name).is_some()));
        assert!(frames.frames.capacity() <= KEEP);
        let name = push(&mut frames, 5..7);
        assert_eq!(messages(&mut frames, name), [5, 6]);
    }
}
