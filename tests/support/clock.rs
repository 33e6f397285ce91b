//! A clock that a test sets, for one process: libfaketime reads it from a file at every call.
//!
//! The monotonic clock stays true, as it does when somebody sets the clock of a machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use tempfile::TempDir;

use super::packages;

/// The clock of a process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clock {
    /// The clock is stopped at this Unix time in ms.
    Frozen(u64),
    /// The clock runs, and is so many seconds fast; slow, where they are negative.
    Offset(i64),
    /// The clock runs, and is so many ms fast.
    FastByMs(u64),
}

impl Clock {
    /// The text that libfaketime understands.
    fn text(self) -> String {
        match self {
            Clock::Frozen(unix_ms) => {
                let time = UNIX_EPOCH + Duration::from_millis(unix_ms);
                let text = humantime::format_rfc3339_millis(time).to_string();
                // Half a millisecond more, since what reads it computes in fractions, and rounds down.
                text.replace('T', " ").replace('Z', "5")
            }
            Clock::Offset(seconds) => format!("{seconds:+}"),
            Clock::FastByMs(ms) => format!("+{}.{:03}", ms / 1_000, ms % 1_000),
        }
    }
}

/// The file of a clock.
#[derive(Debug)]
pub struct FakeClock {
    folder: TempDir,
    library: PathBuf,
}

impl FakeClock {
    pub fn new(clock: Clock) -> FakeClock {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let fake = FakeClock { folder, library: packages::libfaketime() };
        fake.set(clock);
        fake
    }

    /// Sets it, in one step for a process that reads it meanwhile.
    pub fn set(&self, clock: Clock) {
        let next = self.folder.path().join("next");
        fs::write(&next, clock.text()).expect("the folder takes files");
        fs::rename(&next, self.file()).expect("a file can be renamed within its folder");
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("clock")
    }

    /// Has a command believe it.
    pub fn rule(&self, command: &mut Command) {
        self.preload(command, &[&self.library]);
    }

    /// Has a command believe it that brings an allocator of its own, as Redis brings jemalloc.
    ///
    /// The C library goes first in the search for `malloc`: libfaketime allocates while it looks up the real
    /// clock, and an allocator that asks for the time as it begins would wait for itself.
    pub fn rule_with_the_allocator_of_the_c_library(&self, command: &mut Command) {
        let libraries =
            self.library.parent().and_then(Path::parent).expect("libfaketime lies in a folder of its own");
        self.preload(command, &[&self.library, &libraries.join("libc.so.6")]);
    }

    fn preload(&self, command: &mut Command, libraries: &[&Path]) {
        let libraries: Vec<&str> = libraries.iter().map(|path| path.to_str().expect("a plain path")).collect();
        command
            .env("LD_PRELOAD", libraries.join(" "))
            .env("FAKETIME_TIMESTAMP_FILE", self.file())
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("FAKETIME_NO_CACHE", "1")
            .env("TZ", "UTC");
    }
}

/// Removes what libfaketime leaves behind of a process that was killed: the next process of that id could not
/// begin.
pub fn clean_up_after(process_id: u32) {
    for name in ["faketime_shm_", "sem.faketime_sem_"] {
        let _ = fs::remove_file(format!("/dev/shm/{name}{process_id}"));
    }
}
