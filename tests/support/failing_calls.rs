//! System calls of a process that fail, as they do on a broken disk: strace returns an error in place of each.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rustix::process::Signal;

use super::packages;
use super::process::Process;
use super::skipped::skip;

/// Calls that fail until this is dropped.
pub struct FailingCalls {
    strace: Process,
    /// Open, because strace ends if it cannot write there.
    _messages: Box<dyn BufRead + Send>,
}

impl FailingCalls {
    /// Has these calls of a process fail with an error such as `EIO`. None, and a message, where tracing is not permitted.
    pub fn begin(process: u32, calls: &str, error: &str) -> Option<FailingCalls> {
        let program = packages::optional("strace", "strace")?;
        let inject = format!("inject={calls}:error={error}");
        let mut command = Command::new(program);
        command.args(["--follow-forks", "--output=/dev/null", "-e", &inject, "--attach", &process.to_string()]);
        let mut strace = Process::spawn(command.stdin(Stdio::null()).stderr(Stdio::piped()));
        let mut said = String::new();
        let mut messages = Box::new(BufReader::new(strace.stderr()));
        messages.read_line(&mut said).expect("strace says how it went");
        if !said.contains("attached") {
            skip(&format!("failing system calls: {}", said.trim()));
            return None;
        }
        Some(FailingCalls { strace, _messages: messages })
    }
}

impl Drop for FailingCalls {
    fn drop(&mut self) {
        // It lets the process go on. It ends with the signal itself.
        self.strace.signal(Signal::INT);
        self.strace.exit();
    }
}
