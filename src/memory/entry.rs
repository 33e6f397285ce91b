//! The map of messages: the truth about each of them.

use dashmap::DashMap;

use super::lists::Place;
use crate::core::message::Message;
use crate::core::tally::Stamp;
use crate::core::tick::Tick;

/// Message → entry: keyed per process, since ids come from clients.
pub(super) type Messages = DashMap<Message, Entry, foldhash::quality::RandomState>;

/// What is known of a message in flight, or of one that timed out less than a revolution ago.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) deadline: Tick,
    pub(super) added_at: Stamp,
    pub(super) place: Place,
    pub(super) attempt: u8,
    /// Whether the walk over its decided tick has come to it.
    pub(super) listed: bool,
    /// Whether its latency was recorded by a late del.
    pub(super) late_counted: bool,
}

impl Entry {
    pub(super) fn in_flight(deadline: Tick, added_at: Stamp, place: Place, attempt: u8) -> Entry {
        Entry { deadline, added_at, place, attempt, listed: false, late_counted: false }
    }

    pub(super) fn remembered(deadline: Tick, added_at: Stamp, attempt: u8, late_counted: bool) -> Entry {
        Entry { deadline, added_at, place: Place::NOWHERE, attempt, listed: true, late_counted }
    }
}
