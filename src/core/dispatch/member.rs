//! The members of a group, and how many batches each of them may get.

/// The maximum number of messages that a member may hold. The last batch may exceed this limit.
pub(crate) const MAX_CREDIT: u32 = 1_048_576;

/// The holder of kept batches. No member has this id.
pub(super) const KEPT: MemberId = MemberId(0);

/// The id of a member of a group. It is never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct MemberId(pub(crate) u64);

/// The limit of the batches that a member gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Credit {
    /// Batches, while the member holds fewer messages than this number.
    Messages(u64),
    /// This number of further batches, while the member holds fewer than [`MAX_CREDIT`] messages.
    Batches(u32),
}

#[derive(Debug)]
pub(super) struct Member {
    pub(super) id: MemberId,
    pub(super) credit: Credit,
    /// Messages in the batches that the member holds.
    pub(super) out: u64,
    /// Messages that were sent to the member and that it has not read.
    pub(super) unread: u64,
    /// Messages in the redeliveries that the running call of `next_redeliveries` has chosen for the member.
    pub(super) reserved: u64,
}

impl Member {
    /// Returns how many more messages the member can take now. Unread messages count even if the member no longer
    /// holds their batch. Otherwise redelivered batches would pile up at a member that does not read.
    pub(super) fn window(&self) -> u64 {
        let limit = match self.credit {
            Credit::Messages(limit) => limit,
            Credit::Batches(0) => return 0,
            Credit::Batches(_) => u64::from(MAX_CREDIT),
        };
        let window = limit.saturating_sub(self.out.max(self.unread) + self.reserved);
        match self.credit {
            Credit::Messages(_) => window,
            // A window of 1 message is one batch at a time, because batches are not empty.
            Credit::Batches(_) => window.min(1).saturating_sub(self.reserved),
        }
    }
}
