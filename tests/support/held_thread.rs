//! One thread of a process held still, while the others go on: what a stuck lock or an endless loop does.

use std::fs;

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::skipped::skip;
use super::wait_for;

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
