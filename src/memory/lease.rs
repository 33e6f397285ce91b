//! The lease of a memory store: its process always leads.

use std::time::Instant;

use crate::core::lease::{Leadership, Lease};
use crate::core::ring::Reply;

/// Always the leader, under the epoch of the process.
#[derive(Clone, Copy, Debug)]
pub struct AlwaysLeads {
    /// That epoch.
    pub epoch: u64,
}

impl Lease for AlwaysLeads {
    fn maintain(&self, _now: Instant) -> Reply<Leadership> {
        Reply::ok(Leadership::Leads { epoch: self.epoch, renew_at: None })
    }

    fn release(&self, _now: Instant) -> Reply<()> {
        Reply::ok(())
    }

    /// There is never a vacancy.
    fn on_lease_free(&self, _tell: Box<dyn Fn() + Send + Sync>) {}
}
