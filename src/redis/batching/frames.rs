//! Keeps the requests that are not answered, and completes or refuses them.
//!
//! A *frame* is one request. Its name is its number, and frames end about in the order in which they came.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use crate::core::completions::Completions;
use crate::core::message::Message;
use crate::core::refusal::Refusal;
use crate::core::request_batch::{Operation, Outcome};
use crate::core::ring::ConnectionId;
use crate::core::tick::Tick;
use crate::redis::connection::errors::refusal_while_unreachable;

/// The memory for more frames than this is freed as soon as there are none.
const KEEP: usize = 65_536;

/// A request that is not answered. It is refused if it is dropped.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) operation: Operation,
    pub(crate) connection: ConnectionId,
    pub(crate) messages: Box<[Message]>,
    /// Whether any of it was sent.
    pub(crate) is_sent: bool,
    pub(crate) deadline: Tick,
    /// The outcomes so far, as letters of the script, if it takes more than one chunk.
    pub(crate) letters: Vec<u8>,
    id: u64,
    /// None once it is answered.
    completions: Option<Arc<Completions>>,
}

impl Frame {
    pub(crate) fn new(
        operation: Operation,
        connection: ConnectionId,
        id: u64,
        messages: &[Message],
        completions: &Arc<Completions>,
    ) -> Frame {
        Frame {
            operation,
            connection,
            messages: messages.into(),
            is_sent: false,
            deadline: Tick(0),
            letters: Vec::new(),
            id,
            completions: Some(Arc::clone(completions)),
        }
    }

    pub(crate) fn is_add(&self) -> bool {
        self.operation.is_add()
    }

    /// Completes it with the letters of its last messages, and how long those acknowledged were in flight.
    pub(crate) fn complete(mut self, letters: &[u8], latencies: impl Iterator<Item = Duration>) -> Option<Waker> {
        let outcomes = self.letters.iter().chain(letters).map(|letter| outcome(*letter));
        self.completions.take()?.put(|batch| {
            latencies.for_each(|latency| batch.ack_latency.record(latency, 1));
            batch.push_completed(self.id, self.operation, self.deadline, outcomes);
        })
    }

    /// Records how long messages were in flight, before the frame is completed.
    pub(crate) fn record_latencies(&self, latencies: impl Iterator<Item = Duration>) {
        if let Some(completions) = &self.completions {
            completions.record(|batch| latencies.for_each(|latency| batch.ack_latency.record(latency, 1)));
        }
    }

    pub(crate) fn refuse(&mut self, refusal: Refusal) -> Option<Waker> {
        let (id, operation, messages) = (self.id, self.operation, self.messages.len());
        self.completions.take()?.put(|batch| batch.push_refused(id, operation, messages, Arc::new(refusal)))
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if self.completions.is_some()
            && let Some(waker) = self.refuse(refusal_while_unreachable())
        {
            waker.wake();
        }
    }
}

fn outcome(letter: u8) -> Outcome {
    match letter {
        b'a' => Outcome::Added,
        b'r' => Outcome::Rearmed,
        b'k' => Outcome::Acked,
        b'l' | b'L' => Outcome::Late,
        b'w' => Outcome::Withdrawn,
        _ => Outcome::Unknown,
    }
}

/// All frames that are not answered, in order.
#[derive(Default)]
pub(crate) struct Frames {
    /// None where a frame has ended before an earlier one.
    frames: VecDeque<Option<Frame>>,
    /// The name of the first frame that is not answered; or of the next frame if there is none.
    pub(super) first: u64,
}

impl Frames {
    /// Appends a frame and returns its name.
    pub(crate) fn push(&mut self, frame: Frame) -> u64 {
        self.frames.push_back(Some(frame));
        self.next() - 1
    }

    /// The name of the next frame.
    pub(crate) fn next(&self) -> u64 {
        self.first + self.frames.len() as u64
    }

    /// A frame, if it is not answered.
    pub(crate) fn get_mut(&mut self, name: u64) -> Option<&mut Frame> {
        let index = usize::try_from(name.checked_sub(self.first)?).ok()?;
        self.frames.get_mut(index)?.as_mut()
    }

    /// Removes a frame that is to be answered.
    pub(crate) fn take(&mut self, name: u64) -> Option<Frame> {
        let index = usize::try_from(name.checked_sub(self.first)?).ok()?;
        let frame = self.frames.get_mut(index)?.take();
        self.trim();
        frame
    }

    /// Removes all frames of adds.
    pub(crate) fn take_adds(&mut self) -> Vec<Frame> {
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
mod tests {
    use std::ops::Range;

    use super::*;

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
