//! The frames that are not answered, with their messages, in the order in which they came.
//!
//! A frame's name is its number, and frames end about in the order in which they came; so they lie in a row, and
//! their messages in another, and none costs an allocation of its own.

use std::collections::VecDeque;
use std::ops::Range;

use crate::core::message::Message;
use crate::core::tick::Tick;
use crate::redis::batching::request::Asked;

/// Rows that are empty and have grown beyond this many messages are given back.
const KEEP: usize = 65_536;

/// A request under way.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) asked: Asked,
    pub(crate) count: usize,
    /// Whether any of it was sent.
    pub(crate) sent: bool,
    pub(crate) deadline: Tick,
    /// What its messages became so far, where it takes more than one chunk.
    pub(crate) letters: Vec<u8>,
    /// The position of its first message among all that ever were.
    at: u64,
}

impl Frame {
    pub(crate) fn is_add(&self) -> bool {
        self.asked.is_add()
    }
}

/// Where a frame is, or was: its messages stay until those before it are gone too.
struct Place {
    frame: Option<Frame>,
    count: usize,
}

/// All frames that are not answered.
#[derive(Default)]
pub(crate) struct Frames {
    places: VecDeque<Place>,
    /// The name of the first place.
    first: u64,
    messages: VecDeque<Message>,
    /// The position of the first message.
    first_message: u64,
}

impl Frames {
    /// Takes a frame in, and names it.
    pub(crate) fn push(&mut self, asked: Asked, messages: &[Message]) -> u64 {
        let at = self.first_message + self.messages.len() as u64;
        self.messages.extend(messages);
        let count = messages.len();
        let frame = Frame { asked, count, sent: false, deadline: Tick(0), letters: Vec::new(), at };
        self.places.push_back(Place { frame: Some(frame), count });
        self.next() - 1
    }

    /// The name of the first frame that is not answered; or that the next will have.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// The name that the next frame will have.
    pub(crate) fn next(&self) -> u64 {
        self.first + self.places.len() as u64
    }

    fn index(&self, name: u64) -> Option<usize> {
        usize::try_from(name.checked_sub(self.first)?).ok()
    }

    /// A frame, if it is not answered.
    pub(crate) fn frame(&self, name: u64) -> Option<&Frame> {
        self.places.get(self.index(name)?)?.frame.as_ref()
    }

    /// A frame, if it is not answered.
    pub(crate) fn frame_mut(&mut self, name: u64) -> Option<&mut Frame> {
        let index = self.index(name)?;
        self.places.get_mut(index)?.frame.as_mut()
    }

    /// Some messages of a frame.
    pub(crate) fn messages(&self, frame: &Frame, range: Range<usize>) -> impl Iterator<Item = &Message> {
        let at = usize::try_from(frame.at - self.first_message).expect("messages stay as long as their frame");
        self.messages.range(at + range.start..at + range.end)
    }

    /// Takes a frame out that is to be answered.
    pub(crate) fn take(&mut self, name: u64) -> Option<Frame> {
        let index = self.index(name)?;
        let frame = self.places.get_mut(index)?.frame.take();
        if index == 0 {
            self.trim();
        }
        frame
    }

    /// Takes all frames of adds out.
    pub(crate) fn take_adds(&mut self) -> Vec<Frame> {
        let is_add = |place: &&mut Place| place.frame.as_ref().is_some_and(Frame::is_add);
        let adds = self.places.iter_mut().filter(is_add).filter_map(|place| place.frame.take()).collect();
        self.trim();
        adds
    }

    fn trim(&mut self) {
        while let Some(Place { frame: None, count }) = self.places.front() {
            self.messages.drain(..*count);
            self.first_message += *count as u64;
            self.first += 1;
            self.places.pop_front();
        }
        if self.places.is_empty() && self.messages.capacity() > KEEP {
            (self.messages, self.places) = (VecDeque::new(), VecDeque::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::core::completions::Completions;
    use crate::core::request_batch::Operation;
    use crate::core::ring::ConnectionId;

    fn push(frames: &mut Frames, ids: Range<u64>) -> u64 {
        let messages: Vec<Message> = ids.map(Message::from).collect();
        let completions = Arc::new(Completions::default());
        let operation = if messages.len() == 1 {
            Operation::Add { ack_timeout_ticks: 1, attempt: 1 }
        } else {
            Operation::Del { withdraw: false }
        };
        frames.push(Asked::new(operation, ConnectionId::default(), 1, messages.len(), &completions), &messages)
    }

    fn messages(frames: &Frames, name: u64) -> Vec<u64> {
        let frame = frames.frame(name).unwrap();
        frames.messages(frame, 0..frame.count).map(|message| message.msg_id.0).collect()
    }

    #[test]
    fn messages_stay_with_their_frames_whatever_is_taken_out() {
        let mut frames = Frames::default();
        let names = [0..2, 2..3, 3..7, 7..8].map(|ids| push(&mut frames, ids));
        assert_eq!(frames.take(names[2]).unwrap().count, 4);
        assert!(frames.frame(names[2]).is_none() && frames.take(names[2]).is_none());
        assert_eq!(messages(&frames, names[3]), [7]);
        assert!(frames.take(names[0]).is_some());
        assert_eq!((messages(&frames, names[1]), messages(&frames, names[3])), (vec![2], vec![7]));
        assert_eq!(frames.take_adds().len(), 2);
        let last = push(&mut frames, 8..10);
        assert_eq!((last, messages(&frames, last)), (names[3] + 1, vec![8, 9]));
    }

    #[test]
    fn rows_that_have_grown_are_given_back_once_they_are_empty() {
        let mut frames = Frames::default();
        let name = push(&mut frames, 0..2 * KEEP as u64);
        assert!(frames.take(name).is_some());
        assert!(frames.messages.capacity() <= KEEP);
        let name = push(&mut frames, 5..7);
        assert_eq!(messages(&frames, name), [5, 6]);
    }
}
