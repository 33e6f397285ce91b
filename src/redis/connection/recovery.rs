//! What a new session does first: Acks that Redis lost are applied again, and the pointer waits until that is done and
//! until all Acks are applied that were held before.

use std::sync::Arc;

use tracing::{error, info, warn};

use crate::core::refusal::Refusal;
use crate::metrics::Metrics;
use crate::redis::batching::request::Progress;
use crate::redis::connection::answered::{Ack, Lost};
use crate::redis::connection::link::{Link, Session};
use crate::redis::scripts::{Answer, SCRIPTS};

/// The most Acks that one script applies again: about a millisecond of Redis' time.
const AT_ONCE: usize = 1_000;

impl Link {
    /// How far its requests are answered.
    pub(crate) fn progress(&self) -> &Arc<Progress> {
        &self.shared().progress
    }

    /// Where it counts.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.shared().options.metrics
    }

    /// Its ring.
    pub(crate) fn ring(&self) -> u16 {
        self.shared().options.ring
    }

    /// Counts what went wrong with Redis though it answered.
    pub(crate) fn count_loss(&self) {
        self.shared().options.metrics.count_redis_error("lost");
    }
}

/// Reports what Redis has lost, and applies its Acks again.
pub(crate) async fn reapply(link: &Link, session: &Session, lost: Lost) {
    let losses = &link.metrics().redis_losses;
    let Lost { chunks, added, acks } = lost;
    losses.writes.inc_by(chunks);
    losses.added.inc_by(added);
    losses.acked.inc_by(acks.len() as u64);
    link.count_loss();
    let mut reapplied = 0;
    for part in acks.chunks(AT_ONCE) {
        match reapply_part(link, session, part).await {
            Ok(count) => reapplied += count,
            Err(refusal) => {
                warn!(%refusal, "acknowledgements that Redis lost could not be applied again: their messages time out");
                break;
            }
        }
    }
    losses.reapplied.inc_by(reapplied);
    error!(
        ring = link.ring(),
        chunks,
        added,
        acked = acks.len(),
        reapplied,
        "Redis has lost writes that it had answered, in a failover or a restart: messages that were added time out \
         nowhere (logic nodes add them again), acknowledged ones were acknowledged again where they are in flight; see \
         docs/REDIS.md on what a failover may lose"
    );
}

async fn reapply_part(link: &Link, session: &Session, acks: &[Ack]) -> Result<u64, Refusal> {
    let keys = link.keys();
    let names: Vec<&str> =
        [&keys.messages, &keys.ticks].into_iter().chain(keys.lists()).map(String::as_str).collect();
    let letters: String = acks.iter().map(|ack| if ack.is_withdrawal { 'w' } else { 'k' }).collect();
    let call = link.write_in(session, &SCRIPTS.reapply, &names, |call| {
        call.arg(letters);
        for Ack { message, added_ms, .. } in acks {
            call.arg(message.to_string()).arg(added_ms);
        }
    });
    let mut answer: Answer = call.await?;
    match answer.text()?.as_str() {
        "reapplied" => Ok(answer.count()?),
        word => Err(answer.strange(word).into()),
    }
}

/// The gauge of held acknowledgements, of which this ring shows a part.
pub(crate) struct Held {
    metrics: Arc<Metrics>,
    shown: i64,
}

impl Held {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Held {
        Held { metrics, shown: 0 }
    }

    /// Shows so many.
    pub(crate) fn show(&mut self, held: u64) {
        let held = i64::try_from(held).unwrap_or(i64::MAX);
        self.metrics.held_acks.add(held - self.shown);
        self.shown = held;
    }
}

/// Tells Redis that the pointer need not wait for this sidecar any longer.
pub(crate) async fn end_wait(link: &Link, session: &Session) {
    let keys = link.keys();
    let names = [keys.held_acks.as_str()];
    let noted = link.write_in(session, &SCRIPTS.acks_applied, &names, |call| {
        call.arg(&keys.sidecar);
    });
    match noted.await {
        Ok(_) => info!(ring = link.ring(), "all acknowledgements that were held are applied"),
        Err(refusal) => warn!(%refusal, "the leader was not told that all held acknowledgements are applied"),
    }
}
