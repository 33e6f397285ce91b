//! Notices when the whole machine stalls, which is no fault of the run and must not be taken for steady state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

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
