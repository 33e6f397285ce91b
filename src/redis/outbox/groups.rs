//! The groups that were opened here: opens, leaves and deletes them in Redis.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::RwLock;

use crate::core::group::{GroupName, MAX_GROUPS};
use crate::core::outbox::{Opening, Start};
use crate::core::refusal::{Reason, Refusal};
use crate::redis::context::RingContext;
use crate::redis::outbox::calls::{MOST_BATCHES, kind, run, run_expecting};
use crate::redis::scripts::SCRIPTS;

/// The groups that were opened here and not left.
pub(super) struct Groups {
    context: Arc<RingContext>,
    /// Whether each is ephemeral.
    ///
    /// A task that opens, leaves or deletes a group holds the lock for reading until Redis has answered, and no longer;
    /// tasks with the same group run one after the other. The heartbeat holds it for writing, so that its list of
    /// groups is complete: none is just being opened or left.
    pub(super) joined: RwLock<Mutex<BTreeMap<GroupName, bool>>>,
}

impl Groups {
    pub(super) fn new(context: Arc<RingContext>) -> Groups {
        Groups { context, joined: RwLock::default() }
    }

    /// Makes sure that a group exists; returns whether it is new.
    pub(super) async fn open(&self, group: GroupName, opening: Opening) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let start = match opening.start {
            Start::Beginning => "0",
            Start::End => "$",
        };
        let arguments = (self.context.sidecar(), group.as_str(), MAX_GROUPS, start, kind(opening.ephemeral));
        let (word, mut answer) = run(&self.context, &SCRIPTS.open_group, &[], arguments).await?;
        match word.as_str() {
            "open" => {
                let (is_new, is_ephemeral) = (answer.count()? == 1, answer.text()? == kind(true));
                joined.lock().insert(group, is_ephemeral);
                Ok(is_new)
            }
            "full" => Err(Refusal::new(
                Reason::TooManyGroups,
                format!("there are {MAX_GROUPS} groups already: delete one with `ackwheel group delete NAME`"),
            )),
            word => Err(answer.strange(word).into()),
        }
    }

    /// Leaves a group after its last subscriber here. If Redis does not answer, the next heartbeat does the same.
    pub(super) async fn leave(&self, group: &GroupName) -> Result<(), Refusal> {
        let joined = self.joined.read().await;
        joined.lock().remove(group);
        let mut joined = Some(joined);
        loop {
            let arguments = (self.context.sidecar(), group.as_str(), MOST_BATCHES);
            let mut answer = run_expecting(&self.context, "left", &SCRIPTS.leave_group, arguments).await?;
            if answer.count()? != 1 {
                return Ok(());
            }
            drop(joined.take());
        }
    }

    /// Deletes a group; returns whether it existed.
    pub(super) async fn delete(&self, group: &GroupName) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let (word, mut answer) =
            run(&self.context, &SCRIPTS.delete_group, &[], (self.context.sidecar(), group.as_str())).await?;
        if word == "in use" {
            let others = answer.count()?;
            let sidecars = if others == 1 { "sidecar" } else { "sidecars" };
            return Err(Refusal::new(
                Reason::GroupInUse,
                format!(
                    "group {group} has subscribers at {others} other {sidecars}: end them first, then delete it"
                ),
            ));
        }
        if !["deleted", "unknown"].contains(&word.as_str()) {
            return Err(answer.strange(&word).into());
        }
        joined.lock().remove(group);
        Ok(word == "deleted")
    }
}
