//! What the connections of a load have in common, and what each of them has done.

use super::errors::Errors;
use super::ids::Ids;
use super::recorder::Sightings;
use super::{Live, Op, Order};

/// What all connections of a load have in common.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) op: Op,
    pub(super) ids: Ids,
    pub(super) pipeline: usize,
    pub(super) ids_per_frame: u64,
    pub(super) order: Order,
    pub(super) ack_timeout_ticks: u16,
    pub(super) ping_length: usize,
    pub(super) errors: Errors,
    pub(super) live: Live,
}

impl Plan {
    /// Whether every frame has one message, without a client: then it is made in one piece.
    pub(super) const fn is_plain(&self) -> bool {
        self.ids_per_frame == 1 && !self.ids.with_clients()
    }
}

/// What one connection has done and seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    /// Which connection it is.
    pub(super) connection: usize,
    /// Messages added while it was measured.
    pub(super) added: u64,
    /// Messages acknowledged while it was measured.
    pub(super) acked: u64,
    /// Requests answered while it was measured.
    pub(super) frames: u64,
    /// Pairs, or Pings, that were due at a fixed rate and never made.
    pub(super) not_made: u64,
    /// Messages in flight that are not to be acknowledged, since the beginning.
    pub(super) left_to_time_out: u64,
    /// Numbers that were given to messages, since the beginning.
    pub(super) numbers: u64,
    /// When the server was at which deadline.
    pub(super) sightings: Sightings,
}
