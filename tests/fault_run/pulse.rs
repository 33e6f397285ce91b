//! Notices when the whole machine stalls, or a Redis on it, which is no fault of the run and must not be taken for steady state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

/// From one beat to the next.
const BEAT: Duration = Duration::from_millis(10);

/// A beat that is this late was held up.
const STALL: Duration = Duration::from_millis(150);

/// From one moment to another.
pub type Stall = (Instant, Instant);

/// A thread that does nothing but sleep and look at the time.
#[derive(Debug)]
pub struct Pulse {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Stall>>,
}

impl Pulse {
    pub fn start() -> Pulse {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut stalls = Vec::new();
            while !stopped.load(Ordering::SeqCst) {
                let before = Instant::now();
                thread::sleep(BEAT);
                let after = Instant::now();
                if after - before > BEAT + STALL {
                    stalls.push((before, after));
                }
            }
            stalls
        });
        Pulse { stop, thread }
    }

    /// Ends it; returns all stalls.
    pub fn finish(self) -> Vec<Stall> {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("sleeping does not fail")
    }
}

/// The times in which a sidecar got no answer from a Redis, by its log. No fault of the run is told apart from others.
pub fn silences_of_redis(log: &str) -> Vec<Stall> {
    const SILENT: &str = "cause=no answer within ";
    let (now, unix_now) = (Instant::now(), SystemTime::now());
    let silence = |line: &str| {
        let at = humantime::parse_rfc3339(line.split(' ').next()?).ok()?;
        let ended = now.checked_sub(unix_now.duration_since(at).ok()?)?;
        Some((ended.checked_sub(Duration::from_secs(1))?, ended))
    };
    log.lines().filter(|line| line.contains(SILENT)).filter_map(silence).collect()
}
