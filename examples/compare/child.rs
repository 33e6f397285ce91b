//! Processes that end with their parent: this program in another role, and servers.

use std::io::{BufRead, BufReader, Read, stdin};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child as Process, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};

use std::time::{Duration, Instant};

use anyhow::Context;

/// How long a process may take to end once it is asked to.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often it is looked whether one has ended.
const POLL: Duration = Duration::from_millis(5);

/// A process whose stdin ends so soon was started without one.
const AT_ONCE: Duration = Duration::from_millis(100);

/// A process that ends with its owner: at once where the owner lets it go, and at the end of its stdin where the
/// owner was killed.
#[derive(Debug)]
pub struct Child {
    process: Process,
    /// Closed to end it.
    stdin: Option<ChildStdin>,
}

impl Child {
    /// Starts this program in a role.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn in_role(arguments: &[&str], with: impl FnOnce(&mut Command)) -> anyhow::Result<Child> {
        let mut command = Command::new(std::env::current_exe().context("this program cannot find itself")?);
        command.args(arguments).stdin(Stdio::piped());
        with(&mut command);
        let mut process = command.spawn().with_context(|| format!("cannot start {arguments:?}"))?;
        let stdin = process.stdin.take();
        Ok(Child { process, stdin })
    }

    /// Starts another program, silent, which ends with this one.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn guarded(program: &str, arguments: &[&str]) -> anyhow::Result<Child> {
        Child::in_role(&[&["guard", program], arguments].concat(), |command| {
            command.stdout(Stdio::null()).stderr(Stdio::null());
        })
    }

    /// The number of the process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.process.try_wait().map_or(true, |status| status.is_some())
    }

    /// Its output, where it is piped.
    pub fn stdout(&mut self) -> Option<ChildStdout> {
        self.process.stdout.take()
    }

    /// Its log, where it is piped.
    pub fn stderr(&mut self) -> Option<ChildStderr> {
        self.process.stderr.take()
    }

    /// Bytes that it has in memory.
    ///
    /// # Errors
    ///
    /// When the system does not tell.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        resident_bytes(&self.id().to_string())
    }

    /// Seconds of a processor that its threads have had.
    ///
    /// # Errors
    ///
    /// When the system does not tell.
    pub fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let mut seconds = 0.0;
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.id()))? {
            let path = thread?.path().join("schedstat");
            let statistics = std::fs::read_to_string(&path)?;
            let nanos = statistics.split_whitespace().next().and_then(|nanos| nanos.parse::<f64>().ok());
            seconds += nanos.with_context(|| format!("{} has no time", path.display()))? / 1e9;
        }
        Ok(seconds)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Asked first, so that a guard ends what it guards.
        drop(self.stdin.take());
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self.has_ended() {
                return;
            }
            std::thread::sleep(POLL);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The first line of a child's output.
///
/// # Errors
///
/// When it ends before.
pub fn first_line(output: impl Read) -> anyhow::Result<String> {
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    anyhow::ensure!(line.ends_with('\n'), "it ended before it had said a line: {line:?}");
    Ok(line.trim_end().to_owned())
}

/// Ends this process when nobody holds the other end of its stdin any more.
pub fn end_with_stdin() {
    let begun = Instant::now();
    std::thread::spawn(move || {
        wait_for_end_of_stdin();
        if begun.elapsed() < AT_ONCE {
            eprintln!(
                "stdin is closed, and this ends with it: start it from a terminal, or as `sleep 60 | compare subject …`"
            );
            std::process::exit(1);
        }
        std::process::exit(0);
    });
}

/// Runs a program until stdin ends, or it does.
///
/// # Errors
///
/// When it cannot be started or ended.
pub fn guard(command: &[String]) -> anyhow::Result<()> {
    let (program, arguments) = command.split_first().context("a guard needs something to guard")?;
    let mut process = Command::new(program).args(arguments).stdin(Stdio::null()).spawn()?;
    let waiting = std::thread::spawn(wait_for_end_of_stdin);
    while !waiting.is_finished() {
        if let Some(status) = process.try_wait()? {
            anyhow::bail!("{program} ended by itself: {status}");
        }
        std::thread::sleep(POLL);
    }
    process.kill()?;
    process.wait()?;
    Ok(())
}

fn wait_for_end_of_stdin() {
    // An error is an end, too.
    let _ = stdin().lock().read_to_end(&mut Vec::new());
}

/// Bytes that a process has in memory: `self`, or a number.
///
/// # Errors
///
/// When the system does not tell.
pub fn resident_bytes(process: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{process}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{path} has no VmRSS"))? * 1_024)
}

/// A program, if it is installed: what an environment variable names, or the first on the path.
pub fn installed(variable: &str, program: &str) -> Option<String> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let found = named.or_else(|| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
    });
    found?.into_os_string().into_string().ok()
}

/// A port that nobody listens on now, below those that the system gives to outgoing connections.
pub fn free_port() -> u16 {
    let tries = std::iter::repeat_with(|| rand::random_range(10_000..32_000));
    let mut free = tries.filter(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    free.next().expect("the tries do not end")
}
