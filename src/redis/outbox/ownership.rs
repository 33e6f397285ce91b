//! Takes batches of a group from the outbox, gives them back, and settles them: a settled batch is not delivered to the
//! group again. Records which batches this sidecar holds.

use std::collections::HashSet;
use std::sync::Arc;

use redis::ToRedisArgs;
use tokio::sync::Mutex;
use tracing::error;

use crate::core::{BatchId, Delivery, GroupName, Promise, Refusal, Settled};
use crate::redis::outbox::entry::{delivery, entry_id, ids_and_epochs};
use crate::redis::outbox::state::Ownership;
use crate::redis::outbox::{MAX_READ, MOST_BATCHES, RedisOutbox};
use crate::redis::scripts::{Answer, SCRIPTS, Script};

impl RedisOutbox {
    pub(super) async fn settle_part(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let arguments = (group.as_str(), ids_and_epochs(batches));
        let count = self.run_expecting("settled", &SCRIPTS.settle, arguments).await?.count()?;
        // If the last subscriber of the group has left this sidecar, there is no record to update.
        let owned = self.owned.get(group).map(|owned| Arc::clone(&owned));
        if let Some(owned) = owned {
            owned.lock().await.remove(batches);
        }
        Ok(Settled { count, batches: batches.to_vec(), refusal: None })
    }

    /// Gives batches back to the outbox, so that other sidecars can take them. If `lent` is set, also adds the batches
    /// to `Ownership::lent`: then `take` skips them at this sidecar, and only `retake` delivers them here again. If
    /// Redis does not answer, a later call of `recover` gives the batches back.
    pub(super) async fn give_back(
        &self,
        group: &GroupName,
        batches: &[BatchId],
        lent: bool,
    ) -> Result<(), Refusal> {
        if batches.is_empty() {
            return Ok(());
        }
        let owned = self.ownership(group);
        let mut owned = owned.lock().await;
        let verified_in = owned.verified_in.take();
        owned.remove(batches);
        if lent {
            owned.lent.extend(batches);
        }
        for part in batches.chunks(MAX_READ) {
            let arguments = (&*self.link.keys.sidecar, group.as_str(), ids_and_epochs(part));
            self.run_expecting("returned", &SCRIPTS.return_batches, arguments).await?;
        }
        owned.verified_in = verified_in;
        Ok(())
    }

    /// Runs `recover` for each group that has an `Ownership`.
    pub(super) async fn recover_all(&self) -> Result<(), Refusal> {
        let all: Vec<_> =
            self.owned.iter().map(|owned| (owned.key().clone(), Arc::clone(owned.value()))).collect();
        for (group, owned) in all {
            self.recover(&group, &mut *owned.lock().await).await?;
        }
        Ok(())
    }

    /// Corrects a difference between Redis and `owned`, for example after a lost answer. Every batch of the group that
    /// Redis has assigned to this sidecar, and that `owned` does not contain, goes back to the outbox. Does nothing if
    /// `owned` is known to agree with Redis in this session.
    pub(super) async fn recover(&self, group: &GroupName, owned: &mut Ownership) -> Result<(), Refusal> {
        let link = &self.link;
        let session = link.session()?.number;
        if owned.verified_in == Some(session) {
            return Ok(());
        }
        let held = owned.held.iter().map(|batch| entry_id(*batch));
        let known: HashSet<String> = held.chain(owned.unreadable.iter().cloned()).collect();
        let keys: &[&str] = &[&link.keys.outbox, &link.keys.groups];
        let mut last = String::new();
        loop {
            let arguments = (&*self.link.keys.sidecar, group.as_str(), &last, MOST_BATCHES);
            let page = link.read(&SCRIPTS.list_held_batches, keys, arguments).await?.rest(Answer::text)?;
            // The epoch of these entries is unknown. With an empty epoch, the script accepts any epoch.
            let unknown: Vec<_> =
                page.iter().filter(|entry| !known.contains(*entry)).map(|entry| (entry, "")).collect();
            if !unknown.is_empty() {
                let arguments = (&*self.link.keys.sidecar, group.as_str(), unknown);
                self.run_expecting("returned", &SCRIPTS.return_batches, arguments).await?;
            }
            if page.len() < MOST_BATCHES {
                owned.verified_in = Some(session);
                return Ok(());
            }
            last.clone_from(&page[MOST_BATCHES - 1]);
        }
    }

    /// Returns the `Ownership` of a group, and creates an empty one if there is none.
    pub(super) fn ownership(&self, group: &GroupName) -> Arc<Mutex<Ownership>> {
        Arc::clone(&self.owned.entry(group.clone()).or_default())
    }

    /// Runs a script that takes batches for this sidecar, and records them in `owned`. `again` contains the batches
    /// that a `retake` asks for. If the answer lacks one of them, it is removed from `owned`. Returns the number of
    /// entries in the answer, and the batches that this version can read.
    pub(super) async fn claim(
        &self,
        group: &GroupName,
        owned: &mut Ownership,
        script: &'static Script,
        arguments: impl ToRedisArgs,
        again: &[BatchId],
    ) -> Result<(usize, Vec<Delivery>), Refusal> {
        let verified_in = owned.verified_in.take();
        let claimed = async {
            let (word, mut answer) = self.run(script, &[], arguments).await?;
            match word.as_str() {
                "taken" => Ok(answer.rest(|answer| delivery(answer.nested()?, self.link.ring))?),
                // Redis has lost the group. The next inspection by the leader, or the next heartbeat, creates it again.
                "unknown" => Ok(Vec::new()),
                word => Err(Refusal::from(answer.strange(word))),
            }
        };
        let claimed = claimed.await;
        if !claimed.as_ref().is_err_and(|refusal| refusal.reason.promise() == Promise::OutcomeUnknown) {
            owned.verified_in = verified_in;
        }
        let claimed = claimed?;
        owned.remove(again);
        let (found, mut taken) = (claimed.len(), Vec::with_capacity(claimed.len()));
        for (entry, delivery) in claimed {
            match delivery {
                Ok(delivery) => {
                    owned.held.insert(delivery.batch.id);
                    taken.push(delivery);
                }
                Err(fault) => {
                    let outbox = &self.link.keys.outbox;
                    error!(
                        ring = self.link.ring,
                        %group,
                        entry,
                        why = fault.text,
                        "a batch in the outbox cannot be read and is not delivered: update this sidecar if a newer one \
                         wrote it; `redis-cli XACK {outbox} {group} {entry}` removes it from the group"
                    );
                    owned.unreadable.insert(entry);
                }
            }
        }
        Ok((found, taken))
    }
}
