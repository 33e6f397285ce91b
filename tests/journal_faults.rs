//! A journal on a disk that is full, frozen, read-only or failing, and kills at the worst moments.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::journal::{folder, refused, start};
use crate::support::disk::Disk;
use crate::support::frames::{self, ACKED, UNKNOWN};
use crate::support::injected_fault::InjectedFault;
use crate::support::process::{Process, assert_names};
use crate::support::raw::Raw;
use crate::support::sidecar::serve;
use crate::support::{sleep_until, wait_until};

/// Whether a sidecar refuses to add a message because of its journal.
fn is_refused(connection: &mut Raw, id: u64) -> bool {
    connection.ask(&frames::add(&[id], 15, 1)).kind == frames::ERROR
}

#[test]
fn a_frozen_disk_delays_answers_but_no_ping_and_reports_nobody() {
    let Some(disk) = Disk::mount() else { return };
    let journal = disk.path().join("journal");
    let sidecar = start(&journal, &[]);
    let (mut adds, mut pings) = (sidecar.connect(), sidecar.connect());
    adds.ask(&frames::add(&[1, 2], 5, 1)).added();
    let frozen = disk.frozen();
    let (frozen_at, pointer) = (Instant::now(), sidecar.pointer());
    let correlation = adds.request(&frames::del(&[1]));
    let mut others = sidecar.connect();
    std::thread::scope(|scope| {
        let answered = scope.spawn(move || (adds.answer(correlation).outcomes().to_vec(), Instant::now()));
        sleep_until(frozen_at + Duration::from_millis(700));
        assert!(is_refused(&mut others, 3), "the disk has not answered for half a second");
        let mut longest = Duration::ZERO;
        while frozen_at.elapsed() < Duration::from_secs(5) {
            let begun = Instant::now();
            pings.ask(&frames::ping(b"1234"));
            longest = longest.max(begun.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(longest < Duration::from_millis(50), "a Ping took {longest:?}");
        assert!(sidecar.pointer() <= pointer + 1, "no tick expires before the one before it is written");
        let thawed_at = Instant::now();
        drop(frozen);
        let (outcomes, answered_at) = answered.join().unwrap();
        assert_eq!(outcomes, [ACKED]);
        assert!(answered_at > thawed_at, "the Ack is not answered before it is written");
    });
    // Five ticks of 200 ms were over long ago; the freeze shifted the deadline.
    let batch = sidecar.connect().subscribed("default").settled_batch();
    assert_eq!(batch.ids(), [2]);
    assert!(batch.arrived.duration_since(frozen_at) > Duration::from_secs(5));
    let mut again = sidecar.connect();
    wait_until("adds are accepted again", || !is_refused(&mut again, 3));
}

/// Fills a disk with a file, and returns its path.
fn fill(disk: &Disk) -> PathBuf {
    let ballast = disk.path().join("ballast");
    let filled =
        Command::new("dd").args(["if=/dev/zero", "bs=1M"]).arg(format!("of={}", ballast.display())).output();
    assert!(!filled.unwrap().status.success(), "the disk is full");
    ballast
}

#[test]
fn a_full_disk_refuses_adds_and_counts_acks_until_there_is_room() {
    let Some(disk) = Disk::mount_of("128M") else { return };
    let journal = disk.path().join("journal");
    let mut sidecar = start(&journal, &["--tick", "2s"]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&(1..=1_000).collect::<Vec<_>>(), 15, 1)).added();
    let ballast = fill(&disk);
    // Adds go on until the reserved room is used up.
    let mut next = 10_000;
    wait_until("adds are refused", || {
        let ids: Vec<u64> = (next..next + 10_000).collect();
        next += 10_000;
        connection.ask(&frames::add(&ids, 15, 1)).kind == frames::ERROR
    });
    assert_eq!(connection.ask(&frames::del(&(1..=1_000).collect::<Vec<_>>())).outcomes(), [ACKED; 1_000]);
    assert_eq!(sidecar.metrics().count("journal_refusing"), 1);
    fs::remove_file(&ballast).unwrap();
    wait_until("adds are accepted again", || !is_refused(&mut connection, 5));
    assert_eq!(sidecar.metrics().count("journal_errors_total"), 0);
    sidecar.kill();
    let sidecar = start(&journal, &["--tick", "2s"]);
    assert_eq!(
        sidecar.connect().ask(&frames::del(&[1, 500, 1_000, 5])).outcomes(),
        [UNKNOWN, UNKNOWN, UNKNOWN, ACKED]
    );
}

#[test]
fn a_disk_that_is_smaller_than_the_usual_log_is_enough() {
    let Some(disk) = Disk::mount_of("64M") else { return };
    let (journal, flags) = (disk.path().join("journal"), ["--tick", "30s"]);
    let mut sidecar = start(&journal, &flags);
    let mut connection = sidecar.connect();
    let (mut random, mut kills) = (SmallRng::seed_from_u64(64), 0);
    // Each pair of requests takes 180 kB of the log, so these take the disk nearly three times.
    for part in 0..1_000 {
        let ids: Vec<u64> = (part * 10_000..(part + 1) * 10_000).collect();
        let add = frames::add(&ids, 15, 1);
        if connection.ask(&add).kind == frames::ERROR {
            // The disk is full: a checkpoint begins within 100 ms.
            sleep_until(Instant::now() + Duration::from_millis(random.random_range(0..200)));
            assert_eq!(sidecar.metrics().count("journal_errors_total"), 0);
            sidecar.kill();
            sidecar = start(&journal, &flags);
            connection = sidecar.connect();
            kills += 1;
            wait_until("adds are accepted", || connection.ask(&add).kind != frames::ERROR);
        }
        assert_eq!(connection.ask(&frames::del(&ids[1..])).outcomes(), [ACKED; 9_999]);
    }
    assert!(kills > 0, "the disk was full at times");
    assert_eq!(sidecar.metrics().count("journal_errors_total"), 0);
    sidecar.kill();
    let sidecar = start(&journal, &flags);
    let left: Vec<u64> = (0..1_000).map(|part| part * 10_000).collect();
    assert_eq!(sidecar.connect().ask(&frames::del(&left)).outcomes(), [ACKED; 1_000]);
    assert_eq!(sidecar.status().rings[0].in_flight, 0);
}

#[test]
fn a_sidecar_that_is_killed_on_a_full_disk_starts_again_and_counts_acks() {
    let Some(disk) = Disk::mount_of("160M") else { return };
    let journal = disk.path().join("journal");
    let mut sidecar = start(&journal, &["--tick", "2s"]);
    sidecar.connect().ask(&frames::add(&(1..=10).collect::<Vec<_>>(), 15, 1)).added();
    fill(&disk);
    for id in 1..=4 {
        sidecar.kill();
        sidecar = start(&journal, &["--tick", "2s"]);
        assert_eq!(sidecar.connect().ask(&frames::del(&[id])).outcomes(), [ACKED], "kill {id}");
    }
    sidecar.kill();
    for file in fs::read_dir(&journal).unwrap().map(Result::unwrap) {
        if file.file_name().to_str().unwrap().starts_with("spare-") {
            fs::remove_file(file.path()).unwrap();
        }
    }
    let ballast = fill(&disk);
    sidecar = start(&journal, &["--tick", "2s"]);
    let mut connection = sidecar.connect();
    let mut next = 100;
    wait_until("adds are refused", || {
        next += 1;
        is_refused(&mut connection, next)
    });
    assert_eq!(connection.ask(&frames::del(&[5])).outcomes(), [ACKED]);
    fs::remove_file(&ballast).unwrap();
    wait_until("adds are accepted again", || !is_refused(&mut connection, 12));
    sidecar.kill();
    let sidecar = start(&journal, &["--tick", "2s"]);
    assert_eq!(sidecar.connect().ask(&frames::del(&[4, 5, 10, 12])).outcomes(), [UNKNOWN, UNKNOWN, ACKED, ACKED]);
    assert_eq!(sidecar.metrics().count("journal_errors_total"), 0);
}

#[test]
fn a_full_disk_is_no_failure_where_reserving_room_again_fails() {
    let Some(disk) = Disk::mount_of("128M") else { return };
    let journal = disk.path().join("journal");
    let mut sidecar = start(&journal, &["--tick", "2s"]);
    let mut connection = sidecar.connect();
    // XFS refuses to reserve room on a full disk, also where it is reserved.
    let Some(failing) = InjectedFault::begin(sidecar.id(), "fallocate", "error=ENOSPC") else { return };
    let mut next = 10_000;
    wait_until("adds are refused", || {
        let ids: Vec<u64> = (next..next + 10_000).collect();
        next += 10_000;
        connection.ask(&frames::add(&ids, 15, 1)).kind == frames::ERROR
    });
    assert_eq!(connection.ask(&frames::del(&[10_000])).outcomes(), [ACKED]);
    drop(failing);
    assert_eq!(sidecar.metrics().count("journal_errors_total"), 0);
    sidecar.kill();
    let sidecar = start(&journal, &["--tick", "2s"]);
    assert_eq!(sidecar.connect().ask(&frames::del(&[10_000, 10_001])).outcomes(), [UNKNOWN, ACKED]);
}

#[test]
fn a_drain_while_the_disk_is_slow_keeps_what_is_in_flight() {
    let Some(disk) = Disk::mount() else { return };
    let journal = disk.path().join("journal");
    let mut sidecar = start(&journal, &["--tick", "2s"]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2], 15, 1)).added();
    let (frozen, frozen_at) = (disk.frozen(), Instant::now());
    let _unanswered = connection.request(&frames::del(&[1]));
    let mut others = sidecar.connect();
    sleep_until(frozen_at + Duration::from_millis(700));
    assert!(is_refused(&mut others, 3), "the disk has not answered for half a second");
    sidecar.signal(Signal::TERM);
    sidecar.log().assert_names(&["draining: new messages are refused"]);
    drop(frozen);
    assert_eq!(sidecar.exit().code(), Some(0));
    sidecar.log().assert_names(&["1 messages in flight are kept"]);
    let sidecar = start(&journal, &["--tick", "2s"]);
    assert_eq!(sidecar.connect().ask(&frames::del(&[1, 2])).outcomes(), [UNKNOWN, ACKED]);
}

/// Has system calls of the journal fail with an error. Adds must be refused, Acks must count, and once the calls succeed
/// again, everything is as before without a restart.
fn outlives(calls: &str, error: &str, flags: &[&str]) {
    let (_folder, journal) = folder();
    let mut sidecar = start(&journal, &[&["--tick", "2s"], flags].concat());
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&(1..=1_000).collect::<Vec<_>>(), 15, 1)).added();
    let Some(failing) = InjectedFault::begin(sidecar.id(), calls, &format!("error={error}")) else { return };
    let mut next = 10_000;
    wait_until("adds are refused", || {
        next += 1;
        is_refused(&mut connection, next)
    });
    let refusal = connection.ask(&frames::add(&[2_000], 15, 1));
    assert_names(refusal.text(), &["journal", "disk"]);
    let half: Vec<u64> = (1..=500).collect();
    assert_eq!(connection.ask(&frames::del(&half)).outcomes(), [ACKED; 500], "{error}");
    assert_eq!(connection.ask(&frames::ping(b"on")).body, b"on");
    wait_until("the failure counts", || sidecar.metrics().count("journal_errors_total") > 0);
    assert_eq!(sidecar.metrics().count("journal_refusing"), 1, "{error}");
    sidecar.log().assert_names(&["the journal could not be written"]);
    drop(failing);
    wait_until("adds are accepted again", || !is_refused(&mut connection, 5_000));
    assert_eq!(sidecar.metrics().count("journal_refusing"), 0);
    sidecar.kill();
    let sidecar = start(&journal, &[&["--tick", "2s"], flags].concat());
    let mut connection = sidecar.connect();
    assert_eq!(connection.ask(&frames::del(&half)).outcomes(), [UNKNOWN; 500], "{error}");
    let rest: Vec<u64> = (501..=1_000).chain([5_000]).collect();
    assert_eq!(connection.ask(&frames::del(&rest)).outcomes(), [ACKED; 501], "{error}");
    assert_eq!(sidecar.metrics().count("messages_timed_out_total"), 0, "{error}");
}

#[test]
fn a_failing_disk_refuses_adds_and_counts_acks_until_it_works_again() {
    outlives("pwrite64", "EIO", &[]);
}

#[test]
fn a_disk_that_fails_to_sync_refuses_adds_and_counts_acks_until_it_works_again() {
    outlives("fdatasync", "EIO", &["--journal-sync", "always"]);
    outlives("fdatasync", "EIO", &["--journal-sync", "50ms"]);
}

#[test]
fn a_disk_that_becomes_read_only_refuses_adds_and_counts_acks_until_it_is_writable() {
    outlives("pwrite64,fallocate,?rename,?renameat,?renameat2,?unlink,unlinkat", "EROFS", &[]);
}

#[test]
fn a_disk_that_is_read_only_at_the_start_is_named() {
    let Some(disk) = Disk::mount_of("64M") else { return };
    let journal = disk.path().join("journal");
    start(&journal, &[]).terminate();
    disk.make_read_only();
    assert_names(&refused(&journal, &[]), &[journal.to_str().unwrap(), "Read-only file system"]);
}

/// The number of messages in a request.
const PART: u64 = 30_000;

fn ids_of(part: u64) -> Vec<u64> {
    (part * PART..(part + 1) * PART).collect()
}

/// Re-arms some messages again and again, and acknowledges others, until the sidecar is killed. Returns how many Acks of
/// `acked` may have been applied and how many were answered.
fn load(mut connection: Raw, rearmed: &[u64], acked: &[u64]) -> (usize, usize) {
    let rearm = frames::add(rearmed, 15, 1);
    for (number, id) in acked.iter().enumerate() {
        if connection.ask_until_killed(&rearm).is_none() {
            return (number, number);
        }
        match connection.ask_until_killed(&frames::del(&[*id])) {
            Some(answer) => assert_eq!(answer.outcomes(), [ACKED]),
            None => return (number + 1, number),
        }
    }
    panic!("it was to be killed before");
}

/// The length of the log at which a checkpoint begins.
const CHECKPOINT_AT: u64 = 64 * 1_024 * 1_024;

#[test]
fn no_answer_waits_for_a_slow_sync() {
    for flags in [&[][..], &["--journal-sync", "50ms"]] {
        let (_folder, journal) = folder();
        let sidecar = start(&journal, flags);
        let mut connection = sidecar.connect();
        let Some(_slow) = InjectedFault::begin(sidecar.id(), "fdatasync,fsync", "delay_enter=1000000") else {
            return;
        };
        let mut longest = Duration::ZERO;
        let mut rearm = |ids: &[u64]| {
            let begun = Instant::now();
            connection.ask(&frames::add(ids, 15, 1)).added();
            longest = longest.max(begun.elapsed());
        };
        let log_bytes = || sidecar.metrics().count("journal_log_bytes");
        rearm(&ids_of(0));
        wait_until("a checkpoint is due", || {
            rearm(&ids_of(0));
            log_bytes() >= CHECKPOINT_AT
        });
        let due_at = Instant::now();
        wait_until("a checkpoint is complete", || {
            rearm(&[1]);
            log_bytes() < CHECKPOINT_AT
        });
        assert!(due_at.elapsed() > Duration::from_secs(1), "all of it was synced before");
        let metrics = sidecar.metrics();
        let (seconds, syncs) = (metrics.value("journal_sync_seconds_total"), metrics.value("journal_syncs_total"));
        assert!(syncs > 0.0 && seconds > syncs, "{flags:?}: {syncs} syncs in {seconds} s");
        assert!(longest < Duration::from_millis(500), "{flags:?}: an answer took {longest:?}");
    }
}

#[test]
fn kills_during_checkpoints_and_recoveries_lose_nothing() {
    let (_folder, journal) = folder();
    let flags = ["--tick", "30s"];
    let mut sidecar = start(&journal, &flags);
    let mut connection = sidecar.connect();
    for part in 0..20 {
        connection.ask(&frames::add(&ids_of(part), 15, 1)).added();
    }
    let acked: Vec<u64> = ids_of(19);
    let (mut random, mut next) = (SmallRng::seed_from_u64(44), 0);
    for _ in 0..4 {
        let connection = sidecar.connect();
        let (applied, answered) = std::thread::scope(|scope| {
            let loader = scope.spawn(|| load(connection, &ids_of(0), &acked[next..]));
            // It begins within 100 ms.
            wait_until("a checkpoint is due", || sidecar.metrics().count("journal_log_bytes") >= CHECKPOINT_AT);
            sleep_until(Instant::now() + Duration::from_millis(random.random_range(0..250)));
            sidecar.kill();
            loader.join().unwrap()
        });
        for _ in 0..3 {
            let mut recovering =
                Process::spawn(&mut serve(&[&flags[..], &["--journal", journal.to_str().unwrap()]].concat()));
            sleep_until(Instant::now() + Duration::from_millis(random.random_range(0..150)));
            recovering.kill();
        }
        sidecar = start(&journal, &flags);
        let in_flight = usize::try_from(sidecar.status().rings[0].in_flight).unwrap();
        let left = 20 * ids_of(0).len() - next;
        assert!((left - applied..=left - answered).contains(&in_flight), "{in_flight} of {left}");
        next = 20 * ids_of(0).len() - in_flight;
        assert_eq!(sidecar.metrics().count("journal_damaged"), 0);
    }
    assert!(next > 0, "something was acknowledged");
    let mut connection = sidecar.connect();
    assert_eq!(connection.ask(&frames::del(&acked[..next])).outcomes(), vec![UNKNOWN; next]);
    for part in 0..19 {
        assert!(connection.ask(&frames::del(&ids_of(part))).outcomes().iter().all(|outcome| *outcome == ACKED));
    }
    let files = fs::read_dir(&journal).unwrap().count();
    assert!(files < 20, "{files} files: checkpoints were complete, and what they replaced was used again");
}
