//! A journal with any bytes in it: a sidecar that starts with it ends with an error or goes on, and the next start finds
//! the same.
//!
//! The first byte of an input says whether the rest is what a segment contains, or records, which are put in valid blocks:
//! a search does not find checksums.

#![no_main]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ackwheel::clock::Clock;
use ackwheel::core::{Retention, Store, StormRule, Wheel};
use ackwheel::memory::{JournalOptions, MemoryOptions, MemoryStore, Recovered, SyncPolicy, first_segment_of};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::Builder;

fuzz_target!(|input: &[u8]| {
    let Some((how, bytes)) = input.split_first() else { return };
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory can be made");
    let segment = folder.path().join("log-00000001");
    let content = match how & 1 {
        0 => first_segment_of(wheel(), &records(bytes)),
        _ => [&first_segment_of(wheel(), &[])[..], bytes].concat(),
    };
    fs::write(&segment, content).expect("the folder can be written");
    fs::set_permissions(&segment, fs::Permissions::from_mode(0o600)).expect("it is ours");
    let first = restart(folder.path());
    let second = restart(folder.path());
    assert_eq!((first.in_flight, &first.damages), (second.in_flight, &second.damages));
});

/// Starts a store with the journal, and closes it.
fn restart(folder: &Path) -> Recovered {
    let options = MemoryOptions {
        wheel: wheel(),
        storm: StormRule::default(),
        retention: Retention::default(),
        max_in_flight: 1_000,
        threads: 1,
    };
    let journal = JournalOptions { folder: folder.to_owned(), sync: SyncPolicy::None };
    let opened = MemoryStore::open(options, &journal, &Arc::new(Clock::start()));
    let (store, recovered) = opened.expect("damage is no error");
    let runtime = Builder::new_current_thread().build().expect("it needs nothing");
    runtime.block_on(store.close()).expect("the journal can be written");
    recovered
}

fn wheel() -> Wheel {
    Wheel::new(15, Duration::from_secs(1)).expect("it is valid")
}

/// Splits bytes into the records of blocks: before each stands its length.
fn records(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut blocks = Vec::new();
    while let Some((length, rest)) = bytes.split_first() {
        let (records, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        bytes = rest;
        blocks.push(records);
    }
    blocks
}
