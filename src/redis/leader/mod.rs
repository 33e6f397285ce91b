//! Leadership of rings: the lease of each ring, the leadership term, and how sidecars share the rings.

pub(super) mod lease;
pub(super) mod rebalance;
pub(super) mod term;
