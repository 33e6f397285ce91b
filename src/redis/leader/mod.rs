//! Who leads a ring: the lease, the leadership term, and how sidecars share the rings.

pub(crate) mod lease;
pub(crate) mod rebalance;
pub(crate) mod term;
