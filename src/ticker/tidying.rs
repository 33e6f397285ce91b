//! Tidying up leaves the processor to others.

use std::time::Duration;

/// The ticker tidies up for so long at a time, or for a step if that takes longer.
const AT_ONCE: Duration = Duration::from_micros(100);

/// Then it waits for so many times as long: on a machine whose processors are all busy a batch that was published just
/// before could not be sent until all is tidied up.
const PAUSES: u32 = 4;

/// For how long the ticker has tidied up since it paused.
#[derive(Debug, Default)]
pub(super) struct Tidying(Duration);

impl Tidying {
    /// How long to pause after a step that took so long.
    pub(super) fn pause(&mut self, took: Duration) -> Duration {
        self.0 += took;
        if self.0 < AT_ONCE {
            return Duration::ZERO;
        }
        std::mem::take(&mut self.0) * PAUSES
    }
}
