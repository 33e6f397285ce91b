//! Reports tests that are skipped because a program or a right is missing: each at once, and their number at the end.

use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Says that something is not tested, and why; also where the test passes.
pub fn skip(reason: &str) {
    SKIPPED.fetch_add(1, Ordering::Relaxed);
    // The harness swallows what a passing test prints with `eprintln!`.
    let _ = io::stderr().write_all(format!("\nnot tested: {reason}\n").as_bytes());
}

/// The last line of the run.
#[dtor::dtor(unsafe)]
fn count() {
    let skipped = SKIPPED.load(Ordering::Relaxed);
    if skipped > 0 {
        let line = format!("not tested, for reasons given above: {skipped}\n");
        let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
    }
}
