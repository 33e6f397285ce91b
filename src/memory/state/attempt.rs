//! An attempt to write a state file, which another thread may abandon until the file is in its place.

use std::io;
use std::time::Duration;

use parking_lot::Mutex;

/// How long the end of a rename is waited for, where a state file is abandoned.
const RENAME_PATIENCE: Duration = Duration::from_millis(500);

/// An attempt to write a state file.
#[derive(Debug, Default)]
pub(super) struct Attempt(Mutex<Stage>);

#[derive(Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Writing,
    Abandoned,
    InPlace,
}

impl Attempt {
    /// An error once it is abandoned.
    pub(super) fn check(&self) -> io::Result<()> {
        if *self.0.lock() == Stage::Abandoned { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    /// Puts the file in its place, unless it is abandoned.
    pub(super) fn finish(&self, place: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut stage = self.0.lock();
        if *stage == Stage::Abandoned {
            return Err(io::ErrorKind::TimedOut.into());
        }
        place()?;
        *stage = Stage::InPlace;
        Ok(())
    }

    /// Abandons it; returns whether the file is not in its place.
    pub(super) fn abandon(&self) -> bool {
        // It is locked for no longer than a rename takes, and a disk that does not answer must delay no other thread.
        let Some(mut stage) = self.0.try_lock_for(RENAME_PATIENCE) else { return true };
        if *stage == Stage::InPlace {
            return false;
        }
        *stage = Stage::Abandoned;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_abandoned_or_in_its_place_and_never_both() {
        let (abandoned, placed) = (Attempt::default(), Attempt::default());
        assert!(abandoned.check().is_ok() && abandoned.abandon() && abandoned.check().is_err());
        assert!(abandoned.finish(|| panic!("it is abandoned")).is_err());
        assert!(placed.finish(|| Err(io::ErrorKind::StorageFull.into())).is_err());
        assert!(placed.finish(|| Ok(())).is_ok());
        assert!(!placed.abandon() && placed.check().is_ok());
    }
}
