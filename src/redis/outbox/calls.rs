//! The scripts of the outbox, each as a function of this sidecar.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;

use super::entry::{Unreadable, delivery, entry_id};
use super::sidecars::Beats;
use crate::core::batch::{BatchId, Delivery};
use crate::core::group::{GroupName, MAX_GROUPS};
use crate::core::outbox::{Backlog, Dropped, GroupBacklog, MOST_AGAIN, Opening, Retention, Start};
use crate::core::refusal::{Reason, Refusal};
use crate::redis::link::{LINK_LIFETIME, Link};
use crate::redis::office::whole_ms;
use crate::redis::script::{Answer, SCRIPTS, Script};

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

/// A group that was joined here, as the beat tells it.
pub(super) struct Joined<'a> {
    pub(super) group: &'a GroupName,
    pub(super) ephemeral: bool,
    /// Whether it has a subscriber now.
    pub(super) attended: bool,
}

/// What a beat found.
pub(super) struct Beaten {
    /// How many groups were missing and had to be made anew.
    pub(super) made: u64,
    /// All sidecars, this one too.
    pub(super) sidecars: Vec<Beats>,
}

/// What one step of a burial did.
pub(super) struct Burial {
    pub(super) freed: u64,
    pub(super) more: bool,
}

impl Calls {
    async fn write(
        &self,
        script: &'static Script,
        arguments: impl FnOnce(&mut Cmd),
    ) -> Result<(String, Answer), Refusal> {
        let keys = self.link.keys();
        let keys: [&str; 5] = [&keys.outbox, &keys.groups, &keys.members, &keys.sidecars, &keys.news];
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
                let now_ms = answer.count()?;
                let mut taken = Vec::with_capacity(answer.len());
                while !answer.is_empty() {
                    taken.push(delivery(answer.nested()?, self.ring, now_ms)?);
                }
                Ok(taken)
            }
            // The next beat makes it anew.
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
    pub(super) async fn tend(
        &self,
        number: u64,
        retention: Retention,
        attended: &[GroupName],
    ) -> Result<(Dropped, bool), Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(whole_ms(retention.time)).arg(retention.max_ids).arg(number);
            for group in attended {
                call.arg(group.as_str());
            }
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

    /// Tells that this sidecar lives, and of which groups it has subscribers.
    pub(super) async fn beat<'a>(&self, joined: impl Iterator<Item = Joined<'a>>) -> Result<Beaten, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(whole_ms(LINK_LIFETIME)).arg(MOST_BATCHES);
            for Joined { group, ephemeral, attended } in joined {
                call.arg(group.as_str()).arg(kind(ephemeral)).arg(u8::from(attended));
            }
        };
        let (word, mut answer) = self.write(&SCRIPTS.beat, arguments).await?;
        if word != "beaten" {
            return Err(answer.strange(&word).into());
        }
        let mut beaten = Beaten { made: answer.count()?, sidecars: Vec::with_capacity(answer.len() / 2) };
        while !answer.is_empty() {
            beaten.sidecars.push((answer.text()?, answer.count()?));
        }
        Ok(beaten)
    }

    /// A step of the burial of a sidecar; none if it lives.
    pub(super) async fn bury(&self, dead: &Beats) -> Result<Option<Burial>, Refusal> {
        self.bury_at(&dead.0, &dead.1.to_string()).await
    }

    /// A step of our own departure.
    pub(super) async fn depart(&self) -> Result<Option<Burial>, Refusal> {
        self.bury_at(&self.sidecar, "goes").await
    }

    async fn bury_at(&self, sidecar: &str, beats: &str) -> Result<Option<Burial>, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(sidecar).arg(beats).arg(MOST_BATCHES);
        };
        let (word, mut answer) = self.write(&SCRIPTS.bury, arguments).await?;
        match word.as_str() {
            "buried" => Ok(Some(Burial { freed: answer.count()?, more: false })),
            "more" => Ok(Some(Burial { freed: answer.count()?, more: true })),
            "alive" => Ok(None),
            _ => Err(answer.strange(&word).into()),
        }
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

fn kind(ephemeral: bool) -> &'static str {
    if ephemeral { "e" } else { "-" }
}

fn group_name(answer: &mut Answer) -> Result<GroupName, Refusal> {
    let name = answer.text()?;
    name.parse().map_err(|_| answer.strange(&name).into())
}
