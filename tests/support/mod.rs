//! The harness: sidecars, watches and connections, each ended with its test.

pub mod browser;
pub mod certificates;
pub mod checker;
pub mod clock;
pub mod cluster;
pub mod deployed;
pub mod disk;
pub mod fleet;
pub mod flow;
pub mod frame_proxy;
pub mod frames;
pub mod frozen_redis;
pub mod held_thread;
pub mod http;
pub mod injected_fault;
pub mod kubernetes;
pub mod network;
pub mod packages;
pub mod png;
pub mod process;
pub mod prometheus;
pub mod proxy;
pub mod raw;
pub mod redis;
pub mod resp;
pub mod sentinels;
pub mod settings;
pub mod sidecar;
pub mod single_request;
pub mod skipped;
pub mod tls;
pub mod traffic;
pub mod watch;

use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for what must come. Long, because the machine may be busy: a test that needs it fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How much later than its bound something may come on a busy machine.
pub const SLACK: Duration = Duration::from_millis(600);

/// Asks again and again until there is an answer.
///
/// # Panics
///
/// When there is none for as long as [`PATIENCE`].
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = condition() {
            return answer;
        }
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(3));
    }
}

/// Waits until it is true.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Sleeps until a moment; for stimuli that must come at a certain time, never to prove anything.
pub fn sleep_until(moment: Instant) {
    thread::sleep(moment.saturating_duration_since(Instant::now()));
}
