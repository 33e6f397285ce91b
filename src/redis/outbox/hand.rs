//! What this sidecar knows to hold of each group.

use std::collections::HashSet;
use std::sync::Arc;

use dashmap::DashMap;

use crate::core::batch::BatchId;
use crate::core::group::GroupName;
use crate::core::refusal::{Promise, Refusal};
use crate::redis::outbox::entry::entry_id;

/// What is known to be held of one group.
#[derive(Debug, Default)]
pub(super) struct Hand {
    pub(super) held: HashSet<BatchId>,
    /// What was given back, and is left to others until it is taken again.
    pub(super) lent: HashSet<BatchId>,
    /// Entries that are held and cannot be read: they stay here, so that nobody takes them again and again.
    pub(super) unreadable: HashSet<String>,
    /// The session in which Redis was known to hold no more than this for the sidecar; none if an answer was lost.
    pub(super) sure_in: Option<u64>,
}

impl Hand {
    /// Is in doubt from now on: a request that changes what is held goes out, and its answer can be lost, or not be
    /// waited for. Returns what `sure_in` was, to be put back with the answer.
    pub(super) fn doubt(&mut self) -> Option<u64> {
        self.sure_in.take()
    }

    /// The answer to that has come: it is as sure as before, unless nobody knows what became of the request.
    pub(super) fn told<T>(&mut self, sure_in: Option<u64>, answer: Result<T, Refusal>) -> Result<T, Refusal> {
        if !answer.as_ref().is_err_and(|refusal| refusal.reason.promise() == Promise::OutcomeUnknown) {
            self.sure_in = sure_in;
        }
        answer
    }

    /// The entries of what is held.
    pub(super) fn entries(&self) -> HashSet<String> {
        self.held.iter().map(|batch| entry_id(*batch)).chain(self.unreadable.iter().cloned()).collect()
    }
}

/// The hands of all groups with subscribers here. Each is locked while Redis is asked to change it.
#[derive(Debug, Default)]
pub(super) struct Hands(DashMap<GroupName, Arc<tokio::sync::Mutex<Hand>>>);

impl Hands {
    /// That of a group, empty at first.
    pub(super) fn of(&self, group: &GroupName) -> Arc<tokio::sync::Mutex<Hand>> {
        Arc::clone(&self.0.entry(group.clone()).or_default())
    }

    /// That of a group, if there is one.
    pub(super) fn find(&self, group: &GroupName) -> Option<Arc<tokio::sync::Mutex<Hand>>> {
        self.0.get(group).map(|hand| Arc::clone(&hand))
    }

    /// Forgets that of a group.
    pub(super) fn drop(&self, group: &GroupName) {
        self.0.remove(group);
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<(GroupName, Arc<tokio::sync::Mutex<Hand>>)> {
        self.0.iter().map(|hand| (hand.key().clone(), Arc::clone(hand.value()))).collect()
    }
}
