//! Parts of the process itself: panics, threads with a runtime of their own, and the service manager.

pub mod panics;
pub mod systemd;
pub(crate) mod thread;
