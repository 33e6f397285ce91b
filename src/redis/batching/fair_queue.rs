//! Queues the waiting requests of all client connections, and serves the connections in turns. So a connection with
//! many requests does not delay the others.
//!
//! A *frame* is one request. A *slice* is a part of a frame, or the whole frame. The slices of one connection stay in
//! order. The slices of different connections have no order. A connection is *fresh* if it has had no turn since its
//! queue was last empty. Fresh connections get every second turn, if there are any. So an Ack of a connection with few
//! requests is sent soon, even if other connections have long queues. If a part of a frame was sent, the rest of that
//! frame goes before all other slices.

use std::collections::{HashMap, VecDeque};

use crate::core::{ConnectionId, RandomHasher};
use crate::redis::batching::chunk::Slice;

/// Number of messages after which a turn ends. The turn always ends after a whole slice.
const TURN: usize = 128;

/// The waiting slices of each connection, and the order of the connections.
#[derive(Default)]
pub(crate) struct FairQueue {
    slices: HashMap<ConnectionId, VecDeque<Slice>, RandomHasher>,
    /// The fresh connections with waiting slices. `others` has the connections with waiting slices that have already
    /// had a turn.
    fresh: VecDeque<ConnectionId>,
    others: VecDeque<ConnectionId>,
    /// Whether the next turn is for a fresh connection.
    is_fresh_next: bool,
    /// The connection whose turn it is, and how many more messages that turn may take. `None` between two turns.
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

    /// Puts a slice that `pop` returned back before all others. Redis must not have applied the slice. The turn of its
    /// connection ends after this slice. Otherwise a connection with long frames could keep its turn forever, because a
    /// part of each frame is put back.
    pub(crate) fn push_front(&mut self, connection: ConnectionId, slice: Slice) {
        if let Some((interrupted, _)) = self.turn.take() {
            self.others.push_front(interrupted);
        }
        let slices = self.slices.entry(connection).or_default();
        match slices.front_mut() {
            // Both slices are adjacent parts of one frame, so they become one slice.
            Some(next) if next.frame == slice.frame && next.from == slice.to => next.from = slice.from,
            _ => slices.push_front(slice),
        }
        self.fresh.retain(|other| *other != connection);
        self.others.retain(|other| *other != connection);
        self.turn = Some((connection, 0));
    }

    /// Removes the next slice, and returns it with its connection.
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
        // All connections wait from the beginning. So each connection has its first turn before another has its third
        // turn.
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
        // Two further connections send a request from time to time. Exactly one of these requests waits at a time.
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
        // All slices are put back, the last one first, because the whole chunk must be sent again.
        queue.push_front(ConnectionId(2), slice(2, 980, 3_000));
        queue.push_front(ConnectionId(2), slice(2, 0, 980));
        queue.push_front(ConnectionId(1), slice(3, 0, 10));
        queue.push_front(ConnectionId(1), slice(1, 0, 10));
        assert_eq!(queue.pop(), Some((ConnectionId(1), slice(1, 0, 10))));
        // The turn of connection 1 ends after this slice. So any of the three connections may be next.
        let mut rest = [queue.pop(), queue.pop(), queue.pop()];
        rest.sort_by_key(|popped| popped.map(|(connection, _)| connection.0));
        let [one, two, three] = [(1, slice(3, 0, 10)), (2, slice(2, 0, 3_000)), (3, slice(4, 0, 1))];
        assert_eq!(rest, [one, two, three].map(|(connection, slice)| Some((ConnectionId(connection), slice))));
        assert_eq!(queue.pop(), None);
    }
}
