//! Ownership of batches: takes, settles and returns batches, and keeps track of those that this sidecar holds.

use std::collections::HashSet;
use std::sync::Arc;

use dashmap::DashMap;
use futures_util::stream::{self, StreamExt};
use redis::ToRedisArgs;
use tokio::sync::Mutex;
use tracing::error;

use crate::core::batch::{BatchId, Delivery};
use crate::core::group::GroupName;
use crate::core::outbox::{MAX_RETAKEN, Settled};
use crate::core::refusal::{Promise, Reason, Refusal};
use crate::redis::context::RingContext;
use crate::redis::outbox::calls::{MAX_READ, MOST_BATCHES, run, run_expecting};
use crate::redis::outbox::entry::{Unreadable, delivery, entry_id};
use crate::redis::scripts::{Answer, SCRIPTS, Script};

/// So many scripts that settle are under way at once.
const SETTLED_TOGETHER: usize = 32;

const _: () = assert!(MAX_RETAKEN <= MAX_READ);

/// The batches of one group that this sidecar knows to hold.
#[derive(Debug, Default)]
pub(super) struct Ownership {
    held: HashSet<BatchId>,
    /// Batches that were given back, and are left to others until this sidecar takes them again.
    lent: HashSet<BatchId>,
    /// Entries that are held and cannot be read: they stay here, so that no sidecar takes them again and again.
    unreadable: HashSet<String>,
    /// The session in which Redis was known to hold no more than this for the sidecar. None while a script that changes
    /// it is under way, and after its answer was lost or nobody waited for it.
    verified_in: Option<u64>,
}

impl Ownership {
    pub(super) fn remove(&mut self, batches: &[BatchId]) {
        for batch in batches {
            self.held.remove(batch);
            self.lent.remove(batch);
        }
    }
}

/// The ownership of batches in all groups with subscribers here.
pub(super) struct Ownerships {
    context: Arc<RingContext>,
    /// Each is locked while a script changes it in Redis.
    owned: DashMap<GroupName, Arc<Mutex<Ownership>>>,
}

impl Ownerships {
    pub(super) fn new(context: Arc<RingContext>) -> Ownerships {
        Ownerships { context, owned: DashMap::new() }
    }

    /// Forgets the batches of a group that is left or deleted.
    pub(super) fn forget(&self, group: &GroupName) {
        self.owned.remove(group);
    }

    /// Takes the next batches. One script alone, unless it finds only entries that cannot be read: its batches are
    /// delivered before there are more, and the lock is soon free again.
    pub(super) async fn take(&self, group: &GroupName, window: u64) -> Result<Vec<Delivery>, Refusal> {
        let owned = self.ownership(group);
        let mut owned = owned.lock().await;
        self.recover(group, &mut owned).await?;
        loop {
            let lent: Vec<String> = owned.lent.iter().map(|batch| entry_id(*batch)).collect();
            let arguments = (self.context.sidecar(), group.as_str(), window, MAX_READ, lent);
            let (found, taken) = self.claim(group, &mut owned, &SCRIPTS.take, arguments, &[]).await?;
            if found == 0 || !taken.is_empty() {
                return Ok(taken);
            }
        }
    }

    /// Takes batches once more, as far as they are still held here, or by no sidecar.
    pub(super) async fn retake(&self, group: &GroupName, batches: &[BatchId]) -> Result<Vec<Delivery>, Refusal> {
        if batches.is_empty() {
            return Ok(Vec::new());
        }
        let owned = self.ownership(group);
        let mut owned = owned.lock().await;
        // If the answer is lost, Redis may hold lent batches for this sidecar: then it gives them back, for others to
        // take.
        let arguments = (self.context.sidecar(), group.as_str(), ids_and_epochs(batches));
        let (_, taken) = self.claim(group, &mut owned, &SCRIPTS.retake, arguments, batches).await?;
        Ok(taken)
    }

    /// Settles batches. All parts are sent together, so that many batches hold the group up no longer than few.
    pub(super) async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let parts: Vec<_> = batches.chunks(MAX_READ).map(|part| self.settle_part(group, part)).collect();
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
                    Refusal::new(Reason::StoreTimeout, format!("a part is settled; of the rest: {text}"))
                };
                Ok(Settled { refusal: refused.map(of_the_rest), ..sum })
            }
        }
    }

    async fn settle_part(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let arguments = (group.as_str(), ids_and_epochs(batches));
        let count = run_expecting(&self.context, "settled", &SCRIPTS.settle, arguments).await?.count()?;
        // A group that was left has no ownership any more.
        let owned = self.owned.get(group).map(|owned| Arc::clone(&owned));
        if let Some(owned) = owned {
            owned.lock().await.remove(batches);
        }
        Ok(Settled { count, batches: batches.to_vec(), refusal: None })
    }

    /// Gives batches back. If Redis does not answer, `recover` does it later.
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
            let arguments = (self.context.sidecar(), group.as_str(), ids_and_epochs(part));
            run_expecting(&self.context, "returned", &SCRIPTS.give_back, arguments).await?;
        }
        owned.verified_in = verified_in;
        Ok(())
    }

    /// Returns the batches that Redis holds for this sidecar and that it does not know, in all groups.
    pub(super) async fn recover_all(&self) -> Result<(), Refusal> {
        let all: Vec<_> =
            self.owned.iter().map(|owned| (owned.key().clone(), Arc::clone(owned.value()))).collect();
        for (group, owned) in all {
            self.recover(&group, &mut *owned.lock().await).await?;
        }
        Ok(())
    }

    async fn recover(&self, group: &GroupName, owned: &mut Ownership) -> Result<(), Refusal> {
        let link = &self.context.link;
        let session = link.session()?.number;
        if owned.verified_in == Some(session) {
            return Ok(());
        }
        let held = owned.held.iter().map(|batch| entry_id(*batch));
        let known: HashSet<String> = held.chain(owned.unreadable.iter().cloned()).collect();
        let keys: [&str; 2] = [&link.keys().outbox, &link.keys().groups];
        let mut last = String::new();
        loop {
            let page = link.read(&SCRIPTS.held, &keys, |call| {
                call.arg((self.context.sidecar(), group.as_str(), &last, MOST_BATCHES));
            });
            let page = page.await?.rest(Answer::text)?;
            // Without an epoch, it is an entry of any.
            let unknown: Vec<_> =
                page.iter().filter(|entry| !known.contains(*entry)).map(|entry| (entry, "")).collect();
            if !unknown.is_empty() {
                let arguments = (self.context.sidecar(), group.as_str(), unknown);
                run_expecting(&self.context, "returned", &SCRIPTS.give_back, arguments).await?;
            }
            if page.len() < MOST_BATCHES {
                owned.verified_in = Some(session);
                return Ok(());
            }
            last.clone_from(&page[MOST_BATCHES - 1]);
        }
    }

    fn ownership(&self, group: &GroupName) -> Arc<Mutex<Ownership>> {
        Arc::clone(&self.owned.entry(group.clone()).or_default())
    }

    /// Runs a script that takes batches. Returns how many entries it found, and those that can be read, which this
    /// sidecar holds from now on. Of the batches named `again` it holds no others.
    async fn claim(
        &self,
        group: &GroupName,
        owned: &mut Ownership,
        script: &'static Script,
        arguments: impl ToRedisArgs,
        again: &[BatchId],
    ) -> Result<(usize, Vec<Delivery>), Refusal> {
        let verified_in = owned.verified_in.take();
        let entries = self.claimed(script, arguments).await;
        if !entries.as_ref().is_err_and(|refusal| refusal.reason.promise() == Promise::OutcomeUnknown) {
            owned.verified_in = verified_in;
        }
        let entries = entries?;
        owned.remove(again);
        let (found, mut taken) = (entries.len(), Vec::with_capacity(entries.len()));
        for entry in entries {
            match entry {
                Ok(delivery) => {
                    owned.held.insert(delivery.batch.id);
                    taken.push(delivery);
                }
                Err(unreadable) => self.keep_unreadable(group, owned, unreadable),
            }
        }
        Ok((found, taken))
    }

    async fn claimed(
        &self,
        script: &'static Script,
        arguments: impl ToRedisArgs,
    ) -> Result<Vec<Result<Delivery, Unreadable>>, Refusal> {
        let (word, mut answer) = run(&self.context, script, &[], arguments).await?;
        match word.as_str() {
            "taken" => Ok(answer.rest(|answer| delivery(answer.nested()?, self.context.ring))?),
            // The next heartbeat makes the group again.
            "unknown" => Ok(Vec::new()),
            word => Err(answer.strange(word).into()),
        }
    }

    /// Reports an entry that cannot be read. This sidecar holds it, so that no other takes it.
    fn keep_unreadable(&self, group: &GroupName, owned: &mut Ownership, Unreadable { entry, why }: Unreadable) {
        let outbox = &self.context.link.keys().outbox;
        error!(
            ring = self.context.ring,
            %group,
            entry,
            why,
            "a batch in the outbox cannot be read and is not delivered: update this sidecar if a newer one wrote it; \
             `redis-cli XACK {outbox} {group} {entry}` removes it from the group"
        );
        owned.unreadable.insert(entry);
    }
}

fn ids_and_epochs(batches: &[BatchId]) -> Vec<(String, u64)> {
    batches.iter().map(|batch| (entry_id(*batch), batch.epoch)).collect()
}
