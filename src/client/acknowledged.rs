//! Batches that were acknowledged here, and that the server has not said to be settled.
//!
//! Their reader has dealt with them: they are not delivered to it again, but acknowledged again, until the server says
//! that they are settled. An acknowledgement may be lost with its connection, and the server then delivers the batch
//! once more.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::core::batch::BatchId;
use crate::protocol::frame::MAX_BATCH_IDS;

/// How the acknowledgement of a batch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// It is on its way, or waits for a connection.
    Asked,
    /// It has failed, or its caller did not wait for the answer: it is to be repeated.
    Unanswered,
}

/// The batches, at most as many as one BatchAck carries. One more is not remembered: it is delivered again.
#[derive(Debug, Default)]
pub(super) struct Acknowledged(Mutex<HashMap<BatchId, Status>>);

impl Acknowledged {
    /// These are acknowledged now.
    pub(super) fn ask<'a>(&'a self, batches: &'a [BatchId]) -> Asking<'a> {
        let mut known = self.known();
        for batch in batches {
            if known.len() < MAX_BATCH_IDS || known.contains_key(batch) {
                known.insert(*batch, Status::Asked);
            }
        }
        Asking { acknowledged: self, batches }
    }

    /// How it stands with a batch, if it was acknowledged.
    pub(super) fn status(&self, batch: BatchId) -> Option<Status> {
        self.known().get(&batch).copied()
    }

    /// The batches whose acknowledgement is to be repeated.
    pub(super) fn unanswered(&self) -> Vec<BatchId> {
        let known = self.known();
        let unanswered = known.iter().filter(|(_, status)| **status == Status::Unanswered);
        unanswered.map(|(batch, _)| *batch).collect()
    }

    /// The server says that these are settled.
    pub(super) fn settled(&self, batches: &[BatchId]) {
        let mut known = self.known();
        for batch in batches {
            known.remove(batch);
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<BatchId, Status>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An acknowledgement for which a caller waits. If this is dropped before the batches are settled, it is to be repeated.
#[derive(Debug)]
pub(super) struct Asking<'a> {
    acknowledged: &'a Acknowledged,
    batches: &'a [BatchId],
}

impl Asking<'_> {
    /// The server has answered that all of them are settled.
    pub(super) fn settled(self) {
        self.acknowledged.settled(self.batches);
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut known = self.acknowledged.known();
        for batch in self.batches {
            if let Some(status) = known.get_mut(batch) {
                *status = Status::Unanswered;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tick::Tick;

    fn id(seq: u32) -> BatchId {
        BatchId { tick: Tick(1), epoch: 1, ring: 0, seq }
    }

    #[test]
    fn what_was_not_answered_is_repeated_and_what_is_settled_is_forgotten() {
        let acknowledged = Acknowledged::default();
        let (lost, settled) = ([id(1)], [id(2)]);
        let asking = acknowledged.ask(&lost);
        assert_eq!(acknowledged.status(id(1)), Some(Status::Asked));
        assert!(acknowledged.unanswered().is_empty(), "its answer may still come");
        drop(asking);
        acknowledged.ask(&settled).settled();
        assert_eq!((acknowledged.unanswered(), acknowledged.status(id(2))), (vec![id(1)], None));
        acknowledged.settled(&lost);
        assert!(acknowledged.unanswered().is_empty());
    }

    #[test]
    fn no_more_are_remembered_than_one_batch_ack_carries() {
        let acknowledged = Acknowledged::default();
        let many: Vec<BatchId> = (0..).take(MAX_BATCH_IDS + 1).map(id).collect();
        drop(acknowledged.ask(&many));
        assert_eq!(acknowledged.unanswered().len(), MAX_BATCH_IDS);
    }
}
