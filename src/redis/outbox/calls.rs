//! Scripts of the outbox: they open, leave and delete groups, settle batches, and return the backlog.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use redis::ToRedisArgs;

use crate::core::batch::BatchId;
use crate::core::group::{GroupName, MAX_GROUPS};
use crate::core::outbox::{Backlog, GroupBacklog, Opening, Settled, Start};
use crate::core::refusal::{Promise, Reason, Refusal};
use crate::redis::outbox::Inner;
use crate::redis::outbox::entry::entry_id;
use crate::redis::scripts::{Answer, SCRIPTS, Script};

/// The most batches that one script looks at or delivers, so that none holds Redis up.
pub(super) const MOST_BATCHES: usize = 64;

/// The most batches that one script reads, with all their messages: it takes ten times longer than without.
pub(super) const MOST_READ: usize = 16;

/// So many scripts that settle are under way at once.
const SETTLED_TOGETHER: usize = 32;

impl Inner {
    /// Runs a script on the keys of the outbox, and `more`. Returns the first word of its answer, and the rest.
    pub(super) async fn run(
        &self,
        script: &'static Script,
        more: &[&str],
        arguments: impl ToRedisArgs,
    ) -> Result<(String, Answer), Refusal> {
        let keys = self.context.link.keys();
        let outbox: [&str; 5] = [&keys.outbox, &keys.groups, &keys.sidecars, &keys.departed, &keys.news];
        let session = self.context.link.session()?;
        self.context.run(&session, script, &[&outbox, more].concat(), arguments).await
    }

    /// Runs a script whose answer always begins with this word. Returns the rest.
    pub(super) async fn run_expecting(
        &self,
        expected: &str,
        script: &'static Script,
        arguments: impl ToRedisArgs,
    ) -> Result<Answer, Refusal> {
        let (word, answer) = self.run(script, &[], arguments).await?;
        if word == expected { Ok(answer) } else { Err(answer.strange(&word).into()) }
    }

    pub(super) fn sidecar(&self) -> &str {
        &self.context.identity.sidecar
    }

    /// Makes sure that a group exists; returns whether it is new.
    pub(super) async fn open_group(&self, group: GroupName, opening: Opening) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let start = match opening.start {
            Start::Beginning => "0",
            Start::End => "$",
        };
        let arguments = (self.sidecar(), group.as_str(), MAX_GROUPS, start, kind(opening.ephemeral));
        let (word, mut answer) = self.run(&SCRIPTS.open_group, &[], arguments).await?;
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
    pub(super) async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal> {
        let joined = self.joined.read().await;
        joined.lock().remove(group);
        self.owned.remove(group);
        let mut joined = Some(joined);
        loop {
            let arguments = (self.sidecar(), group.as_str(), MOST_BATCHES);
            let mut answer = self.run_expecting("left", &SCRIPTS.leave_group, arguments).await?;
            if answer.count()? != 1 {
                return Ok(());
            }
            drop(joined.take());
        }
    }

    /// Deletes a group; returns whether it existed.
    pub(super) async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let (word, mut answer) = self.run(&SCRIPTS.delete_group, &[], (self.sidecar(), group.as_str())).await?;
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
        self.owned.remove(group);
        Ok(word == "deleted")
    }

    /// Settles batches. All parts are sent together, so that many batches hold the group up no longer than few.
    pub(super) async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let parts: Vec<_> = batches.chunks(MOST_READ).map(|part| self.settle_part(group, part)).collect();
        let (mut sum, mut refused) = (Settled::default(), None);
        for part in stream::iter(parts).buffered(SETTLED_TOGETHER).collect::<Vec<_>>().await {
            if let Err(refusal) = sum.add(part)
                // A refusal of all parts must not promise "not applied" if one of them may be applied.
                && (refused.is_none() || refusal.reason.promise() == Promise::OutcomeUnknown)
            {
                refused = Some(refusal);
            }
        }
        match refused {
            Some(refusal) if sum.batches.is_empty() => Err(refusal),
            refused => {
                let of_the_rest = |Refusal { text, .. }| {
                    Refusal::new(Reason::StoreSilent, format!("a part is settled; of the rest: {text}"))
                };
                Ok(Settled { refusal: refused.map(of_the_rest), ..sum })
            }
        }
    }

    async fn settle_part(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let arguments = (group.as_str(), ids_and_epochs(batches));
        let count = self.run_expecting("settled", &SCRIPTS.settle, arguments).await?.count()?;
        let owned = self.owned.get(group).map(|owned| Arc::clone(&owned));
        if let Some(owned) = owned {
            owned.lock().await.remove(batches);
        }
        Ok(Settled { count, batches: batches.to_vec(), refusal: None })
    }

    /// The batches and messages in the outbox, and the backlog of each group.
    pub(super) async fn backlog(&self) -> Result<Backlog, Refusal> {
        let keys = self.context.link.keys();
        let names: [&str; 3] = [&keys.meta, &keys.outbox, &keys.groups];
        let mut answer = self.context.link.read(&SCRIPTS.backlogs, &names, |_| {}).await?;
        let ids = answer.count()?;
        let mut groups = answer.rest(|answer| {
            let mut backlog = answer.nested()?;
            Ok::<_, Refusal>(GroupBacklog {
                group: group_name(&mut backlog)?,
                batches: backlog.count()?,
                unacked: backlog.count()?,
                oldest: Duration::from_millis(backlog.count()?),
            })
        })?;
        groups.sort_by(|a, b| a.group.cmp(&b.group));
        Ok(Backlog { ids, groups })
    }
}

/// The mark of a group in Redis, by whether it is ephemeral.
pub(super) fn kind(is_ephemeral: bool) -> &'static str {
    if is_ephemeral { "e" } else { "-" }
}

pub(super) fn ids_and_epochs(batches: &[BatchId]) -> Vec<(String, u64)> {
    batches.iter().map(|batch| (entry_id(*batch), batch.epoch)).collect()
}

pub(super) fn group_name(answer: &mut Answer) -> Result<GroupName, Refusal> {
    let name = answer.text()?;
    name.parse().map_err(|_| answer.strange(&name).into())
}
