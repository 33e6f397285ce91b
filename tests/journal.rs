//! With `--journal` neither a restart nor a crash loses what was answered, and a disk that fails refuses adds only.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::clock::{Clock, FakeClock};
use crate::support::frames::{self, ACKED, LATE, UNKNOWN};
use crate::support::process::{Run, assert_names, program};
use crate::support::sidecar::Sidecar;
use crate::support::{sleep_until, wait_until};

pub fn start(journal: &Path, more: &[&str]) -> Sidecar {
    let tick: &[&str] = if more.contains(&"--tick") { &[] } else { &["--tick", "200ms"] };
    Sidecar::start(&[tick, &["--journal", journal.to_str().unwrap()], more].concat())
}

pub fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal");
    (folder, journal)
}

/// Serves with these flags until it fails; returns its error.
pub fn refused(journal: &Path, flags: &[&str]) -> String {
    let mut command = program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    let run = Run::of(command.arg("--journal").arg(journal).args(flags));
    assert_eq!(run.code, 1, "{run:?}");
    run.stderr
}

#[test]
fn messages_and_their_deadlines_survive_a_restart_and_a_kill() {
    for is_killed in [false, true] {
        let (_folder, journal) = folder();
        let mut sidecar = start(&journal, &[]);
        let mut connection = sidecar.connect();
        let added = Instant::now();
        let (first, _) = connection.ask(&frames::add(&[1, 2], 12, 1)).added();
        let (second, _) = connection.ask(&frames::add_pairs(&[(3, 30), (u64::MAX, u64::MAX)], 14)).added();
        connection.ask(&frames::add(&[5], 12, 200)).added();
        assert_eq!(connection.ask(&frames::del(&[2])).outcomes(), [ACKED]);
        let pointer = sidecar.pointer();
        if is_killed {
            sidecar.kill();
        } else {
            sidecar.terminate();
            sidecar.log().assert_names(&["4 messages in flight are kept"]);
        }
        let ended = Instant::now();

        let begun = Instant::now();
        let sidecar = start(&journal, &[]);
        sidecar.log().assert_names(&["taken over", "messages=4"]);
        let status = sidecar.status();
        assert_eq!(status.rings[0].in_flight, 4);
        assert!((pointer..=first).contains(&status.rings[0].pointer.0), "the wheel goes on where it stood");
        let mut connection = sidecar.connect();
        assert_eq!(connection.ask(&frames::del(&[2, 3])).outcomes(), [UNKNOWN; 2]);
        assert_eq!(connection.ask(&frames::add(&[5], 15, 3)).added().1, [true], "5 is re-armed");
        let mut subscriber = sidecar.connect().subscribed("default");
        let batch = subscriber.settled_batch();
        assert_eq!((batch.ids(), batch.tick, batch.drained), (vec![1], first, false));
        assert_eq!((batch.added, batch.acked), (2, 1), "the acknowledgement before the restart counts");
        let alive = (ended - added) + (batch.arrived - begun);
        assert!(alive >= Duration::from_millis(200) * 12, "timed out after {alive:?} alive");
        let batch = subscriber.settled_batch();
        assert_eq!((batch.messages.contains(&(3, 30)), batch.tick), (true, second));
        assert!(batch.messages.contains(&(u64::MAX, u64::MAX)), "{batch:?}");
        let batch = subscriber.settled_batch();
        assert_eq!((batch.ids(), &batch.attempts[..]), (vec![5], &[3][..]));
    }
}

#[test]
fn the_outbox_its_groups_and_delivery_counts_survive_a_kill() {
    let (_folder, journal) = folder();
    let mut sidecar = start(&journal, &[]);
    let mut audit = sidecar.connect().subscribed("audit");
    let mut settled = sidecar.connect().subscribed("settled");
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1], 1, 1)).added();
    let before = audit.batch();
    assert_eq!(settled.settled_batch().id, before.id);
    assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [LATE]);
    sidecar.kill();

    let sidecar = start(&journal, &[]);
    assert_eq!(sidecar.connect().ask(&frames::del(&[1])).outcomes(), [LATE]);
    let backlog = |name: &str| sidecar.group(name).map(|group| group.outbox_batches);
    assert_eq!([backlog("default"), backlog("audit"), backlog("settled")], [Some(1), Some(1), Some(0)]);
    for (group, delivery) in [("audit", 2), ("default", 1)] {
        let batch = sidecar.connect().subscribed(group).settled_batch();
        assert_eq!((batch.id, batch.delivery, batch.ids()), (before.id, delivery, vec![1]), "{group}");
        assert!(batch.age_ms >= before.age_ms, "{batch:?}");
    }

    let mut settled = sidecar.connect().subscribed("settled");
    sidecar.connect().ask(&frames::add(&[1], 1, 1)).added();
    let after = settled.batch();
    assert_eq!(after.ids(), [1]);
    assert!(after.epoch > before.epoch, "a new run has a new epoch, so no batch id comes twice");
}

#[test]
fn a_clock_that_is_set_back_between_two_processes_repeats_no_batch_id() {
    let (_folder, journal) = folder();
    let path = journal.to_str().unwrap();
    let flags = ["--tick", "200ms", "--journal", path];
    let mut epochs = Vec::new();
    for (offset, id) in [(0, 1), (-3_600, 2)] {
        let clock = FakeClock::new(Clock::Offset(offset));
        let mut sidecar = Sidecar::start_with_clock(&clock, &flags);
        let mut subscriber = sidecar.connect().subscribed("default");
        sidecar.connect().ask(&frames::add(&[id], 1, 1)).added();
        let batch = subscriber.settled_batch();
        assert_eq!(batch.ids(), [id]);
        assert!(batch.age_ms < 60_000, "{batch:?}");
        epochs.push((batch.epoch, batch.tick));
        sidecar.kill();
    }
    assert!(epochs[1] > epochs[0], "{epochs:?}");
}

#[test]
fn clients_have_time_to_come_back_after_a_restart() {
    let (_folder, journal) = folder();
    let mut sidecar = start(&journal, &[]);
    sidecar.connect().ask(&frames::add(&[1], 2, 1)).added();
    sidecar.terminate();
    let sidecar = start(&journal, &[]);
    let listening = Instant::now();
    // Its tick would be over 0.6 s after the start; a client that comes back after 1.5 s has its Ack in time.
    sleep_until(listening + Duration::from_millis(1_500));
    assert_eq!(sidecar.connect().ask(&frames::del(&[1])).outcomes(), [ACKED]);
}

#[test]
fn the_memory_of_late_fades_after_a_restart_too() {
    let (_folder, journal) = folder();
    let slots = ["--slots", "10"];
    let mut sidecar = start(&journal, &slots);
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&[1], 1, 1)).added();
    let decided = subscriber.settled_batch().tick;
    sidecar.terminate();

    let sidecar = start(&journal, &slots);
    let mut connection = sidecar.connect();
    assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [LATE]);
    wait_until("it is forgotten", || {
        let before = sidecar.pointer();
        let outcome = connection.ask(&frames::del(&[1])).outcomes()[0];
        let after = sidecar.pointer();
        assert!(outcome == LATE || after >= decided + 10, "forgotten at {after}, decided at {decided}");
        assert!(outcome == UNKNOWN || before <= decided + 12, "late at {before}, decided at {decided}");
        outcome == UNKNOWN
    });
}

#[test]
fn nothing_is_decided_once_nobody_is_heard_any_more() {
    let (_folder, journal) = folder();
    let mut sidecar = start(&journal, &["--tick", "1s"]);
    let ids: Vec<u64> = (1..=100).collect();
    let mut connection = sidecar.connect();
    let (deadline, _) = connection.ask(&frames::add(&ids, 2, 1)).added();
    // It neither reads nor closes, so the sidecar has patience with it when all others are gone.
    let silent = sidecar.connect();
    let expired_at = sidecar.wait_for_pointer(deadline) + Duration::from_secs(1);
    sleep_until(expired_at.checked_sub(Duration::from_millis(900)).unwrap());
    let took = sidecar.terminate();
    assert!(Instant::now() > expired_at, "the decision was due while it ended, which took {took:?}");
    sidecar.log().assert_names(&["100 messages in flight are kept"]);
    drop(silent);
    let sidecar = start(&journal, &["--tick", "1s"]);
    assert_eq!(sidecar.connect().ask(&frames::del(&ids)).outcomes(), [ACKED; 100]);
}

#[test]
fn a_journal_of_another_ring_is_refused_and_left_alone() {
    let (_folder, journal) = folder();
    let mut sidecar = start(&journal, &[]);
    sidecar.connect().ask(&frames::add(&[1], 15, 1)).added();
    sidecar.terminate();
    let path = journal.to_str().unwrap();
    let remedy = "--slots 15 --tick 200ms";
    let error = refused(&journal, &["--tick", "200ms", "--slots", "10"]);
    assert_names(&error, &[path, "15 slots", "10 slots", remedy]);
    assert_names(&refused(&journal, &["--tick", "100ms"]), &[path, "200ms ticks", "100ms ticks", remedy]);
    assert_eq!(start(&journal, &[]).status().rings[0].in_flight, 1, "the right ring takes it over");
}

#[test]
fn a_journal_is_of_one_sidecar_at_a_time() {
    let (_folder, journal) = folder();
    let mut first = start(&journal, &[]);
    first.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added();
    assert_names(
        &refused(&journal, &[]),
        &["another sidecar keeps its wheel in", journal.to_str().unwrap(), "--journal"],
    );
    first.kill();
    assert_eq!(start(&journal, &[]).status().rings[0].in_flight, 3, "a process that was killed holds no lock");
}

#[test]
fn damage_is_reported_with_its_place_and_costs_only_what_is_in_it() {
    let (_folder, journal) = folder();
    let mut sidecar = start(&journal, &[]);
    let mut connection = sidecar.connect();
    for id in 1..=50 {
        connection.ask(&frames::add(&[id], 15, 1)).added();
    }
    sidecar.kill();
    let segment = journal.join("log-00000001");
    let mut bytes = fs::read(&segment).unwrap();
    bytes[2_000] ^= 0x40;
    fs::write(&segment, bytes).unwrap();
    let sidecar = start(&journal, &[]);
    sidecar.log().assert_names(&["ERROR", "damaged", "log-00000001", "offset=", "bytes=", "messages=49"]);
    assert_eq!(sidecar.metrics().count("journal_damaged"), 1);
    let ids: Vec<u64> = (1..=50).collect();
    let frame = sidecar.connect().ask(&frames::del(&ids));
    let acked: Vec<u8> = frame.outcomes().iter().copied().filter(|outcome| *outcome == ACKED).collect();
    assert_eq!(acked.len(), 49, "each add was a write of its own");
}

#[test]
fn the_journal_is_for_its_user_only_and_no_symbolic_link_redirects_it() {
    let (folder, journal) = folder();
    let mut sidecar = start(&journal, &[]);
    sidecar.connect().ask(&frames::add(&[1], 12, 1)).added();
    sidecar.terminate();
    for file in fs::read_dir(&journal).unwrap() {
        let file = file.unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{file:?}");
    }
    assert_eq!(fs::metadata(&journal).unwrap().permissions().mode() & 0o777, 0o700);
    let victim = folder.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    for name in ["lock", "log-00000001", "log-00000077"] {
        let _ = fs::remove_file(journal.join(name));
        symlink(&victim, journal.join(name)).unwrap();
        assert_names(&refused(&journal, &[]), &["is a symbolic link: remove it", "--journal"]);
        fs::remove_file(journal.join(name)).unwrap();
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(Command::new("mkfifo").arg(journal.join("log-00000078")).status().unwrap().success());
    assert_names(&refused(&journal, &[]), &["is not a file of this user", "--journal"]);
}

#[test]
fn a_place_where_no_journal_can_be_kept_is_refused_at_the_start() {
    let (folder, _) = folder();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    assert_names(&refused(&file.join("journal"), &[]), &[file.to_str().unwrap(), "--journal"]);
}

/// The parts of a segment of the version before this one, with their offsets. Zeros are between them.
const EARLIER_VERSION: [(usize, &[u8]); 5] = [
    (0, b"ackwheel log   2\x01\x0f\x01\x00\x94\xd5\x93\x9f"),
    (24, b"\xa24P"),
    (76, b"\xdf%\xbe\x9b\x01\x94\xd5\x93\x9f\xa24\x01\xa6\xf9\xac\xd8\x06\x01\x96\xd5\x93\x9f\xa24"),
    (100, b"\x0f\x99\xff\x80\x94\x0c"),
    (140, b"Ja\x83\xdf\x03\x0a\x00\x00\x00\x08\x07default"),
];

#[test]
fn a_file_that_is_no_segment_of_this_version_is_refused_and_left_alone() {
    let (_folder, journal) = folder();
    let segment = journal.join("log-00000001");
    fs::create_dir(&journal).unwrap();
    let mut earlier = [0; 159];
    for (at, bytes) in EARLIER_VERSION {
        earlier[at..at + bytes.len()].copy_from_slice(bytes);
    }
    for content in [&earlier[..], b"ackwheel log   1", b"what another program wrote"] {
        fs::write(&segment, content).unwrap();
        fs::set_permissions(&segment, fs::Permissions::from_mode(0o600)).unwrap();
        assert_names(&refused(&journal, &[]), &[segment.to_str().unwrap(), "version", "--journal"]);
        assert_eq!(fs::read(&segment).unwrap(), content);
    }
}

#[test]
fn a_segment_whose_beginning_is_lost_keeps_the_rest() {
    let (_folder, journal) = folder();
    let mut sidecar = start(&journal, &[]);
    let mut connection = sidecar.connect();
    for id in 1..=50 {
        connection.ask(&frames::add(&[id], 15, 1)).added();
    }
    sidecar.kill();
    let segment = journal.join("log-00000001");
    let mut bytes = fs::read(&segment).unwrap();
    bytes[..1_000].fill(0);
    fs::write(&segment, bytes).unwrap();
    let sidecar = start(&journal, &[]);
    sidecar.log().assert_names(&["ERROR", "damaged", "log-00000001"]);
    let ids: Vec<u64> = (1..=50).collect();
    let frame = sidecar.connect().ask(&frames::del(&ids));
    let kept: Vec<u8> = frame.outcomes().iter().copied().filter(|outcome| *outcome == ACKED).collect();
    assert!((20..45).contains(&kept.len()), "{} of 50 were kept", kept.len());
}
