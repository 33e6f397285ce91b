//! The replies of a connection, in the order of its commands. A reply that is ready waits for the replies before it.

use std::collections::VecDeque;
use std::mem;
use std::time::Instant;

use bytes::BytesMut;

/// The replies from the first one that waits for the store.
#[derive(Debug, Default)]
pub(super) struct Replies {
    /// The number of the first reply in `waiting`.
    first: u64,
    waiting: VecDeque<Reply>,
    /// Replies whose turn has come, and that are not queued for the socket yet.
    due: BytesMut,
    /// The memory of the ready replies in `waiting`.
    bytes: usize,
}

#[derive(Debug)]
enum Reply {
    /// The command waits for the store.
    Waiting,
    /// Acks of so many messages wait for the store since this time.
    Acks {
        since: Instant,
        messages: usize,
    },
    Ready(BytesMut),
}

impl Replies {
    /// Returns whether no reply waits, so that the next one can be written to the socket.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the number of replies that wait, and the memory of those that are ready.
    pub(super) fn waiting(&self) -> (usize, usize) {
        (self.waiting.len(), self.bytes)
    }

    /// Returns the memory of all replies that wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes + self.waiting.capacity() * size_of::<Reply>()
    }

    /// Returns the number of the first reply that waits, or of the next one if none waits.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// Returns the number of the next reply.
    pub(super) fn next(&self) -> u64 {
        self.first + self.waiting.len() as u64
    }

    /// Adds a reply that waits for the store, and returns its number.
    pub(super) fn wait(&mut self) -> u64 {
        self.waiting.push_back(Reply::Waiting);
        self.next() - 1
    }

    /// Adds a reply to Acks of so many messages, which wait for the store. Returns its number.
    pub(super) fn wait_for_acks(&mut self, messages: usize, now: Instant) -> u64 {
        self.waiting.push_back(Reply::Acks { since: now, messages });
        self.next() - 1
    }

    /// Completes the reply with this number. Does nothing if the reply was given already, by [`Replies::hold_first`].
    pub(super) fn complete(&mut self, number: u64, encode: impl FnOnce(&mut BytesMut)) {
        let Some(place) = number.checked_sub(self.first) else { return };
        if place > 0 {
            let mut reply = BytesMut::new();
            encode(&mut reply);
            self.bytes += reply.capacity();
            self.waiting[usize::try_from(place).expect("the number of a reply that waits")] = Reply::Ready(reply);
            return;
        }
        self.waiting.pop_front();
        self.first += 1;
        encode(&mut self.due);
        while let Some(Reply::Ready(_)) = self.waiting.front() {
            let Some(Reply::Ready(reply)) = self.waiting.pop_front() else { unreachable!("it was just found") };
            self.first += 1;
            self.bytes -= reply.capacity();
            self.due.extend_from_slice(&reply);
        }
        free_if_empty(&mut self.waiting);
    }

    /// If Acks are first, returns since when they wait, and the number of their messages.
    pub(super) fn first_acks(&self) -> Option<(Instant, usize)> {
        match self.waiting.front() {
            Some(Reply::Acks { since, messages }) => Some((*since, *messages)),
            _ => None,
        }
    }

    /// Completes the first reply, although the store has not answered.
    pub(super) fn hold_first(&mut self, encode: impl FnOnce(&mut BytesMut)) {
        self.complete(self.first, encode);
    }

    /// Takes the replies whose turn has come.
    pub(super) fn take_due(&mut self) -> BytesMut {
        mem::take(&mut self.due)
    }
}

/// The largest capacity that an empty queue of a connection keeps.
const KEPT_CAPACITY: usize = 16;

/// Frees the memory of an empty queue, if it is large.
pub(super) fn free_if_empty<T>(queue: &mut VecDeque<T>) {
    if queue.is_empty() && queue.capacity() > KEPT_CAPACITY {
        *queue = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_waits_for_those_before_it_and_a_held_one_is_given_once() {
        let mut replies = Replies::default();
        let numbers = [replies.wait(), replies.wait_for_acks(2, Instant::now()), replies.wait()];
        let text = |text: &'static str| move |out: &mut BytesMut| out.extend_from_slice(text.as_bytes());
        replies.complete(numbers[2], text("third "));
        assert!(replies.take_due().is_empty() && replies.waiting().0 == 3);
        assert!((6..100).contains(&replies.waiting().1), "{replies:?}");
        replies.complete(numbers[0], text("first "));
        assert_eq!(&replies.take_due()[..], b"first ");
        assert_eq!(replies.first_acks().unwrap().1, 2);
        replies.hold_first(text("held "));
        assert_eq!(&replies.take_due()[..], b"held third ");
        assert!(replies.is_empty() && replies.waiting() == (0, 0));
        replies.complete(numbers[1], text("acked "));
        assert!(replies.take_due().is_empty());
        assert_eq!(replies.next(), 3);
    }
}
