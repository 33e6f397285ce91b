//! The scripts by which sidecars tell that they live, and the leader looks at all of them.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::Cmd;

use crate::core::group::GroupName;
use crate::core::refusal::Refusal;
use crate::redis::leader::term::whole_ms;
use crate::redis::outbox::calls::{Calls, MOST_BATCHES, kind};
use crate::redis::outbox::sidecars::Beats;
use crate::redis::scripts::SCRIPTS;

/// The most ephemeral groups that one script deletes with a sidecar.
const MOST_DELETED: usize = 16;

/// How long the link of a dead sidecar is kept, in time that the wheel has turned: one that was paused finds its last
/// answers there.
const LINK_LIFETIME: Duration = Duration::from_secs(25 * 3_600);

/// The most old links that are deleted after one look.
const MOST_LINKS: usize = 16;

/// What a heartbeat found.
pub(super) struct Beaten {
    /// The bounds that the leader keeps; empty where nobody has led yet.
    pub(super) bounds: String,
    /// The sidecar that led last.
    pub(super) leader: Option<Beats>,
}

/// What the leader's look found.
pub(super) struct Inspected {
    /// How many groups were missing and had to be made anew.
    pub(super) made: u64,
    /// Dead sidecars whose links are too old.
    pub(super) departed: Vec<String>,
    /// All sidecars, this one too.
    pub(super) sidecars: Vec<Beats>,
}

/// What one step of freeing what a sidecar held did.
pub(super) struct Reaped {
    pub(super) freed: u64,
    pub(super) more: bool,
}

impl Calls {
    /// Tells that this sidecar lives. None where it has to announce the groups first.
    pub(super) async fn heartbeat(&self, groups: &BTreeMap<GroupName, bool>) -> Result<Option<Beaten>, Refusal> {
        let told: String = groups.iter().map(|(group, ephemeral)| entry_of(group, *ephemeral)).collect();
        let mut answer = self
            .link
            .write(&SCRIPTS.heartbeat, &[&self.link.keys().sidecars], |call| {
                call.arg(&self.sidecar).arg(told);
            })
            .await?;
        match answer.text()?.as_str() {
            "beaten" => {
                let (bounds, leader, beats) = (answer.text()?, answer.text()?, answer.text()?);
                Ok(Some(Beaten { bounds, leader: beats.parse().ok().map(|beats| (leader, beats)) }))
            }
            "differs" => Ok(None),
            word => Err(answer.strange(word).into()),
        }
    }

    /// Tells which groups were joined here, ephemeral or not; returns how many were missing and had to be made anew.
    pub(super) async fn announce(&self, groups: &BTreeMap<GroupName, bool>) -> Result<u64, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(MOST_BATCHES);
            for (group, ephemeral) in groups {
                call.arg(group.as_str()).arg(kind(*ephemeral));
            }
        };
        let (word, mut answer) = self.write(&SCRIPTS.announce, arguments).await?;
        if word == "announced" { Ok(answer.count()?) } else { Err(answer.strange(&word).into()) }
    }

    /// Looks at all sidecars, and repairs what was lost of the groups.
    pub(super) async fn inspect(&self) -> Result<Inspected, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(&self.sidecar).arg(whole_ms(LINK_LIFETIME)).arg(MOST_LINKS);
        };
        let (word, mut answer) = self.write(&SCRIPTS.inspect, arguments).await?;
        if word != "inspected" {
            return Err(answer.strange(&word).into());
        }
        let (made, links) = (answer.count()?, answer.count()?);
        let departed = (0..links).map(|_| answer.text()).collect::<Result<_, _>>()?;
        let mut sidecars = Vec::with_capacity(answer.len() / 2);
        while !answer.is_empty() {
            sidecars.push((answer.text()?, answer.count()?));
        }
        Ok(Inspected { made, departed, sidecars })
    }

    /// Deletes the link of a sidecar that has been dead for long.
    pub(super) async fn drop_link(&self, sidecar: &str) -> Result<(), Refusal> {
        let link = self.link.keys().link_of(sidecar);
        let arguments = |call: &mut Cmd| {
            call.arg(sidecar);
        };
        self.write_with(Some(&link), &SCRIPTS.drop_link, arguments).await.map(drop)
    }

    /// A step of freeing what a dead sidecar held; none if it lives.
    pub(super) async fn reap(&self, dead: &Beats) -> Result<Option<Reaped>, Refusal> {
        self.reap_at(&dead.0, &dead.1.to_string()).await
    }

    /// The same for this sidecar, as it ends.
    pub(super) async fn depart(&self) -> Result<Option<Reaped>, Refusal> {
        self.reap_at(&self.sidecar, "ends").await
    }

    async fn reap_at(&self, sidecar: &str, beats: &str) -> Result<Option<Reaped>, Refusal> {
        let arguments = |call: &mut Cmd| {
            call.arg(sidecar).arg(beats).arg(MOST_BATCHES).arg(MOST_DELETED);
        };
        let held_acks = &self.link.keys().held_acks;
        let (word, mut answer) = self.write_with(Some(held_acks), &SCRIPTS.reap, arguments).await?;
        match word.as_str() {
            "reaped" => Ok(Some(Reaped { freed: answer.count()?, more: false })),
            "more" => Ok(Some(Reaped { freed: answer.count()?, more: true })),
            "alive" => Ok(None),
            _ => Err(answer.strange(&word).into()),
        }
    }
}

/// A group as the entry of its sidecar has it.
fn entry_of(group: &GroupName, ephemeral: bool) -> String {
    format!(" {group}{}", if ephemeral { "/e" } else { "" })
}
