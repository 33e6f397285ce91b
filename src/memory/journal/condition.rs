//! The condition of a journal, and the refusals of requests that it cannot record.

use std::sync::Arc;

use crate::core::{Reason, Refusal};

/// The condition of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::memory) enum Condition {
    /// All changes are recorded.
    Recording,
    /// All changes are recorded, but there is no room for more messages.
    Full,
    /// A write failed. Nothing is recorded, and nothing waits.
    Failed,
    /// Changes are recorded again, and a checkpoint replaces the log that failed.
    Rebuilding,
}

impl Condition {
    /// Returns the condition with this number.
    pub(super) const fn of(number: u8) -> Condition {
        match number {
            0 => Condition::Recording,
            1 => Condition::Full,
            2 => Condition::Failed,
            _ => Condition::Rebuilding,
        }
    }
}

/// The refusals. All refused requests share them.
pub(super) struct Refusals {
    /// The disk does not answer.
    pub(super) slow: Arc<Refusal>,
    /// The disk is full.
    pub(super) full: Arc<Refusal>,
    /// A write has failed.
    pub(super) failed: Arc<Refusal>,
    /// Too much is unwritten.
    pub(super) unwritten: Arc<Refusal>,
    /// A write failed after a message was added.
    pub(super) unknown: Arc<Refusal>,
}

impl Refusals {
    pub(super) fn new() -> Refusals {
        let refusal = |reason, text: &'static str| Arc::new(Refusal::new(reason, text));
        Refusals {
            slow: refusal(
                Reason::StoreUnreachable,
                "the disk of --journal has not answered for half a second: try again later, or look at the disk",
            ),
            full: refusal(
                Reason::StoreUnreachable,
                "the disk of --journal is full: make room on it, and try again",
            ),
            failed: refusal(
                Reason::StoreUnreachable,
                "the journal cannot be written: look at the log and at the disk of --journal, and try again",
            ),
            unwritten: refusal(
                Reason::MaxHeldAcks,
                "the disk of --journal does not answer, and too much waits for it: try again later",
            ),
            unknown: refusal(
                Reason::StoreTimeout,
                "the messages are added, but the journal could not be written: repeat the request",
            ),
        }
    }
}
