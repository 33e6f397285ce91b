//! A container limits memory and processes. The sidecar follows the limit of memory, and says why it has no thread.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio, id};

use crate::support::frames;
use crate::support::process::{Run, assert_names, program};
use crate::support::sidecar::{Sidecar, serve};
use crate::support::skipped::skip;

/// A cgroup with a limit, removed with its test.
struct Group {
    folder: PathBuf,
}

impl Group {
    /// Makes a group with this limit of memory; none where the machine does not allow that.
    fn with_memory(name: &str, bytes: u64) -> Option<Group> {
        let parents = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        let make = |(parent, file): (&str, &str)| {
            let group = Group { folder: Path::new(parent).join(format!("ackwheel-{name}-{}", id())) };
            fs::create_dir(&group.folder).ok()?;
            let is_limited =
                group.folder.join(file).exists() && fs::write(group.folder.join(file), bytes.to_string()).is_ok();
            is_limited.then_some(group)
        };
        let group = parents.into_iter().find_map(make);
        if group.is_none() {
            skip("a limit of memory: making a cgroup is not permitted here");
        }
        group
    }

    /// The same command, run in this group.
    fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("/bin/sh");
        inside.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.folder);
        inside.arg(command.get_program()).args(command.get_args());
        inside.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        inside
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // It has processes until they have ended.
        let _ = fs::remove_dir(&self.folder);
    }
}

const HUNDRED_MEBIBYTES: u64 = 100 * 1_024 * 1_024;

#[test]
fn without_a_limit_of_its_own_the_sidecar_chooses_one_that_fits_into_the_container() {
    let Some(group) = Group::with_memory("fits", HUNDRED_MEBIBYTES) else { return };
    let mut sidecar = Sidecar::spawn(&mut group.inside(&serve(&["--slots", "3600"])));
    let log = sidecar.log().text();
    let line = log.lines().find(|line| line.contains("--max-in-flight is ")).unwrap_or_else(|| panic!("{log}"));
    assert_names(line, &["INFO", "in place of 4000000", "may use 100 MiB of memory"]);
    assert!(!log.contains("WARN"), "{log}");
    let limit = sidecar.metrics().count("max_in_flight");
    assert!((200_000..300_000).contains(&limit), "{limit}");
    let mut connection = sidecar.connect();
    let mut first = 0;
    while first < limit {
        let ids: Vec<u64> = (first..limit.min(first + 30_000)).collect();
        connection.ask(&frames::add(&ids, 3_600, 1)).added();
        first += 30_000;
    }
    let refused = connection.ask(&frames::add(&[u64::MAX], 3_600, 1));
    assert_names(refused.text(), &["--max-in-flight is reached"]);
    // All of them end as batches: the worst that may happen to its memory.
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.signal(rustix::process::Signal::TERM);
    let mut messages = 0;
    while messages < limit {
        messages += subscriber.settled_batch().ids().len() as u64;
    }
    sidecar.end_of_drain();
}

#[test]
fn limits_that_do_not_fit_into_the_container_are_named() {
    let Some(group) = Group::with_memory("warns", HUNDRED_MEBIBYTES) else { return };
    let sidecar = Sidecar::spawn(&mut group.inside(&serve(&["--max-in-flight", "4000000"])));
    assert_eq!(sidecar.metrics().count("max_in_flight"), 4_000_000, "it is as it was given");
    let log = sidecar.log().text();
    let line = log.lines().find(|line| line.contains("WARN")).unwrap_or_else(|| panic!("{log}"));
    assert_names(line, &["--max-in-flight 4000000", "may use 100 MiB", "it is killed", "lower them"]);
    let checked = Run::of(&mut group.inside(&serve(&["--max-in-flight", "4000000", "--check-config"])));
    assert_eq!(checked.code, 0);
    assert_names(&checked.stderr, &["--max-in-flight 4000000", "may use 100 MiB"]);
}

/// The command, as a user who may have this number of threads; none where that cannot be had.
fn with_threads(command: &Command, threads: u32) -> Option<Command> {
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups", "prlimit"];
    let mut limited = Command::new("setpriv");
    limited.args(user).arg(format!("--nproc={threads}:{threads}"));
    limited.arg(command.get_program()).args(command.get_args());
    limited.env_clear().env("PATH", env::var("PATH").unwrap_or_default());
    limited.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut trial = Command::new("setpriv");
    trial.args(user).arg("--nproc=8:8").arg(command.get_program()).arg("--version");
    let can = trial.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !can {
        skip("a limit of processes: it needs root, setpriv, prlimit, and a program that other users may read");
    }
    can.then_some(limited)
}

#[test]
fn a_thread_that_the_system_refuses_is_a_clear_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // Without the journal, a sidecar with one serving thread needs seven.
    for threads in 1..=8 {
        let journal = folder.path().join(threads.to_string());
        let serve = serve(&["--threads", "1", "--journal", journal.to_str().unwrap()]);
        let Some(mut command) = with_threads(&serve, threads) else { return };
        let run = Run::of(&mut command);
        let error = run.error(1);
        assert_names(error, &["thread", "limit", "of processes"]);
        assert!(!error.contains("a panic ends") && !error.contains("a bug"), "{threads} threads: {error}");
    }
    // A name lookup needs a thread.
    let Some(mut command) = with_threads(&program(&["add", "1", "--addr", "localhost:1"]), 1) else { return };
    let run = Run::of(&mut command);
    assert_names(run.error(1), &["ackwheel: the system starts no further thread", "ulimit -u", "pids.max"]);
}
