//! The state file is written while the sidecar stays responsive: a disk that does not answer outlasts no drain.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::frames;
use crate::support::held_thread::HeldThread;
use crate::support::process::assert_names;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

/// So many that the file is not written in an instant.
const MESSAGES: u64 = 1_000_000;

fn ids() -> Vec<u64> {
    (1..=MESSAGES).map(|id| id.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// A sidecar whose state file somebody put back meanwhile, and that has messages in flight.
fn start_full(state: &Path) -> Sidecar {
    let sidecar = Sidecar::start(&["--state", state.to_str().unwrap()]);
    fs::write(state, "old").unwrap();
    let mut connection = sidecar.connect();
    for ids in ids().chunks(30_000) {
        connection.ask(&frames::add(ids, 15, 1)).added();
    }
    sidecar
}

fn assert_abandoned(sidecar: &mut Sidecar, held: &HeldThread, state: &Path, words: &str) {
    held.wait_for_end();
    assert_eq!(sidecar.exit().code(), Some(1), "{}", sidecar.log().text());
    assert_names(&sidecar.log().text(), &["ERROR", "the wheel could not be kept", "in_flight=1000000", words]);
    assert_eq!(fs::read(state).unwrap(), b"old", "it is left as it was");
    assert!(!state.with_extension("new").exists(), "half of a state helps nobody");
}

#[test]
fn a_second_signal_ends_a_drain_whose_disk_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let mut sidecar = start_full(&state);
    let begun = Instant::now();
    sidecar.signal(Signal::TERM);
    let Some(held) = HeldThread::hold_at_disk(sidecar.id(), "state-file") else { return };
    wait_until("a signal means another stop", || begun.elapsed() > Duration::from_millis(1_200));
    assert!(sidecar.exited().is_none() && state.with_extension("new").exists());
    let again = Instant::now();
    sidecar.signal(Signal::TERM);
    assert_abandoned(&mut sidecar, &held, &state, "SIGTERM ended the drain");
    assert!(again.elapsed() < Duration::from_secs(2), "took {:?}", again.elapsed());
}

#[test]
fn a_drain_whose_disk_does_not_answer_ends_within_ten_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let mut sidecar = start_full(&state);
    let begun = Instant::now();
    sidecar.signal(Signal::TERM);
    let Some(held) = HeldThread::hold_at_disk(sidecar.id(), "state-file") else { return };
    assert_abandoned(&mut sidecar, &held, &state, "was not written in time");
    assert!(begun.elapsed() < Duration::from_secs(10), "took {:?}", begun.elapsed());
}

/// The most memory that the process has had so far, in bytes; `None` once it has ended.
fn peak_bytes(sidecar: &Sidecar) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", sidecar.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1_024)
}

#[test]
fn an_outbox_is_kept_where_there_is_no_memory_for_a_second_one() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let flags = ["--tick", "100ms", "--slots", "20", "--state", state.to_str().unwrap()];
    let mut sidecar = Sidecar::start(&flags);
    let mut connection = sidecar.connect();
    for ids in ids().chunks(30_000) {
        connection.ask(&frames::add(ids, 10, 1)).added();
    }
    wait_until("all are in the outbox", || sidecar.metrics().count("outbox_ids") == MESSAGES);
    let before = peak_bytes(&sidecar).expect("it serves");
    sidecar.signal(Signal::TERM);
    let mut most = before;
    while sidecar.exited().is_none() {
        most = peak_bytes(&sidecar).unwrap_or(most);
    }
    assert_names(&sidecar.log().whole(), &["0 messages in flight are kept", "batches that were not acknowledged"]);
    // A copy of the outbox would be 24 MB.
    assert!(most < before + (8 << 20), "{before} bytes became {most}");
    let sidecar = Sidecar::start(&flags);
    assert_eq!(sidecar.metrics().count("outbox_ids"), MESSAGES, "all of it is back");
}
