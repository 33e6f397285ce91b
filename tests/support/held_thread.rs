//! One thread of a process held still, while the others go on: what a stuck lock or an endless loop does.

use std::fs;
use std::time::Instant;

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::skipped::skip;
use super::{PATIENCE, wait_for, wait_until};

/// A thread that stalls until this is dropped. Only the thread of the test that held it can let it go.
#[derive(Debug)]
pub struct HeldThread {
    thread: Pid,
}

impl HeldThread {
    /// Holds the thread of this name as a debugger does; none where the system does not allow that.
    ///
    /// # Panics
    ///
    /// When the process has no such thread, and gets none.
    pub fn hold(process: u32, name: &str) -> Option<HeldThread> {
        // A thread bears its name once it has begun to run, and on a busy machine that may be later than it is there.
        // One that sleeps holds no lock that others wait for; while it runs it might, and would hold them too.
        let thread =
            wait_for("the thread sleeps", || find(process, name).filter(|thread| sleeps(process, *thread)));
        if let Err(error) = ptrace::seize(thread, ptrace::Options::empty()) {
            skip(&format!("a thread that is held: ptrace is not permitted here ({error})"));
            return None;
        }
        let held = HeldThread { thread };
        ptrace::interrupt(thread).expect("it is ours");
        let stopped = waitpid(thread, Some(WaitPidFlag::__WALL)).expect("it stops");
        assert!(matches!(stopped, WaitStatus::PtraceEvent(..)), "{stopped:?}");
        Some(held)
    }

    /// Holds the thread of this name where it writes to a file or syncs it: as if the disk did not answer. A thread that has
    /// just begun is caught. None where the system does not allow that.
    pub fn hold_at_disk(process: u32, name: &str) -> Option<HeldThread> {
        let deadline = Instant::now() + PATIENCE;
        let thread = loop {
            assert!(Instant::now() < deadline, "no thread {name} within {PATIENCE:?}");
            if let Some(thread) = find(process, name) {
                break thread;
            }
        };
        if let Err(error) = ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD) {
            skip(&format!("a thread that is held: ptrace is not permitted here ({error})"));
            return None;
        }
        let held = HeldThread { thread };
        ptrace::interrupt(thread).expect("it is ours");
        waitpid(thread, Some(WaitPidFlag::__WALL)).expect("it stops");
        while !at_disk(process, thread) {
            ptrace::syscall(thread, None).expect("it stands");
            let stopped = waitpid(thread, Some(WaitPidFlag::__WALL)).expect("it stops");
            assert!(stopped.pid() == Some(thread) && !matches!(stopped, WaitStatus::Exited(..)), "{stopped:?}");
        }
        Some(held)
    }

    /// Waits until it has ended with its process, whose end nobody sees before that.
    pub fn wait_for_end(&self) {
        wait_until("the held thread ends", || {
            let state = waitpid(self.thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG));
            matches!(state, Err(_) | Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)))
        });
    }
}

/// Whether a thread that stands is in a call that writes to a file or syncs it.
fn at_disk(process: u32, thread: Pid) -> bool {
    const CALLS: [&str; 2] = if cfg!(target_arch = "x86_64") { ["1", "74"] } else { ["64", "82"] };
    let call = fs::read_to_string(format!("/proc/{process}/task/{thread}/syscall")).unwrap_or_default();
    call.split(' ').next().is_some_and(|number| CALLS.contains(&number))
}

fn find(process: u32, name: &str) -> Option<Pid> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("the process is there");
    let is_named = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|found| found.trim_end() == name)
    };
    let task = tasks.filter_map(Result::ok).find(is_named)?;
    let id = task.file_name().into_string().expect("an id is ASCII");
    Some(Pid::from_raw(id.parse().expect("a task is named by its id")))
}

fn sleeps(process: u32, thread: Pid) -> bool {
    // Behind the name, which stands in brackets and may have any in it.
    let stat = fs::read_to_string(format!("/proc/{process}/task/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
}

impl Drop for HeldThread {
    fn drop(&mut self) {
        // It may have ended with its process.
        let _ = ptrace::detach(self.thread, None);
    }
}
