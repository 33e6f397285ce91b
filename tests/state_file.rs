//! With `--state` a planned restart loses nothing; a file that does not fit is refused and left alone.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::frames::{self, ACKED, LATE, UNKNOWN};
use crate::support::process::{Run, assert_names, program};
use crate::support::sidecar::{Sidecar, serve};
use crate::support::{sleep_until, wait_until};

fn start(state: &Path, more: &[&str]) -> Sidecar {
    let tick: &[&str] = if more.contains(&"--tick") { &[] } else { &["--tick", "200ms"] };
    Sidecar::start(&[tick, &["--state", state.to_str().unwrap()], more].concat())
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    (folder, state)
}

#[test]
fn messages_in_flight_and_their_deadlines_survive_a_restart() {
    let (_folder, state) = folder();
    let mut sidecar = start(&state, &[]);
    let mut connection = sidecar.connect();
    let added = Instant::now();
    let (first, _) = connection.ask(&frames::add(&[1, 2], 12, 1)).added();
    let (second, _) = connection.ask(&frames::add_pairs(&[(3, 30), (u64::MAX, u64::MAX)], 15)).added();
    connection.ask(&frames::add(&[5], 12, 200)).added();
    assert_eq!(connection.ask(&frames::del(&[2])).outcomes(), [ACKED]);
    let pointer = sidecar.pointer();
    sidecar.terminate();
    let ended = Instant::now();
    assert!(state.exists());
    assert_names(&sidecar.log().text(), &["4 messages in flight are kept"]);

    let begun = Instant::now();
    let sidecar = start(&state, &[]);
    assert!(!state.exists(), "a file that was taken over is gone, so that a crash cannot bring it back");
    assert_names(&sidecar.log().text(), &["taken over", "messages=4"]);
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

#[test]
fn clients_have_time_to_come_back_after_a_restart() {
    let (_folder, state) = folder();
    let mut sidecar = start(&state, &[]);
    sidecar.connect().ask(&frames::add(&[1], 2, 1)).added();
    sidecar.terminate();
    let sidecar = start(&state, &[]);
    let listening = Instant::now();
    // Its tick would be over 0.6 s after the start; a client that comes back after 1.5 s has its Ack in time.
    sleep_until(listening + Duration::from_millis(1_500));
    assert_eq!(sidecar.connect().ask(&frames::del(&[1])).outcomes(), [ACKED]);
}

#[test]
fn the_next_sidecar_reports_one_that_was_killed() {
    let (_folder, state) = folder();
    let mut sidecar = start(&state, &[]);
    sidecar.connect().ask(&frames::add(&[1], 15, 1)).added();
    let words = "ended without a drain";
    let lost = |sidecar: &Sidecar| sidecar.metrics().count("memory_lost");
    assert!(!sidecar.log().text().contains(words), "there was none before");
    assert_eq!(lost(&sidecar), 0);
    sidecar.kill();
    let mut sidecar = start(&state, &[]);
    assert_names(&sidecar.log().text(), &["ERROR", words, state.to_str().unwrap()]);
    assert_eq!(lost(&sidecar), 1);
    sidecar.terminate();
    let mut sidecar = start(&state, &[]);
    assert!(!sidecar.log().text().contains(words), "this one drained");
    assert_eq!(lost(&sidecar), 0);
    // Another number of slots: what was kept is moved away by somebody who knows.
    sidecar.terminate();
    fs::remove_file(&state).unwrap();
    assert_eq!(lost(&start(&state, &["--slots", "20"])), 0);
}

#[test]
fn a_file_that_may_not_grow_is_no_end_of_the_process() {
    let (_folder, state) = folder();
    let mut limited = Command::new("/bin/sh");
    limited.args(["-c", "ulimit -f 8; exec \"$@\"", "sh"]);
    let serve = serve(&["--state", state.to_str().unwrap()]);
    limited.arg(serve.get_program()).args(serve.get_args());
    limited.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut sidecar = Sidecar::spawn(&mut limited);
    sidecar.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added();
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.signal(rustix::process::Signal::TERM);
    let batch = subscriber.batch();
    assert_eq!((batch.ids(), batch.drained), (vec![1, 2, 3], true));
    subscriber.ask(&frames::batch_ack(&[batch.id]));
    assert!(sidecar.exit().code().is_some(), "no signal ended it");
    assert_names(&sidecar.log().whole(), &["ERROR", "cannot be kept", "delivered now"]);
}

#[test]
fn the_outbox_its_groups_and_the_memory_of_late_survive_a_restart() {
    let (_folder, state) = folder();
    let mut sidecar = start(&state, &[]);
    let mut audit = sidecar.connect().subscribed("audit");
    let mut settled = sidecar.connect().subscribed("settled");
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1], 1, 1)).added();
    let before = audit.batch();
    assert_eq!(settled.settled_batch().id, before.id);
    assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [LATE]);
    sidecar.terminate();

    let sidecar = start(&state, &[]);
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
fn the_memory_of_late_fades_after_a_restart_too() {
    let (_folder, state) = folder();
    let slots = ["--slots", "10"];
    let mut sidecar = start(&state, &slots);
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&[1], 1, 1)).added();
    let decided = subscriber.settled_batch().tick;
    sidecar.terminate();

    let sidecar = start(&state, &slots);
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
fn a_drain_with_a_state_file_hands_nothing_out_before_its_time() {
    let (_folder, state) = folder();
    let mut sidecar = start(&state, &[]);
    let mut subscriber = sidecar.connect().subscribed("default");
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1], 15, 1)).added();
    sidecar.terminate();
    let go_away = subscriber.receive().expect("a GoAway");
    assert_eq!(go_away.kind, frames::GO_AWAY);
    subscriber.assert_closed();
    let sidecar = start(&state, &[]);
    let batch = sidecar.connect().subscribed("default").settled_batch();
    assert_eq!((batch.ids(), batch.drained, batch.delivery), (vec![1], false, 1));
}

#[test]
fn nothing_is_decided_once_nobody_is_heard_any_more() {
    let (_folder, state) = folder();
    let mut sidecar = start(&state, &["--tick", "1s"]);
    let ids: Vec<u64> = (1..=100).collect();
    let mut connection = sidecar.connect();
    let (deadline, _) = connection.ask(&frames::add(&ids, 2, 1)).added();
    // It neither reads nor closes, so the sidecar has patience with it when all others are gone.
    let silent = sidecar.connect();
    let expired_at = sidecar.wait_for_pointer(deadline) + Duration::from_secs(1);
    sleep_until(expired_at.checked_sub(Duration::from_millis(900)).unwrap());
    let took = sidecar.terminate();
    assert!(Instant::now() > expired_at, "the decision was due while it ended, which took {took:?}");
    assert_names(&sidecar.log().text(), &["100 messages in flight are kept"]);
    drop(silent);
    let sidecar = start(&state, &["--tick", "1s"]);
    assert_eq!(sidecar.connect().ask(&frames::del(&ids)).outcomes(), [ACKED; 100]);
}

/// A state file with one message in flight.
fn write_state(state: &Path) -> Vec<u8> {
    let mut sidecar = start(state, &[]);
    sidecar.connect().ask(&frames::add(&[1], 15, 1)).added();
    sidecar.terminate();
    fs::read(state).unwrap()
}

fn assert_refused_and_untouched(state: &Path, flags: &[&str], words: &[&str]) {
    let before = fs::read(state).unwrap();
    let mut command = program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    let run = Run::of(command.arg("--state").arg(state).args(flags));
    assert!([1, 64].contains(&run.code), "{run:?}");
    let path = state.to_str().unwrap();
    assert_names(&run.stderr, &[&[path], words].concat());
    assert_eq!(fs::read(state).unwrap(), before, "it is left as it was");
}

/// The most memory that the process has had so far, in bytes; `None` once it has ended.
fn peak_bytes(sidecar: &Sidecar) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", sidecar.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1_024)
}

#[test]
fn a_wheel_is_kept_where_there_is_no_memory_for_a_second_one() {
    let (_folder, state) = folder();
    let mut sidecar = start(&state, &["--tick", "1s"]);
    let mut connection = sidecar.connect();
    let ids: Vec<u64> = (1..=1_000_000).map(|id: u64| id.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    for ids in ids.chunks(10_000) {
        connection.ask(&frames::add(ids, 15, 1)).added();
    }
    let before = peak_bytes(&sidecar).expect("it serves");
    sidecar.signal(rustix::process::Signal::TERM);
    let mut most = before;
    while sidecar.exited().is_none() {
        most = peak_bytes(&sidecar).unwrap_or(most);
    }
    assert_names(&sidecar.log().whole(), &["1000000 messages in flight are kept"]);
    // A list of the messages would be 32 MB, and the bytes of the file are 29 MB.
    assert!(most < before + (8 << 20), "{before} bytes became {most}");
}

#[test]
fn a_state_file_of_another_ring_is_refused_and_left_alone() {
    let (_folder, state) = folder();
    write_state(&state);
    let remedy = "--slots 15 --tick 200ms";
    assert_refused_and_untouched(&state, &["--tick", "200ms", "--slots", "10"], &["15 slots", "10 slots", remedy]);
    assert_refused_and_untouched(&state, &["--tick", "100ms"], &["200ms ticks", "100ms ticks", remedy]);
    assert_eq!(start(&state, &[]).status().rings[0].in_flight, 1, "the right ring takes it over");
}

#[test]
fn a_damaged_state_file_is_refused_and_left_alone() {
    let (_folder, state) = folder();
    let whole = write_state(&state);
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        bytes
    };
    let longer = [&whole[..], &[0]].concat();
    let mut damaged = vec![Vec::new(), b"no state at all".to_vec(), whole[..whole.len() - 1].to_vec(), longer];
    damaged.extend([0, 17, 24, 30, whole.len() / 2, whole.len() - 1].map(flipped));
    for bytes in damaged {
        fs::write(&state, &bytes).unwrap();
        assert_refused_and_untouched(&state, &["--tick", "200ms"], &["not a whole state file", "--state"]);
    }
    fs::write(&state, &whole).unwrap();
    assert_eq!(start(&state, &[]).status().rings[0].in_flight, 1);
}

#[test]
fn a_state_file_is_of_one_sidecar_at_a_time() {
    let (_folder, state) = folder();
    let mut first = start(&state, &[]);
    first.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added();
    let mut second = program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    let refused = Run::of(second.arg("--state").arg(&state));
    assert_names(refused.error(1), &["another sidecar keeps its wheel in", state.to_str().unwrap(), "--state"]);
    first.terminate();
    assert_eq!(start(&state, &[]).status().rings[0].in_flight, 3);
    // One that is killed holds nothing up.
    assert_eq!(start(&state, &[]).status().rings[0].in_flight, 0);
}

/// A sidecar whose state file cannot be written any more, with three messages in flight.
fn start_in_a_folder_that_goes() -> (tempfile::TempDir, Sidecar) {
    let (folder, _) = folder();
    let kept = folder.path().join("kept");
    fs::create_dir(&kept).unwrap();
    let sidecar = start(&kept.join("state"), &[]);
    assert_names(&sidecar.log().text(), &["there is no state file", "begins empty"]);
    sidecar.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added();
    fs::remove_dir_all(&kept).unwrap();
    (folder, sidecar)
}

#[test]
fn a_state_that_cannot_be_kept_is_delivered_and_does_not_come_back() {
    let (folder, mut sidecar) = start_in_a_folder_that_goes();
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.signal(rustix::process::Signal::TERM);
    let batch = subscriber.batch();
    assert_eq!((batch.ids(), batch.drained), (vec![1, 2, 3], true));
    // Now it can be: groups are kept, and what was delivered is not in flight any more.
    let kept = folder.path().join("kept");
    fs::create_dir(&kept).unwrap();
    subscriber.ask(&frames::batch_ack(&[batch.id]));
    assert_eq!(sidecar.exit().code(), Some(0));
    assert_names(
        &sidecar.log().whole(),
        &["ERROR", "cannot be kept", "delivered now", "--state", "0 messages in flight"],
    );

    let sidecar = start(&kept.join("state"), &[]);
    let mut connection = sidecar.connect();
    assert_eq!(connection.ask(&frames::del(&[1, 2, 3])).outcomes(), [UNKNOWN; 3]);
    assert_eq!(sidecar.status().rings[0].in_flight, 0);
}

#[test]
fn a_state_that_cannot_be_kept_and_that_nobody_takes_is_an_error_that_says_what_is_lost() {
    let (_folder, mut sidecar) = start_in_a_folder_that_goes();
    sidecar.signal(rustix::process::Signal::TERM);
    assert_eq!(sidecar.exit().code(), Some(1));
    assert_names(&sidecar.log().whole(), &["ERROR", "group=default batches=1", "could not be kept", "--state"]);
}

#[test]
fn a_state_path_that_is_no_file_is_no_state() {
    // Read to its end it would be read for ever.
    let mut command =
        program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--state", "/dev/full"]);
    assert_names(Run::of(&mut command).error(1), &["/dev/full", "not a file", "--state"]);
    // GroupOptions a pipe waits for its reader.
    for ending in ["lock", "new"] {
        let (folder, state) = folder();
        let made = Command::new("mkfifo").arg(folder.path().join(format!("state.{ending}"))).status().unwrap();
        assert!(made.success());
        let mut command = program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--state"]);
        let run = Run::of(command.arg(&state));
        assert_names(run.error(1), &["write the state file", state.to_str().unwrap(), "--state"]);
    }
}

#[test]
fn a_place_where_no_state_can_be_kept_is_refused_at_the_start() {
    let (folder, _) = folder();
    let nowhere = folder.path().join("no/such/folder/state");
    let mut command = program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--state"]);
    let run = Run::of(command.arg(&nowhere));
    assert!([1, 64].contains(&run.code), "{run:?}");
    assert_names(&run.stderr, &[nowhere.to_str().unwrap(), "write", "--state"]);
}

#[test]
fn the_state_is_for_its_user_only_and_no_symbolic_link_redirects_it() {
    for ending in ["lock", "new"] {
        let (folder, state) = folder();
        let victim = folder.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, folder.path().join(format!("state.{ending}"))).unwrap();
        let mut command = program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--state"]);
        assert_names(Run::of(command.arg(&state)).error(1), &["is a symbolic link: remove it", "--state"]);
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    }
    let (linked, state) = folder();
    fs::write(linked.path().join("victim"), "precious").unwrap();
    symlink(linked.path().join("victim"), &state).unwrap();
    let mut command = program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--state"]);
    assert_names(Run::of(command.arg(&state)).error(1), &["cannot read the state file", "it is a symbolic link"]);
    let (_folder, state) = folder();
    let mut sidecar = start(&state, &[]);
    sidecar.connect().ask(&frames::add(&[1], 12, 1)).added();
    sidecar.terminate();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&state), mode(&state.with_extension("lock"))), (0o600, 0o600));
    fs::set_permissions(&state, fs::Permissions::from_mode(0o644)).unwrap();
    let sidecar = start(&state, &[]);
    assert!(sidecar.log().line("other users can read or write the state file").is_some());
}
