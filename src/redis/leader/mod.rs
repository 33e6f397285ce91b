//! Determines which sidecar leads each ring: the lease of a ring, the term of a leader, and the distribution of rings
//! over the sidecars.

pub(super) mod lease;
pub(super) mod rebalance;
pub(super) mod term;
