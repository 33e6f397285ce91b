//! The ring's lists: tick → messages, one list for each deadline that can be alive.
//!
//! A list takes a message in and lets it go in O(1), and yields what is left in proportion to what is
//! left: a bitmap tells the occupied places, sixty-four at a glance. It is dropped as a whole when its tick
//! is decided, so its memory returns every revolution.
//!
//! A list is *not* the truth about a message; the map of messages is. A place can be stale for the moment
//! between the removal from the map and [`TickList::vacate`], so who walks a list asks the map about each
//! place. Lists are split into parts by message, so that connections adding to the same tick seldom meet.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::core::batch::TimedOut;
use crate::core::message::Message;
use crate::core::tick::{Tick, Wheel};

const PART_BITS: u32 = 3;
const PARTS: u32 = 1 << PART_BITS;
const NO_PLACE: u32 = u32::MAX;

/// Where a message lies in its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u32);

impl Place {
    /// The place of a message that lies in no list any more.
    pub(super) const NOWHERE: Place = Place(NO_PLACE);
}

/// The messages of one tick.
#[derive(Debug)]
pub(super) struct TickList {
    parts: [Mutex<Part>; PARTS as usize],
    /// Messages of this tick acknowledged so far. Counted under the map's guard, so that whoever has seen
    /// all messages of a decided tick in the map has seen all these counts.
    pub(super) acked: AtomicU64,
    /// Messages that were decided, and added again before the walk over the list had come to them.
    pub(super) overtaken: Mutex<Vec<TimedOut>>,
}

/// All lists of a ring, each reused for a later tick once its own is decided.
#[derive(Debug)]
pub(super) struct Lists(Box<[TickList]>);

impl Lists {
    /// Lists for a wheel that stands at `pointer`.
    ///
    /// A deadline is at most one revolution after the tick due, which is at most one tick ahead of the
    /// pointer; the closing tick and the one being decided are alive too.
    pub(super) fn new(wheel: Wheel, pointer: Tick) -> Lists {
        let count = u64::from(wheel.slots()) + 4;
        let first = |index: u64| pointer.0 + (index + count - pointer.0 % count) % count;
        Lists((0..count).map(|index| TickList::new(Tick(first(index)))).collect())
    }

    /// How many ticks have a list at a time.
    pub(super) fn horizon(&self) -> u64 {
        self.0.len() as u64
    }

    /// The list of a tick.
    #[expect(clippy::cast_possible_truncation, reason = "a remainder of a length fits a length")]
    pub(super) fn of(&self, tick: Tick) -> &TickList {
        &self.0[(tick.0 % self.horizon()) as usize]
    }

    /// Takes all that is left of a tick; its list is ready for the tick one horizon later.
    pub(super) fn take(&self, tick: Tick) -> Vec<Part> {
        let next = tick.plus(self.horizon());
        let replace = |part: &Mutex<Part>| {
            let mut part = part.lock();
            let fresh = Part::new(next, part.number);
            std::mem::replace(&mut *part, fresh)
        };
        self.of(tick).parts.iter().map(replace).collect()
    }
}

impl TickList {
    #[expect(clippy::cast_possible_truncation, reason = "there are eight parts")]
    fn new(tick: Tick) -> TickList {
        TickList {
            parts: std::array::from_fn(|number| Mutex::new(Part::new(tick, number as u32))),
            acked: AtomicU64::new(0),
            overtaken: Mutex::new(Vec::new()),
        }
    }

    /// Takes a message in; `None` if the tick is decided already.
    pub(super) fn push(&self, tick: Tick, message: Message) -> Option<Place> {
        let number = part_of(message);
        let mut part = self.parts[number as usize].lock();
        (part.tick == tick).then(|| Place(part.push(message) << PART_BITS | number))
    }

    /// Lets a message go; does nothing if the tick was decided meanwhile.
    pub(super) fn vacate(&self, tick: Tick, place: Place) {
        let mut part = self.parts[(place.0 & (PARTS - 1)) as usize].lock();
        if part.tick == tick {
            part.vacate(place.0 >> PART_BITS);
        }
    }

    /// Number of messages in the list of `tick`.
    pub(super) fn len(&self, tick: Tick) -> u64 {
        self.parts.iter().map(|part| part.lock()).filter(|part| part.tick == tick).map(|part| part.len()).sum()
    }

    /// The final number of acknowledged messages and those overtaken, once the walk is over.
    pub(super) fn settle(&self) -> (u64, Vec<TimedOut>) {
        (self.acked.swap(0, Ordering::Relaxed), std::mem::take(&mut *self.overtaken.lock()))
    }
}

/// Spreads messages over the parts: the highest bits of a multiplication depend on all lower ones.
fn part_of(message: Message) -> u32 {
    let mixed = (message.msg_id.0 ^ message.client.0.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (u64::BITS - PART_BITS)) as u32
}

/// A part of a list: places, a bit for each that is occupied, and a chain through those that are free.
#[derive(Debug)]
pub(super) struct Part {
    tick: Tick,
    number: u32,
    /// Messages; in a free place, the next free place instead of the msg_id.
    places: Vec<Message>,
    occupied: Vec<u64>,
    first_free: u32,
    len: u64,
}

impl Part {
    fn new(tick: Tick, number: u32) -> Part {
        Part { tick, number, places: Vec::new(), occupied: Vec::new(), first_free: NO_PLACE, len: 0 }
    }

    fn len(&self) -> u64 {
        self.len
    }

    #[expect(clippy::cast_possible_truncation, reason = "places are numbered by u32")]
    fn push(&mut self, message: Message) -> u32 {
        let place = if self.first_free == NO_PLACE {
            let place = self.places.len() as u32;
            assert!(place < NO_PLACE >> PART_BITS, "a part of a tick holds at most 2^29 messages");
            self.places.push(message);
            if place.is_multiple_of(u64::BITS) {
                self.occupied.push(0);
            }
            place
        } else {
            let place = self.first_free;
            self.first_free = self.places[place as usize].msg_id.0 as u32;
            self.places[place as usize] = message;
            place
        };
        self.occupied[(place / u64::BITS) as usize] |= 1 << (place % u64::BITS);
        self.len += 1;
        place
    }

    fn vacate(&mut self, place: u32) {
        self.occupied[(place / u64::BITS) as usize] &= !(1 << (place % u64::BITS));
        self.places[place as usize] = Message::new(u64::from(self.first_free), 0);
        self.first_free = place;
        self.len -= 1;
    }

    /// Visits the occupied places from `*position` on, and moves it, until about `count` were visited.
    /// Returns how many were; see the module for how a place can be stale.
    pub(super) fn walk(&self, position: &mut usize, count: usize, mut visit: impl FnMut(Place, Message)) -> usize {
        let mut visited = 0;
        while visited < count && *position < self.occupied.len() {
            let mut bits = self.occupied[*position];
            while bits != 0 {
                let place = *position * u64::BITS as usize + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                #[expect(clippy::cast_possible_truncation, reason = "places are numbered by u32")]
                visit(Place((place as u32) << PART_BITS | self.number), self.places[place]);
                visited += 1;
            }
            *position += 1;
        }
        visited
    }

    /// Whether a walk that stands at `position` is over.
    pub(super) fn is_walked(&self, position: usize) -> bool {
        position >= self.occupied.len()
    }
}
