//! Calls the scripts of the outbox; opens, leaves and deletes groups, and returns the backlog.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::ToRedisArgs;
use tokio::sync::RwLock;

use crate::core::group::{GroupName, MAX_GROUPS};
use crate::core::outbox::{Backlog, GroupBacklog, GroupOptions, StartPosition};
use crate::core::refusal::{Reason, Refusal};
use crate::redis::context::RingContext;
use crate::redis::scripts::{Answer, SCRIPTS, Script};

/// The most batches that one script looks at or delivers, so that none holds Redis up.
pub(super) const MOST_BATCHES: usize = 64;

/// The most batches that one script reads, with all their messages: it takes ten times longer than without.
pub(super) const MAX_READ: usize = 16;

/// Runs a script on the keys of the outbox, and `more`. Returns the first word of its answer, and the rest.
pub(super) async fn run(
    context: &RingContext,
    script: &'static Script,
    more: &[&str],
    arguments: impl ToRedisArgs,
) -> Result<(String, Answer), Refusal> {
    let keys = context.link.keys();
    let outbox: [&str; 5] = [&keys.outbox, &keys.groups, &keys.sidecars, &keys.departed, &keys.news];
    context.run(&*context.link.session()?, script, &[&outbox, more].concat(), arguments).await
}

/// Runs a script whose answer always begins with this word. Returns the rest.
pub(super) async fn run_expecting(
    context: &RingContext,
    expected: &str,
    script: &'static Script,
    arguments: impl ToRedisArgs,
) -> Result<Answer, Refusal> {
    let (word, answer) = run(context, script, &[], arguments).await?;
    if word == expected { Ok(answer) } else { Err(answer.strange(&word).into()) }
}

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
    pub(super) async fn open(&self, group: GroupName, opening: GroupOptions) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let start = match opening.start {
            StartPosition::Beginning => "0",
            StartPosition::End => "$",
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

/// The batches and messages in the outbox, and the backlog of each group.
pub(super) async fn backlog(context: &RingContext) -> Result<Backlog, Refusal> {
    let keys = context.link.keys();
    let names: [&str; 3] = [&keys.meta, &keys.outbox, &keys.groups];
    let mut answer = context.link.read(&SCRIPTS.backlogs, &names, |_| {}).await?;
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

/// The mark of a group in Redis, by whether it is ephemeral.
pub(super) fn kind(is_ephemeral: bool) -> &'static str {
    if is_ephemeral { "e" } else { "-" }
}

pub(super) fn group_name(answer: &mut Answer) -> Result<GroupName, Refusal> {
    let name = answer.text()?;
    name.parse().map_err(|_| answer.strange(&name).into())
}
