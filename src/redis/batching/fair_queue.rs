//! Serves connections in turns, so that a connection with many requests does not delay the others.
//!
//! The requests of one connection stay in order. Requests of different connections have no order. A connection whose
//! queue was empty is *fresh*, and fresh connections get every second turn. So an Ack of a connection with few requests
//! is sent soon, however long the queues of the others are. The others still get their turns. If a part of a frame was
//! sent, the rest of that frame goes before all others.

use std::collections::{HashMap, VecDeque};

use crate::core::ConnectionId;
use crate::redis::batching::chunk::Slice;

/// Number of messages after which a turn ends. A frame is never cut at the end of a turn.
const TURN: usize = 128;

/// Waiting slices of frames, by connection.
#[derive(Default)]
pub(crate) struct FairQueue {
    slices: HashMap<ConnectionId, VecDeque<Slice>, foldhash::fast::RandomState>,
    /// Connections whose queue was empty and that have had no turn since. `others` has the connections that had a turn.
    fresh: VecDeque<ConnectionId>,
    others: VecDeque<ConnectionId>,
    /// Whether the next turn is for a fresh connection.
    is_fresh_next: bool,
    /// The connection whose turn it is, and the number of messages left in that turn.
    turn: Option<(ConnectionId, usize)>,
}

impl FairQueue {
    /// Appends a slice to the queue of its connection.
    pub(crate) fn push_back(&mut self, connection: ConnectionId, slice: Slice) {
        let slices = self.slices.entry(connection).or_insert_with(|| {
            self.fresh.push_back(connection);
            VecDeque::new()
        });
        slices.push_back(slice);
    }

    /// Puts a slice back before all others, because it was taken and not sent. The turn of its connection ends after
    /// this slice. Otherwise a connection whose frames are cut again and again would keep its turn forever.
    pub(crate) fn push_front(&mut self, connection: ConnectionId, slice: Slice) {
        if let Some((interrupted, _)) = self.turn.take() {
            self.others.push_front(interrupted);
        }
        let slices = self.slices.entry(connection).or_default();
        match slices.front_mut() {
            // Both are parts of one frame, so they are joined again.
            Some(next) if next.frame == slice.frame && next.from == slice.to => next.from = slice.from,
            _ => slices.push_front(slice),
        }
        self.fresh.retain(|other| *other != connection);
        self.others.retain(|other| *other != connection);
        self.turn = Some((connection, 0));
    }

    /// Takes the next slice, and returns it with its connection.
    pub(crate) fn pop(&mut self) -> Option<(ConnectionId, Slice)> {
        let (connection, left) = if let Some(turn) = self.turn.take() {
            turn
        } else {
            self.is_fresh_next = !self.is_fresh_next;
            let FairQueue { fresh, others, .. } = self;
            let (first, second) = if self.is_fresh_next { (fresh, others) } else { (others, fresh) };
            (first.pop_front().or_else(|| second.pop_front())?, TURN)
        };
        let slices = self.slices.get_mut(&connection)?;
        let slice = slices.pop_front()?;
        let left = left.saturating_sub(slice.len());
        if slices.is_empty() {
            self.slices.remove(&connection);
        } else if left > 0 {
            self.turn = Some((connection, left));
        } else {
            self.others.push_back(connection);
        }
        Some((connection, slice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(frame: u64, from: usize, to: usize) -> Slice {
        Slice { frame, from, to }
    }

    fn frames(queue: &mut FairQueue, count: usize) -> Vec<u64> {
        std::iter::from_fn(|| queue.pop()).take(count).map(|(_, slice)| slice.frame).collect()
    }

    #[test]
    fn a_connection_keeps_its_order_and_a_turn_ends() {
        let mut queue = FairQueue::default();
        for nth in 0..1_000 {
            (0..3).for_each(|connection| queue.push_back(ConnectionId(connection), slice(nth, 0, 1)));
        }
        let taken: Vec<(ConnectionId, u64)> =
            std::iter::from_fn(|| queue.pop()).map(|(connection, slice)| (connection, slice.frame)).collect();
        for connection in 0..3 {
            let own = taken.iter().filter(|(one, _)| *one == ConnectionId(connection)).map(|(_, frame)| *frame);
            assert!(own.eq(0..1_000));
        }
        // All connections wait from the beginning, so none has three turns while another has none.
        let turns = taken[..6 * TURN].chunk_by(|one, next| one.0 == next.0);
        assert!(turns.clone().all(|turn| turn.len() <= 2 * TURN) && turns.count() >= 4);
        assert!(queue.slices.is_empty() && queue.fresh.is_empty() && queue.others.is_empty());
    }

    #[test]
    fn a_connection_that_seldom_asks_waits_for_one_turn_and_starves_no_other() {
        let mut queue = FairQueue::default();
        for connection in 0..8 {
            for nth in 0..1_000 {
                queue.push_back(ConnectionId(connection), slice(connection * 1_000 + nth, 0, 500));
            }
        }
        // Each connection has had its first turn.
        assert_eq!(frames(&mut queue, 16).len(), 16);
        // These two connections always have exactly one request waiting.
        let mut seen = Vec::new();
        for nth in 0..40 {
            queue.push_back(ConnectionId(8 + nth % 2), slice(9_000, 0, 1));
            seen.extend(frames(&mut queue, 2));
        }
        let of_floods = seen.iter().filter(|frame| **frame < 8_000).count();
        assert!((38..=42).contains(&of_floods) && seen.len() == 80, "{of_floods} of {}", seen.len());
        let waited = seen.split(|frame| *frame == 9_000).map(<[u64]>::len).max();
        assert!(waited <= Some(2), "{seen:?}");
    }

    #[test]
    fn slices_that_were_not_sent_go_first_and_in_one_piece() {
        let mut queue = FairQueue::default();
        queue.push_back(ConnectionId(1), slice(1, 0, 10));
        queue.push_back(ConnectionId(2), slice(2, 0, 3_000));
        queue.push_back(ConnectionId(1), slice(3, 0, 10));
        assert_eq!(frames(&mut queue, 2), [1, 3]);
        assert_eq!(queue.pop(), Some((ConnectionId(2), slice(2, 0, 3_000))));
        queue.push_back(ConnectionId(3), slice(4, 0, 1));
        queue.push_front(ConnectionId(2), slice(2, 980, 3_000));
        assert_eq!(queue.pop(), Some((ConnectionId(2), slice(2, 980, 3_000))));
        // The whole frame is sent again: its slices are put back, the last one first.
        queue.push_front(ConnectionId(2), slice(2, 980, 3_000));
        queue.push_front(ConnectionId(2), slice(2, 0, 980));
        queue.push_front(ConnectionId(1), slice(3, 0, 10));
        queue.push_front(ConnectionId(1), slice(1, 0, 10));
        assert_eq!(queue.pop(), Some((ConnectionId(1), slice(1, 0, 10))));
        // After this slice the turn of connection 1 is over, as are the turns of the others.
        let mut rest = [queue.pop(), queue.pop(), queue.pop()];
        rest.sort_by_key(|popped| popped.map(|(connection, _)| connection.0));
        let [one, two, three] = [(1, slice(3, 0, 10)), (2, slice(2, 0, 3_000)), (3, slice(4, 0, 1))];
        assert_eq!(rest, [one, two, three].map(|(connection, slice)| Some((ConnectionId(connection), slice))));
        assert_eq!(queue.pop(), None);
    }
}
