//! What waits to be sent, connection by connection: whoever asks for much does not hold up whoever asks for little.
//!
//! The requests of a connection are a *lane*, and keep their order; between lanes there is none. FairQueue have turns. One
//! that had nothing waiting begins among the *fresh* ones, and these have every second turn: an Ack of a connection that
//! seldom asks is soon on its way, however long the queues of others are, and these go on all the same. A frame of which
//! a part was sent goes on before all others.

use std::collections::{HashMap, VecDeque};

use crate::core::ring::ConnectionId;
use crate::redis::batching::chunk::Slice;

/// Messages after which a turn is over; a frame is not cut for it.
const TURN: usize = 128;

/// Emptied lanes that are kept for others, and the longest of them.
const SPARE: usize = 64;
const LONGEST_SPARE: usize = 1_024;

/// Slices of frames, by who asked for them.
#[derive(Default)]
pub(crate) struct FairQueue {
    slices: HashMap<ConnectionId, VecDeque<Slice>, foldhash::fast::RandomState>,
    /// FairQueue that were empty until lately, and those that had a turn since.
    fresh: VecDeque<ConnectionId>,
    others: VecDeque<ConnectionId>,
    /// Whether a fresh one is next.
    is_fresh_next: bool,
    /// Whose turn it is, and for how many messages more.
    turn: Option<(ConnectionId, usize)>,
    spare: Vec<VecDeque<Slice>>,
}

impl FairQueue {
    /// A slice that comes after all of its lane.
    pub(crate) fn push_back(&mut self, connection: ConnectionId, slice: Slice) {
        if let Some(lane) = self.slices.get_mut(&connection) {
            lane.push_back(slice);
            return;
        }
        let mut lane = self.spare.pop().unwrap_or_default();
        lane.push_back(slice);
        self.slices.insert(connection, lane);
        self.fresh.push_back(connection);
    }

    /// A slice that comes before all others: it was taken, and is not sent. Its lane has no more of a turn than that:
    /// else whoever has a frame cut again and again would keep it for ever.
    pub(crate) fn push_front(&mut self, connection: ConnectionId, slice: Slice) {
        self.end_turn();
        let lane = self.slices.entry(connection).or_default();
        match lane.front_mut() {
            // Parts of a frame that were taken apart.
            Some(next) if next.frame == slice.frame && next.from == slice.to => next.from = slice.from,
            _ => lane.push_front(slice),
        }
        self.fresh.retain(|other| *other != connection);
        self.others.retain(|other| *other != connection);
        self.turn = Some((connection, 0));
    }

    /// The next slice, and whose it is.
    pub(crate) fn pop(&mut self) -> Option<(ConnectionId, Slice)> {
        let (connection, left) = match self.turn.take() {
            Some(turn) => turn,
            None => (self.next_turn()?, TURN),
        };
        let lane = self.slices.get_mut(&connection)?;
        let slice = lane.pop_front()?;
        let left = left.saturating_sub(slice.to - slice.from);
        if lane.is_empty() {
            let lane = self.slices.remove(&connection)?;
            if self.spare.len() < SPARE && lane.capacity() <= LONGEST_SPARE {
                self.spare.push(lane);
            }
        } else if left > 0 {
            self.turn = Some((connection, left));
        } else {
            self.others.push_back(connection);
        }
        Some((connection, slice))
    }

    /// The lane whose turn begins.
    fn next_turn(&mut self) -> Option<ConnectionId> {
        self.is_fresh_next = !self.is_fresh_next;
        let (first, second) = if self.is_fresh_next {
            (&mut self.fresh, &mut self.others)
        } else {
            (&mut self.others, &mut self.fresh)
        };
        first.pop_front().or_else(|| second.pop_front())
    }

    /// Whoever has the turn goes on later.
    fn end_turn(&mut self) {
        if let Some((connection, _)) = self.turn.take() {
            self.others.push_front(connection);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(frame: u64, from: usize, to: usize) -> Slice {
        Slice { frame, from, to }
    }

    fn frames(lanes: &mut FairQueue, count: usize) -> Vec<u64> {
        std::iter::from_fn(|| lanes.pop()).take(count).map(|(_, slice)| slice.frame).collect()
    }

    #[test]
    fn a_lane_keeps_its_order_and_a_turn_ends() {
        let mut lanes = FairQueue::default();
        for nth in 0..1_000 {
            (0..3).for_each(|connection| lanes.push_back(ConnectionId(connection), slice(nth, 0, 1)));
        }
        let taken: Vec<(ConnectionId, u64)> =
            std::iter::from_fn(|| lanes.pop()).map(|(connection, slice)| (connection, slice.frame)).collect();
        for connection in 0..3 {
            let own = taken.iter().filter(|(one, _)| *one == ConnectionId(connection)).map(|(_, frame)| *frame);
            assert!(own.eq(0..1_000));
        }
        // All wait from the beginning: nobody has three turns while another has none.
        let turns = taken[..6 * TURN].chunk_by(|one, next| one.0 == next.0);
        assert!(turns.clone().all(|turn| turn.len() <= 2 * TURN) && turns.count() >= 4);
        assert!(lanes.slices.is_empty() && lanes.fresh.is_empty() && lanes.others.is_empty());
    }

    #[test]
    fn who_seldom_asks_waits_for_one_turn_and_starves_nobody() {
        let mut lanes = FairQueue::default();
        for connection in 0..8 {
            for nth in 0..1_000 {
                lanes.push_back(ConnectionId(connection), slice(connection * 1_000 + nth, 0, 500));
            }
        }
        // Each has had its first turn.
        assert_eq!(frames(&mut lanes, 16).len(), 16);
        // Two that never have more than one request waiting, and always one.
        let mut seen = Vec::new();
        for nth in 0..40 {
            lanes.push_back(ConnectionId(8 + nth % 2), slice(9_000, 0, 1));
            seen.extend(frames(&mut lanes, 2));
        }
        let of_floods = seen.iter().filter(|frame| **frame < 8_000).count();
        assert!((38..=42).contains(&of_floods) && seen.len() == 80, "{of_floods} of {}", seen.len());
        let waited = seen.split(|frame| *frame == 9_000).map(<[u64]>::len).max();
        assert!(waited <= Some(2), "{seen:?}");
    }

    #[test]
    fn what_was_not_sent_goes_first_and_in_one_piece() {
        let mut lanes = FairQueue::default();
        lanes.push_back(ConnectionId(1), slice(1, 0, 10));
        lanes.push_back(ConnectionId(2), slice(2, 0, 3_000));
        lanes.push_back(ConnectionId(1), slice(3, 0, 10));
        assert_eq!(frames(&mut lanes, 2), [1, 3]);
        assert_eq!(lanes.pop(), Some((ConnectionId(2), slice(2, 0, 3_000))));
        lanes.push_back(ConnectionId(3), slice(4, 0, 1));
        lanes.push_front(ConnectionId(2), slice(2, 980, 3_000));
        assert_eq!(lanes.pop(), Some((ConnectionId(2), slice(2, 980, 3_000))));
        // All of it is sent again: what was taken is put back from its end.
        lanes.push_front(ConnectionId(2), slice(2, 980, 3_000));
        lanes.push_front(ConnectionId(2), slice(2, 0, 980));
        lanes.push_front(ConnectionId(1), slice(3, 0, 10));
        lanes.push_front(ConnectionId(1), slice(1, 0, 10));
        assert_eq!(lanes.pop(), Some((ConnectionId(1), slice(1, 0, 10))));
        // With that its turn is over, as it is for the others.
        let mut rest = [lanes.pop(), lanes.pop(), lanes.pop()];
        rest.sort_by_key(|popped| popped.map(|(connection, _)| connection.0));
        let [one, two, three] = [(1, slice(3, 0, 10)), (2, slice(2, 0, 3_000)), (3, slice(4, 0, 1))];
        assert_eq!(rest, [one, two, three].map(|(connection, slice)| Some((ConnectionId(connection), slice))));
        assert_eq!(lanes.pop(), None);
    }
}
