//! The parts that concern the process itself: its cgroup, files, panics, signals, threads with their own runtime, and
//! the service manager.

pub(crate) mod cgroup;
pub(crate) mod files;
pub mod panics;
pub mod parking;
pub mod stop_signals;
pub mod systemd;
pub(crate) mod thread;
