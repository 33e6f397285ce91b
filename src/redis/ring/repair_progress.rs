//! What a leader knows of messages whose list Redis has lost: how far all are looked through, and whether to begin.

use crate::core::tick::{Tick, Wheel};

/// What is to be mended where Redis has lost what says where some messages are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RepairProgress {
    /// How far all messages are looked through.
    pub(crate) on_its_way: Option<Mending>,
    /// How often that may be done before the pointer moves.
    left: u8,
    /// The pointer when it was done last for what is not late any more.
    tidied_at: Option<Tick>,
    /// Whether this sidecar's user may do it.
    pub(crate) is_denied: bool,
}

impl Default for RepairProgress {
    fn default() -> RepairProgress {
        RepairProgress { on_its_way: None, left: RepairProgress::BEFORE_A_MOVE, tidied_at: None, is_denied: false }
    }
}

impl RepairProgress {
    /// A Redis that loses lists faster than they are mended does not stop the wheel.
    const BEFORE_A_MOVE: u8 = 3;

    /// Whether the pointer waits where messages are missing.
    pub(crate) fn may_wait(&self) -> bool {
        self.left > 0 && !self.is_denied
    }

    /// Whether to look for what is not late any more, at a pointer: once a revolution, since what was late a moment ago is
    /// found in the next.
    pub(crate) fn may_tidy(&self, pointer: Tick, wheel: Wheel) -> bool {
        !self.is_denied && self.tidied_at.is_none_or(|then| pointer.0 >= then.0 + u64::from(wheel.slots()))
    }

    /// Begins to look through all messages, in a session.
    pub(crate) fn begin(&mut self, is_awaited: bool, pointer: Tick, session: u64) {
        if !is_awaited {
            self.tidied_at = Some(pointer);
        }
        self.on_its_way = Some(Mending { is_awaited, session, cursor: 0, put_back: 0, deleted: 0 });
    }

    /// The pointer has moved: what Redis loses from now on is looked for again.
    pub(crate) fn moved(&mut self) {
        self.left = RepairProgress::BEFORE_A_MOVE;
    }

    /// All were looked at.
    pub(crate) fn done(&mut self, mended: Mending) {
        self.on_its_way = None;
        if mended.is_awaited {
            self.left = if mended.put_back > 0 { self.left.saturating_sub(1) } else { 0 };
        }
    }
}

/// How far all messages are looked through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mending {
    /// Whether the pointer waits for it: it is about to decide a tick without messages that belong to it.
    pub(crate) is_awaited: bool,
    /// The session to whose server the cursor belongs.
    pub(crate) session: u64,
    pub(crate) cursor: u64,
    pub(crate) put_back: u64,
    pub(crate) deleted: u64,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_pointer_waits_for_what_is_put_back_and_not_without_end() {
        let (mut mends, pointer) = (RepairProgress::default(), Tick(7));
        let look_through = |mends: &mut RepairProgress, put_back| {
            mends.begin(true, pointer, 1);
            let begun = mends.on_its_way.expect("it is on its way");
            mends.done(Mending { put_back, ..begun });
            mends.may_wait()
        };
        assert_eq!([7, 7, 7].map(|put_back| look_through(&mut mends, put_back)), [true, true, false]);
        mends.moved();
        assert!(mends.may_wait(), "what is lost later is looked for again");
        assert!(!look_through(&mut mends, 0), "there is nothing to put back");
        mends.moved();
        mends.begin(false, pointer, 1);
        assert!(mends.may_wait(), "what is tidied up is another matter");
        let wheel = Wheel::new(15, Duration::from_secs(1)).unwrap();
        assert!(!mends.may_tidy(pointer.plus(14), wheel));
        assert!(mends.may_tidy(pointer.plus(15), wheel));
    }
}
