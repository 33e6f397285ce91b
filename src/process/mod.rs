//! Parts of the process itself: panics, signals, threads with a runtime of their own, and the service manager.

pub mod panics;
pub mod stop_signals;
pub mod systemd;
pub(crate) mod thread;
