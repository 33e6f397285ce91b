//! The process itself: what a panic does, threads with a runtime of their own, and what systemd is told.

pub mod panics;
pub mod systemd;
pub(crate) mod thread;
