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

/// The times around the beginning and the end of each silence of a Redis, by the log of a sidecar.
pub fn silences_of_redis(log: &str) -> Vec<Stall> {
    let silence = |seen: Instant| Some((seen.checked_sub(Duration::from_secs(1))?, seen));
    let seen = |words| times_of(log, words).filter_map(silence);
    seen("no answer within ").chain(seen("the store answers again")).collect()
}

/// The times at which a sidecar found that Redis had lost writes, by its log, each with the time before in which a replica
/// took over.
pub fn losses_of_redis(log: &str) -> Vec<Stall> {
    let loss = |found: Instant| Some((found.checked_sub(Duration::from_secs(6))?, found));
    times_of(log, "Redis has lost writes that it had answered").filter_map(loss).collect()
}

/// The times of the lines with these words. Lines of a clock that is fast are left out.
fn times_of<'a>(log: &'a str, words: &'a str) -> impl Iterator<Item = Instant> + 'a {
    let (now, unix_now) = (Instant::now(), SystemTime::now());
    log.lines().filter(move |line| line.contains(words)).filter_map(move |line| {
        let at = humantime::parse_rfc3339(line.split(' ').next()?).ok()?;
        now.checked_sub(unix_now.duration_since(at).ok()?)
    })
}
