//! Calls the scripts of the outbox.

use std::time::Duration;

use redis::ToRedisArgs;

use crate::core::group::GroupName;
use crate::core::outbox::{Backlog, GroupBacklog};
use crate::core::refusal::Refusal;
use crate::redis::context::RingContext;
use crate::redis::scripts::{Answer, SCRIPTS, Script};

/// The most batches that one script looks at or delivers, so that none holds Redis up.
pub(super) const MOST_BATCHES: usize = 64;

/// The most batches that one script reads, with all their messages: it takes ten times longer than without.
pub(super) const MOST_READ: usize = 16;

/// Runs a script on the keys of the outbox, and `more`. Returns the first word of its answer, and the rest.
pub(super) async fn run(
    context: &RingContext,
    script: &'static Script,
    more: &[&str],
    arguments: impl ToRedisArgs,
) -> Result<(String, Answer), Refusal> {
    let keys = context.link.keys();
    let outbox: [&str; 5] = [&keys.outbox, &keys.groups, &keys.sidecars, &keys.departed, &keys.news];
    context.run(&context.link.session()?, script, &[&outbox, more].concat(), arguments).await
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
