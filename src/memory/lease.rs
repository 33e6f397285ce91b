//! The lease of a memory store: its process always leads.

use std::time::Instant;

use async_trait::async_trait;

use crate::core::lease::{Leadership, Lease};
use crate::core::refusal::Refusal;

/// Always the leader, under the epoch of the process.
#[derive(Clone, Copy, Debug)]
pub struct AlwaysLeads {
    /// That epoch.
    pub epoch: u64,
}

#[async_trait]
impl Lease for AlwaysLeads {
    async fn maintain(&self, _now: Instant) -> Result<Leadership, Refusal> {
        Ok(Leadership::Leads { epoch: self.epoch, renew_at: None })
    }

    async fn release(&self, _now: Instant) -> Result<(), Refusal> {
        Ok(())
    }

    /// There is never a vacancy.
    fn on_lease_free(&self, _tell: Box<dyn Fn() + Send + Sync>) {}
}
