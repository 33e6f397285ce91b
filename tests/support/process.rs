//! The program as a process: started, read, ended.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Instant;

use super::{PATIENCE, clock, wait_for};

/// The program, without what the environment of the tests says about it.
pub fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ackwheel"));
    command.args(arguments).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A process that ends with its owner.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    pub fn spawn(command: &mut Command) -> Process {
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        Process { child }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("a process that is not waited for has its id");
    }

    /// Whether every thread of it was stopped.
    pub fn is_stopped(&self) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id())).expect("the process is there");
        tasks.filter_map(Result::ok).all(|task| {
            let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        })
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().expect("a process can be killed");
        self.child.wait().expect("a killed process ends");
    }

    /// Waits for its end.
    pub fn exit(&mut self) -> ExitStatus {
        wait_for("the process ends", || self.exited())
    }

    /// How it ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    pub fn stdout(&mut self) -> impl Read + Send + 'static {
        self.child.stdout.take().expect("stdout is piped and taken once")
    }

    pub fn stderr(&mut self) -> impl Read + Send + 'static {
        self.child.stderr.take().expect("stderr is piped and taken once")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        clock::clean_up_after(self.child.id());
    }
}

/// The output of a short run of the program.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    /// Runs it to its end.
    pub fn of(command: &mut Command) -> Run {
        let mut process = Process::spawn(command);
        let (stdout, stderr) = (read_all(process.stdout()), read_all(process.stderr()));
        let status = process.exit();
        Run {
            code: status.code().expect("nobody kills a short-lived run"),
            stdout: stdout.recv_timeout(PATIENCE).expect("stdout ends with the process"),
            stderr: stderr.recv_timeout(PATIENCE).expect("stderr ends with the process"),
        }
    }

    /// Its output, where it succeeded.
    #[track_caller]
    pub fn output(&self) -> &str {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{self:?}");
        &self.stdout
    }

    /// Its output, where it succeeded and may have said something on stderr.
    #[track_caller]
    pub fn printed(&self) -> &str {
        assert_eq!(self.code, 0, "{self:?}");
        &self.stdout
    }

    /// Its error, where it failed with this code; and nothing on stdout.
    #[track_caller]
    pub fn error(&self, code: i32) -> &str {
        assert_eq!((self.code, self.stdout.as_str()), (code, ""), "{self:?}");
        &self.stderr
    }
}

/// Asserts that a text names everything it must.
#[track_caller]
pub fn assert_names(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

fn read_all(mut from: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        from.read_to_string(&mut text).expect("the program writes UTF-8");
        let _ = sender.send(text);
    });
    receiver
}

/// Lines as they come, each with the moment of its arrival.
pub fn lines(from: impl Read + Send + 'static) -> Receiver<(Instant, String)> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if sender.send((Instant::now(), line)).is_err() {
                break;
            }
        }
    });
    receiver
}

/// All that a process has logged so far.
#[derive(Clone, Debug, Default)]
pub struct Log {
    shared: Arc<(Mutex<LogState>, Condvar)>,
}

#[derive(Debug, Default)]
struct LogState {
    lines: Vec<String>,
    ended: bool,
    reader: Reader,
}

/// The mode of the reader of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Reader {
    #[default]
    Reads,
    /// It leaves in the pipe what comes, after the line that it is reading.
    Stuck,
    /// It has closed the pipe, or closes it after the next line.
    Gone,
}

impl Log {
    pub fn of(from: impl Read + Send + 'static) -> Log {
        let log = Log::default();
        let filled = log.clone();
        thread::spawn(move || {
            let (state, changed) = &*filled.shared;
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                let mut state = state.lock().expect("no holder panics");
                state.lines.push(line);
                changed.notify_all();
                while state.reader == Reader::Stuck {
                    state = changed.wait(state).expect("no holder panics");
                }
                if state.reader == Reader::Gone {
                    break;
                }
            }
            state.lock().expect("no holder panics").ended = true;
            changed.notify_all();
        });
        log
    }

    /// Has the reader stop after its next line, so that the pipe fills.
    pub fn stick(&self) {
        self.set_reader(Reader::Stuck);
    }

    /// Has the reader go on.
    pub fn go_on(&self) {
        self.set_reader(Reader::Reads);
    }

    /// Has the reader close the pipe after its next line.
    pub fn close(&self) {
        self.set_reader(Reader::Gone);
    }

    fn set_reader(&self, reader: Reader) {
        let (state, changed) = &*self.shared;
        let mut state = state.lock().expect("no holder panics");
        if state.reader != Reader::Gone {
            state.reader = reader;
        }
        drop(state);
        changed.notify_all();
    }

    /// The lines so far.
    pub fn text(&self) -> String {
        self.shared.0.lock().expect("no holder panics").lines.join("\n")
    }

    /// All of it, once the process has ended.
    pub fn whole(&self) -> String {
        self.wait("its end", |state| state.ended.then(|| state.lines.join("\n")))
    }

    /// The first line with these words, as soon as it is there; none if the log ends without it.
    pub fn line(&self, words: &str) -> Option<String> {
        self.wait(words, |state| match state.lines.iter().find(|line| line.contains(words)) {
            None if !state.ended => None,
            found => Some(found.cloned()),
        })
    }

    /// Asserts that all these words come to be in the log, and returns its lines so far.
    #[track_caller]
    pub fn assert_names(&self, words: &[&str]) -> String {
        let missing = |state: &LogState| {
            let said = |word: &&&str| state.lines.iter().any(|line| line.contains(**word));
            words.iter().find(|word| !said(word)).copied()
        };
        let missed = self.wait(&words.join(", "), |state| match missing(state) {
            Some(_) if !state.ended => None,
            missed => Some(missed),
        });
        let text = self.text();
        assert!(missed.is_none(), "{missed:?} is missing in: {text}");
        text
    }

    /// Waits until something is in the log.
    fn wait<T>(&self, what: &str, found: impl Fn(&LogState) -> Option<T>) -> T {
        let (state, changed) = &*self.shared;
        let deadline = Instant::now() + PATIENCE;
        let mut state = state.lock().expect("no holder panics");
        loop {
            if let Some(found) = found(&state) {
                return found;
            }
            let wait = deadline.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                let lines = state.lines.clone();
                // The print of the log afterwards needs the lock.
                drop(state);
                panic!("no {what:?} in the log within {PATIENCE:?}: {lines:#?}");
            }
            state = changed.wait_timeout(state, wait).expect("no holder panics").0;
        }
    }
}
