//! System calls of a process that fail or take long, as they do on a broken disk. strace injects the fault.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rustix::process::Signal;

use super::packages;
use super::process::Process;
use super::skipped::skip;

/// A fault that lasts until this is dropped.
pub struct InjectedFault {
    strace: Process,
    /// Open, because strace ends if it cannot write there.
    _messages: Box<dyn BufRead + Send>,
}

impl InjectedFault {
    /// Injects a fault such as `error=EIO` into these calls of a process. None, and a message, where tracing is not
    /// permitted.
    pub fn begin(process: u32, calls: &str, fault: &str) -> Option<InjectedFault> {
        let program = packages::optional("strace", "strace")?;
        let inject = format!("inject={calls}:{fault}");
        let mut command = Command::new(program);
        command.args(["--follow-forks", "--output=/dev/null", "-e", &inject, "--attach", &process.to_string()]);
        let mut strace = Process::spawn(command.stdin(Stdio::null()).stderr(Stdio::piped()));
        let mut said = String::new();
        let mut messages = Box::new(BufReader::new(strace.stderr()));
        messages.read_line(&mut said).expect("strace says how it went");
        if !said.contains("attached") {
            skip(&format!("faults of system calls: {}", said.trim()));
            return None;
        }
        Some(InjectedFault { strace, _messages: messages })
    }
}

impl Drop for InjectedFault {
    fn drop(&mut self) {
        // It lets the process go on. It ends with the signal itself.
        self.strace.signal(Signal::INT);
        self.strace.exit();
    }
}
