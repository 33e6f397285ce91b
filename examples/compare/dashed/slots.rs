//! tick → ids, as the other half of the ring on dashmap: one row of slots for each shard of the map.

use ackwheel::core::{Message, Outcome, Stamp, Tick, TimedOut, Wheel};

use super::grouped::Key;

/// The entry of a message in the map.
#[derive(Clone, Copy, Debug)]
pub struct Flight {
    /// The tick with which it is decided.
    pub deadline: Tick,
    /// When it was added.
    pub added_at: Stamp,
    /// Comes back with the timeout.
    pub attempt: u8,
}

impl Flight {
    /// Its entry in a batch if it is not acknowledged.
    pub const fn timed_out(self, (id, client): Key) -> TimedOut {
        TimedOut { message: Message::new(id, client), attempt: self.attempt }
    }
}

/// The slots of one shard. Lock the shard of the map before them.
#[derive(Debug)]
pub struct Slots {
    /// A power of two of them, so that no slot is found by division.
    by_tick: Box<[Slot]>,
    /// Messages that were decided, and added again before they were listed.
    overtaken: Vec<(Tick, TimedOut)>,
    /// Pieces of lists that are done with, whose memory is used again.
    spare: Vec<Piece>,
}

/// Room for [`PIECE`] ids.
pub type Piece = Vec<Key>;

/// A list is not moved as it grows, and its memory goes to the tick that needs it next.
const PIECE: usize = 4 * 1_024;

/// The messages of one tick in a shard.
#[derive(Debug, Default)]
pub struct Slot {
    /// All that were added for it: one that was acknowledged or re-armed stays here until the tick is decided.
    full: Vec<Piece>,
    /// The last of them.
    open: Piece,
    /// Messages in flight.
    pub left: u64,
    /// Messages acknowledged.
    pub acked: u64,
}

impl Slots {
    /// Empty slots: one for each tick that can be alive, and some that are not used.
    pub fn new(wheel: Wheel) -> Slots {
        let alive = usize::from(wheel.slots()) + 4;
        let by_tick = (0..alive.next_power_of_two()).map(|_| Slot::default()).collect();
        Slots { by_tick, overtaken: Vec::new(), spare: Vec::new() }
    }

    /// The slot of a tick that is alive.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "only the lowest bits count")]
    pub fn of(&mut self, tick: Tick) -> &mut Slot {
        let last = self.by_tick.len() - 1;
        &mut self.by_tick[tick.0 as usize & last]
    }

    /// Notes that a message was added.
    #[inline]
    pub fn add(&mut self, deadline: Tick, key: Key) {
        let slot = self.of(deadline);
        slot.left += 1;
        if slot.open.len() == slot.open.capacity() {
            self.turn_over(deadline);
        }
        self.of(deadline).open.push(key);
    }

    /// Opens another piece of a list.
    #[cold]
    fn turn_over(&mut self, deadline: Tick) {
        let empty = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(PIECE));
        let slot = self.of(deadline);
        slot.full.push(std::mem::replace(&mut slot.open, empty));
    }

    /// Notes that it was there already; says what that makes of the add.
    pub fn overtake(&mut self, key: Key, earlier: Flight, pointer: Tick) -> Outcome {
        if earlier.deadline < pointer {
            self.overtaken.push((earlier.deadline, earlier.timed_out(key)));
            return Outcome::Added;
        }
        self.of(earlier.deadline).left -= 1;
        Outcome::Rearmed
    }

    /// Notes that a message was acknowledged.
    #[inline]
    pub fn acknowledge(&mut self, flight: Flight) -> Outcome {
        let slot = self.of(flight.deadline);
        slot.left -= 1;
        slot.acked += 1;
        Outcome::Acked
    }

    /// Notes that a message was taken back.
    pub fn withdraw(&mut self, flight: Flight) -> Outcome {
        self.of(flight.deadline).left -= 1;
        Outcome::Withdrawn
    }

    /// Takes what is known of a tick that is decided.
    pub fn take(&mut self, decided: Tick) -> Slot {
        std::mem::take(self.of(decided))
    }

    /// Takes the messages of a tick that were added again before they were listed.
    pub fn take_overtaken(&mut self, tick: Tick) -> impl Iterator<Item = TimedOut> {
        self.overtaken.extract_if(.., move |(of, _)| *of == tick).map(|(_, timed_out)| timed_out)
    }

    /// Keeps the memory of a piece that is done with.
    pub fn keep(&mut self, mut piece: Piece) {
        if piece.capacity() > 0 {
            piece.clear();
            self.spare.push(piece);
        }
    }
}

impl Slot {
    /// The whole list.
    pub fn into_pieces(mut self) -> Vec<Piece> {
        self.full.push(self.open);
        self.full
    }
}
