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
use ackwheel::memory::{JournalOptions, MemoryOptions, MemoryStore, Recovered, SyncPolicy};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::Builder;

const SLOTS: u16 = 15;
const TICK_MS: u32 = 1_000;

fuzz_target!(|input: &[u8]| {
    let Some((how, bytes)) = input.split_first() else { return };
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory can be made");
    let segment = folder.path().join("log-00000001");
    let content = if how & 1 == 0 { in_blocks(bytes) } else { bytes.to_vec() };
    fs::write(&segment, [head(), content].concat()).expect("the folder can be written");
    fs::set_permissions(&segment, fs::Permissions::from_mode(0o600)).expect("it is ours");
    let first = restart(folder.path());
    let second = restart(folder.path());
    assert_eq!((first.in_flight, &first.damages), (second.in_flight, &second.damages));
});

/// Starts a store with the journal, and closes it.
fn restart(folder: &Path) -> Recovered {
    let options = MemoryOptions {
        wheel: Wheel::new(SLOTS, Duration::from_millis(TICK_MS.into())).expect("it is valid"),
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

/// The head of the first segment.
fn head() -> Vec<u8> {
    let mut head = b"ackwheel log   1".to_vec();
    head.extend(1_u32.to_le_bytes());
    head.extend(SLOTS.to_le_bytes());
    head.extend(TICK_MS.to_le_bytes());
    // Epoch, pointer, and the length of the segment before.
    head.extend([7_u64, 1_700_000_000, 0].map(u64::to_le_bytes).concat());
    let crc = crc32fast::hash(&head);
    head.extend(crc.to_le_bytes());
    head
}

/// Blocks of records: a byte says how much of the rest is in one.
fn in_blocks(mut bytes: &[u8]) -> Vec<u8> {
    let mut blocks = Vec::new();
    while let Some((length, rest)) = bytes.split_first() {
        let (records, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        bytes = rest;
        let length = u32::try_from(records.len()).expect("it is below 256").to_le_bytes();
        // Its checkpoint begins in the first segment, and the process has lived for 9 ms.
        let fields =
            [&1_u32.to_le_bytes()[..], &9_u64.to_le_bytes(), &1_700_000_000_009_u64.to_le_bytes()].concat();
        let covered = [&1_u32.to_le_bytes()[..], &length, &fields, records].concat();
        let crc = crc32fast::hash(&covered).to_le_bytes();
        blocks.extend([&length[..], &crc, &fields, records].concat());
    }
    blocks
}
