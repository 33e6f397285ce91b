//! The parts that concern the process itself: panics, signals, threads with their own runtime, and the service manager.

pub mod panics;
pub mod stop_signals;
pub mod systemd;
pub(crate) mod thread;
