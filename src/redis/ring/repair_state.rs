//! The state of the repair of lost tick sets in one leadership term. A tick set is the Redis set of the messages with
//! one deadline. If messages are missing in the tick sets, a scan of all messages puts them back, and the pointer waits
//! for the scan.

use crate::core::{Tick, Wheel};

/// Maximum number of scans that the pointer waits for between two moves. With this limit, the pointer moves even if
/// Redis loses tick sets all the time.
const SCANS_BEFORE_A_MOVE: u8 = 3;

/// The state of the repair in one leadership term.
#[derive(Debug, Default)]
pub(super) struct Repair {
    /// The epoch of this term: the number of the leader's election.
    pub(super) epoch: u64,
    /// The scan that is in progress.
    pub(super) scan: Option<Scan>,
    /// Number of scans that the pointer has waited for since its last move. If a scan puts nothing back, this number
    /// becomes the maximum, so that the pointer waits for no further scan.
    pub(super) scans: u8,
    /// The tick at which the pointer stood when the last cleanup scan began. A cleanup scan deletes old messages, and
    /// the pointer does not wait for it.
    pub(super) tidied_at: Option<Tick>,
    /// Whether the Redis user of this sidecar lacks permission for the scan.
    pub(super) is_denied: bool,
}

/// A scan of all messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scan {
    /// Whether the pointer waits for this scan. It waits if messages are missing, because some of them may belong to
    /// the tick that expires next.
    pub(super) is_awaited: bool,
    /// The session, that is the connection to Redis, in which `cursor` is valid.
    pub(super) session: u64,
    /// The cursor of HSCAN for the next step.
    pub(super) cursor: u64,
    pub(super) put_back: u64,
    pub(super) deleted: u64,
}

impl Repair {
    /// Returns whether the pointer may wait for another scan if messages are missing.
    pub(super) fn may_wait(&self) -> bool {
        self.scans < SCANS_BEFORE_A_MOVE && !self.is_denied
    }

    /// Returns whether a cleanup scan may begin. Such a scan deletes timed-out messages that should have been deleted
    /// before. It may begin once per revolution: once in as many ticks as the wheel has slots. If a message is not old
    /// enough for one cleanup scan, the next one deletes it.
    pub(super) fn may_tidy(&self, pointer: Tick, wheel: Wheel) -> bool {
        !self.is_denied && self.tidied_at.is_none_or(|then| pointer.0 >= then.0 + u64::from(wheel.slots()))
    }

    /// Begins a scan. `is_awaited` is whether the pointer waits for the scan; if not, it is a cleanup scan. `session`
    /// is the number of the current session.
    pub(super) fn begin(&mut self, is_awaited: bool, pointer: Tick, session: u64) {
        if !is_awaited {
            self.tidied_at = Some(pointer);
        }
        self.scan = Some(Scan { is_awaited, session, cursor: 0, put_back: 0, deleted: 0 });
    }

    /// Ends a scan, and counts it if the pointer waited for it.
    pub(super) fn end(&mut self, scan: Scan) {
        self.scan = None;
        if scan.is_awaited {
            // If this scan has put nothing back, another scan would not help, so the pointer must not wait for one.
            self.scans = if scan.put_back > 0 { self.scans + 1 } else { SCANS_BEFORE_A_MOVE };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_pointer_waits_while_messages_are_put_back_and_not_without_end() {
        let (mut repair, pointer) = (Repair::default(), Tick(7));
        let look_through = |repair: &mut Repair, put_back| {
            repair.begin(true, pointer, 1);
            let begun = repair.scan.expect("the scan has begun");
            repair.end(Scan { put_back, ..begun });
            repair.may_wait()
        };
        assert_eq!([7, 7, 7].map(|put_back| look_through(&mut repair, put_back)), [true, true, false]);
        repair.scans = 0;
        assert!(repair.may_wait(), "after a move, the pointer waits for scans again");
        assert!(!look_through(&mut repair, 0), "the scan has put nothing back");
        repair.scans = 0;
        repair.begin(false, pointer, 1);
        assert!(repair.may_wait(), "a cleanup scan does not count");
        let wheel = Wheel::new(15, Duration::from_secs(1)).unwrap();
        assert!(!repair.may_tidy(pointer.plus(14), wheel));
        assert!(repair.may_tidy(pointer.plus(15), wheel));
    }
}
