//! The scripts of the outbox, each as a function of this sidecar.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;

use crate::core::batch::{BatchId, Delivery};
use crate::core::group::{GroupName, MAX_GROUPS};
use crate::core::outbox::{Backlog, Dropped, GroupBacklog, MOST_AGAIN, Opening, Retention, Start};
use crate::core::refusal::{Reason, Refusal};
use crate::redis::connection::link::Link;
use crate::redis::leader::term::whole_ms;
use crate::redis::outbox::entry::{Unreadable, delivery, entry_id};
use crate::redis::scripts::{Answer, SCRIPTS, Script};

/// The most batches that one script looks at or hands over, so that none holds Redis up.
pub(super) const MOST_BATCHES: usize = 64;

/// The most batches that one script reads, with all their messages: it takes ten times longer than without.
pub(super) const MOST_READ: usize = 16;

const _: () = assert!(MOST_AGAIN <= MOST_READ);

/// The scripts, for one ring and one sidecar.
pub(super) struct Calls {
    pub(super) link: Arc<Link>,
    pub(super) ring: u16,
    pub(super) sidecar: String,
}

impl Calls {
    pub(super) async fn write(
        &self,
        script: &'static Script,
        arguments: impl FnOnce(&mut Cmd),
    ) -> Result<(String, Answer), Refusal> {
        self.write_with(None, script, arguments).await
    }

    /// The same with one more key.
    pub(super) async fn write_with(
        &self,
        more: Option<&str>,
        script: &'static Script,
        arguments: impl FnOnce(&mut Cmd),
    ) -> Result<(String, Answer), Refusal> {
        let keys = self.link.keys();
        let keys: [&str; 5] = [&keys.outbox, &keys.groups, &keys.sidecars, &keys.departed, &keys.news];
        let keys: Vec<&str> = keys.into_iter().chain(more).collect();
        let mut answer = self.link.write(script, &keys, arguments).await?;
        Ok((answer.text()?, answer))
    }

    /// Makes sure that a group exists: whether it is new, and whether it is ephemeral.
    pub(super) async fn open_group(&self, group: &GroupName, opening: Opening) -> Result<(bool, bool), Refusal> {
        let start = match opening.start {
            Start::Beginning => "0",
            Start::End => "$",
        };
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(group.as_str()).arg(MAX_GROUPS).arg(start).arg(kind(opening.ephemeral));
        };
        let (word, mut answer) = self.write(&SCRIPTS.open_group, arguments).await?;
        match word.as_str() {
            "open" => Ok((answer.count()? == 1, answer.text()? == kind(true))),
            "full" => Err(Refusal::new(
                Reason::TooManyGroups,
                format!("there are {MAX_GROUPS} groups already: delete one with `ackwheel group delete NAME`"),
            )),
            _ => Err(answer.strange(&word).into()),
        }
    }

    /// Deletes a group; whether there was one.
    pub(super) async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(group.as_str());
        };
        let (word, mut answer) = self.write(&SCRIPTS.delete_group, arguments).await?;
        match word.as_str() {
            "deleted" => Ok(true),
            "unknown" => Ok(false),
            "in use" => {
                let others = answer.count()?;
                let sidecars = if others == 1 { "sidecar" } else { "sidecars" };
                Err(Refusal::new(
                    Reason::GroupInUse,
                    format!(
                        "group {group} has subscribers at {others} other {sidecars}: end them first, then delete it"
                    ),
                ))
            }
            _ => Err(answer.strange(&word).into()),
        }
    }

    /// Notes that the last subscriber here has left; whether there is more to let go of.
    pub(super) async fn leave_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(group.as_str()).arg(MOST_BATCHES);
        };
        let (word, mut answer) = self.write(&SCRIPTS.leave_group, arguments).await?;
        if word == "left" { Ok(answer.count()? == 1) } else { Err(answer.strange(&word).into()) }
    }

    /// Takes the next batches but those `except`, at most [`MOST_READ`].
    pub(super) async fn take(
        &self,
        group: &GroupName,
        window: u64,
        except: &HashSet<BatchId>,
    ) -> Result<Vec<Result<Delivery, Unreadable>>, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(group.as_str()).arg(window).arg(MOST_READ);
            for batch in except {
                call.arg(entry_id(*batch));
            }
        };
        let (word, answer) = self.write(&SCRIPTS.take, arguments).await?;
        self.taken(&word, answer)
    }

    /// Takes batches once more, as far as they are still held here, or by nobody; at most [`MOST_READ`].
    pub(super) async fn take_again(
        &self,
        group: &GroupName,
        batches: &[BatchId],
    ) -> Result<Vec<Result<Delivery, Unreadable>>, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(group.as_str());
            for batch in batches {
                call.arg(entry_id(*batch)).arg(batch.epoch);
            }
        };
        let (word, answer) = self.write(&SCRIPTS.take_again, arguments).await?;
        self.taken(&word, answer)
    }

    fn taken(&self, word: &str, mut answer: Answer) -> Result<Vec<Result<Delivery, Unreadable>>, Refusal> {
        match word {
            "taken" => {
                let mut taken = Vec::with_capacity(answer.len());
                while !answer.is_empty() {
                    taken.push(delivery(answer.nested()?, self.ring)?);
                }
                Ok(taken)
            }
            // The next heartbeat makes it anew.
            "unknown" => Ok(Vec::new()),
            _ => Err(answer.strange(word).into()),
        }
    }

    /// Settles at most [`MOST_READ`]; how many were not settled before.
    pub(super) async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<u64, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(group.as_str());
            for batch in batches {
                call.arg(entry_id(*batch)).arg(batch.epoch);
            }
        };
        let (word, mut answer) = self.write(&SCRIPTS.settle, arguments).await?;
        if word == "settled" { Ok(answer.count()?) } else { Err(answer.strange(&word).into()) }
    }

    /// Gives back at most [`MOST_READ`] of the entries named with their epochs, or [`MOST_BATCHES`] of any epoch.
    pub(super) async fn give_back(
        &self,
        group: &GroupName,
        entries: impl Iterator<Item = (String, Option<u64>)>,
    ) -> Result<(), Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(group.as_str());
            for (entry, epoch) in entries {
                call.arg(entry).arg(epoch.map(|epoch| epoch.to_string()).unwrap_or_default());
            }
        };
        let (word, answer) = self.write(&SCRIPTS.give_back, arguments).await?;
        if word == "returned" { Ok(()) } else { Err(answer.strange(&word).into()) }
    }

    /// The next entries that Redis believes to be held here, at most [`MOST_BATCHES`].
    pub(super) async fn held(&self, group: &GroupName, after: &str) -> Result<Vec<String>, Refusal> {
        let keys = self.link.keys();
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(group.as_str()).arg(after).arg(MOST_BATCHES);
        };
        let mut answer = self.link.read(&SCRIPTS.held, &[&keys.outbox, &keys.groups], arguments).await?;
        let mut entries = Vec::with_capacity(answer.len());
        while !answer.is_empty() {
            entries.push(answer.text()?);
        }
        Ok(entries)
    }

    /// A step towards the bounds: what was dropped, and whether there is more to do. Under the number of the step before
    /// it is that one again.
    pub(super) async fn maintain(
        &self,
        number: u64,
        retention: Retention,
        may_drop_old: bool,
    ) -> Result<(Dropped, bool), Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(whole_ms(retention.time)).arg(retention.max_ids).arg(u8::from(may_drop_old)).arg(number);
        };
        let (word, mut answer) = self.write(&SCRIPTS.tend, arguments).await?;
        if word != "tended" {
            return Err(answer.strange(&word).into());
        }
        let more = answer.count()? == 1;
        let mut dropped = Dropped { ids: answer.count()?, batches: answer.count()?, groups: Vec::new() };
        while !answer.is_empty() {
            dropped.groups.push(group_name(&mut answer)?);
        }
        Ok((dropped, more))
    }

    /// What the outbox holds, and for which groups.
    pub(super) async fn backlog(&self) -> Result<Backlog, Refusal> {
        let keys = self.link.keys();
        let mut answer =
            self.link.read(&SCRIPTS.backlogs, &[&keys.meta, &keys.outbox, &keys.groups], |_| {}).await?;
        let ids = answer.count()?;
        let mut groups = Vec::with_capacity(answer.len());
        while !answer.is_empty() {
            let mut backlog = answer.nested()?;
            groups.push(GroupBacklog {
                group: group_name(&mut backlog)?,
                batches: backlog.count()?,
                unacked: backlog.count()?,
                oldest: Duration::from_millis(backlog.count()?),
            });
        }
        groups.sort_by(|a, b| a.group.cmp(&b.group));
        Ok(Backlog { ids, groups })
    }
}

pub(super) fn kind(ephemeral: bool) -> &'static str {
    if ephemeral { "e" } else { "-" }
}

fn group_name(answer: &mut Answer) -> Result<GroupName, Refusal> {
    let name = answer.text()?;
    name.parse().map_err(|_| answer.strange(&name).into())
}
