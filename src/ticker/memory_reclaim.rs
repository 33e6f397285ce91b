//! MemoryReclaim up leaves the processor to others.

use std::time::Duration;

/// The ticker tidies up for so long at a time, or for a step if that takes longer.
const AT_ONCE: Duration = Duration::from_micros(100);

/// Then it waits for so many times as long: on a machine whose processors are all busy a batch that was published just
/// before could not be sent until all is tidied up.
const PAUSES: u32 = 4;

/// For how long the ticker has tidied up since it paused.
#[derive(Debug, Default)]
pub(super) struct MemoryReclaim(Duration);

impl MemoryReclaim {
    /// How long to pause after a step that took so long.
    pub(super) fn pause(&mut self, took: Duration) -> Duration {
        self.0 += took;
        if self.0 < AT_ONCE {
            return Duration::ZERO;
        }
        std::mem::take(&mut self.0) * PAUSES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_steps_pause_together_and_a_long_one_by_itself() {
        let mut memory_reclaim = MemoryReclaim::default();
        let us = Duration::from_micros;
        let pauses = [1, 60, 38, 1, 99, 1, 250].map(|took| memory_reclaim.pause(us(took)));
        assert_eq!(pauses, [0, 0, 0, 400, 0, 400, 1_000].map(us));
    }
}
