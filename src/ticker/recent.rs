//! The ticks that were decided last, for people who look at the ring.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::core::batch::TickCounts;
use crate::core::tick::Tick;

/// So many decided ticks are remembered: a minute of the usual second, four of the usual revolutions.
pub const RECENT_TICKS: usize = 60;

/// The ticks of a ring that were decided last, as far as this sidecar decided them.
///
/// A sidecar that follows is told nothing of them, so its history ends where it last led; and where the answer of the
/// store was lost, a tick is missing. Each tick says which it is, so a gap shows as one.
#[derive(Debug, Default)]
pub struct Recent(Mutex<VecDeque<(Tick, TickCounts)>>);

impl Recent {
    /// Remembers a tick. What a drain hands out before its time is no tick that went by, and is left out.
    pub(super) fn note(&self, tick: Tick, counts: TickCounts) {
        if counts.drained {
            return;
        }
        let mut ticks = self.0.lock();
        // A ring that was lost and made anew may begin at a tick that had been decided in the one before.
        while ticks.back().is_some_and(|(last, _)| *last >= tick) {
            ticks.pop_back();
        }
        if ticks.len() == RECENT_TICKS {
            ticks.pop_front();
        }
        ticks.push_back((tick, counts));
    }

    /// The ticks, the oldest first: at most [`RECENT_TICKS`], and none twice.
    #[must_use]
    pub fn ticks(&self) -> Vec<(Tick, TickCounts)> {
        self.0.lock().iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(recent: &Recent) -> Vec<u64> {
        recent.ticks().into_iter().map(|(tick, _)| tick.0).collect()
    }

    #[test]
    fn the_oldest_goes_and_a_drain_is_no_tick() {
        let recent = Recent::default();
        for tick in 1..=100 {
            recent.note(Tick(tick), TickCounts { added: tick, ..TickCounts::default() });
        }
        recent.note(Tick(101), TickCounts { drained: true, ..TickCounts::default() });
        assert_eq!(noted(&recent), (41..=100).collect::<Vec<_>>());
        assert!(recent.ticks().iter().all(|(tick, counts)| tick.0 == counts.added));
    }

    #[test]
    fn a_ring_that_begins_anew_leaves_no_tick_twice() {
        let recent = Recent::default();
        for tick in [7, 8, 9, 8, 12] {
            recent.note(Tick(tick), TickCounts::default());
        }
        assert_eq!(noted(&recent), [7, 8, 12]);
    }
}
