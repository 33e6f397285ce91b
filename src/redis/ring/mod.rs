//! Implements the ring in Redis: requests, the pointer, expiry and the status.
//!
//! Scripts determine every outcome by comparing a message's deadline with the pointer in `meta`. Redis runs one script
//! at a time. So an Ack and a timeout have one winner, as in the memory ring.
//!
//! # Time
//!
//! `due_ms` in `meta` is the time, by Redis' clock, at which the pointer was due to reach its tick. An add computes the
//! tick due from `due_ms`. The script `advance` never moves the pointer before `due_ms` plus a tick, and sets the next
//! `due_ms` no earlier. Both scripts use the same clock, so no network delay makes a message early:
//!
//! ```text
//!   tick due at x = pointer + (time(x) - due) / tick      the pointer moves only at time >= due + tick
//!   next due     >= due + tick                            hence: expires at time > time(x) + k ticks
//! ```
//!
//! The leader waits by its own monotonic clock, as long as the answer of the last script says. If the clocks differ by
//! more than [`CLOCK_SLACK`](crate::redis::leader::term::CLOCK_SLACK), one of them was set. Then the monotonic clock
//! determines the time.

mod advance;
mod publish;
mod repair;
mod repair_state;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

use self::repair_state::Repair;
use crate::core::{
    Advance, Completions, ConnectionId, DrainOutcome, PublishStep, Reason, Refusal, Request, RequestBatch, Ring,
    RingStatus, Submitted, Tick, Wheel,
};
use crate::redis::batching::driver::send_requests;
use crate::redis::batching::incoming_requests::Inbox;
use crate::redis::connection::errors::refusal_while_unreachable;
use crate::redis::connection::link::Link;
use crate::redis::keys::MAX_CATCH_UP;
use crate::redis::leader::term::WATCH;
use crate::redis::scripts::{Answer, SCRIPTS};

/// How often the watch calls Redis. The watch misses at most this much of a stall.
const WATCH_EVERY: Duration = Duration::from_millis(25);

/// A ring that lives in Redis.
pub(super) struct RedisRing {
    link: Arc<Link>,
    /// The links of all rings. While all links are up, the number of unanswered Acks is not limited.
    links: Arc<[Arc<Link>]>,
    inbox: Arc<Inbox>,
    draining: AtomicBool,
    repair: Mutex<Repair>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl RedisRing {
    pub(super) fn new(link: Arc<Link>, links: Arc<[Arc<Link>]>) -> RedisRing {
        let inbox = Arc::new(Inbox::default());
        let sending = tokio::spawn(send_requests(Arc::clone(&link), Arc::clone(&inbox)));
        let tasks = [sending, tokio::spawn(watch(Arc::clone(&link)))].map(AbortOnDropHandle::new);
        let draining = AtomicBool::new(false);
        RedisRing { link, links, inbox, draining, repair: Mutex::default(), _tasks: tasks }
    }

    /// Counts the messages of a del until they are answered. Refuses the del if this sidecar holds too many Acks.
    fn count_acks(&self, request: &mut Request) {
        let count = request.range().len() as u64;
        let unanswered = &self.link.progress.unanswered_acks;
        let max_held_acks = self.link.options.max_held_acks;
        let before = unanswered.fetch_add(count, Ordering::Relaxed);
        if before + count > max_held_acks && self.links.iter().any(|link| !link.is_up()) {
            unanswered.fetch_sub(count, Ordering::Relaxed);
            request.refusal = Some(Arc::new(Refusal::new(
                Reason::MaxHeldAcks,
                format!(
                    "Redis is unreachable, and {before} acknowledgements are held already, with a limit of \
                     {max_held_acks}: send these again when Redis is reachable, or raise --max-held-acks"
                ),
            )));
        }
    }
}

#[async_trait]
impl Ring for RedisRing {
    fn wheel(&self) -> Wheel {
        self.link.options.wheel
    }

    fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
        _now: Instant,
    ) -> Submitted {
        if self.draining.load(Ordering::Relaxed) {
            batch.refuse_adds(&Refusal::new(
                Reason::Draining,
                "this sidecar is draining and takes no new messages: add them through another one",
            ));
        } else if !self.link.is_up() {
            batch.refuse_adds(&refusal_while_unreachable());
        }
        for request in &mut batch.requests {
            if !request.operation.is_add() && request.refusal.is_none() {
                self.count_acks(request);
            }
        }
        let mut refused = batch.requests.iter().filter(|request| request.refusal.is_some()).peekable();
        if refused.peek().is_some()
            && let Some(waker) =
                completions.put(|completed| refused.for_each(|request| completed.push_from(batch, request)))
        {
            waker.wake();
        }
        self.inbox.push(batch, connection, completions);
        Submitted::Pending
    }

    async fn advance(&self, now: Instant) -> Result<Advance, Refusal> {
        self.move_pointer(now).await
    }

    async fn publish_expired(&self, _now: Instant) -> Result<PublishStep, Refusal> {
        self.publish_next().await
    }

    async fn drain(&self, _now: Instant) -> Result<DrainOutcome, Refusal> {
        self.draining.store(true, Ordering::Relaxed);
        Ok(DrainOutcome::Kept)
    }

    async fn status(&self, now: Instant) -> Result<RingStatus, Refusal> {
        let link @ Link { ring, options, identity, term: current, .. } = &*self.link;
        let keys = &link.keys;
        let names = keys.and_lists(&[&keys.meta, &keys.lease]);
        let mut answer = link.read(&SCRIPTS.status, &names, None::<&str>).await?;
        let wheel = options.wheel;
        let mut status = RingStatus { ring: *ring, slots: vec![0; wheel.slots().into()], ..RingStatus::default() };
        if answer.is_empty() {
            return Ok(status);
        }
        status.waits = link.confirmed(&*link.session()?).err().map(|fault| fault.text);
        status.pointer = Tick(answer.count()?);
        let lag = Duration::from_millis(answer.count()?).saturating_sub(wheel.tick_length());
        status.pointer_lag_seconds = lag.as_secs_f64();
        status.epoch = answer.count()?;
        let (holder, leader) = (answer.text()?, answer.text()?);
        let age = Duration::from_millis(answer.count()?);
        if !holder.is_empty() {
            (status.leader, status.lease_age_seconds) = (Some(leader), Some(age.as_secs_f64()));
        }
        status.leads =
            holder == identity.token && current.lasting(now).is_some_and(|term| term.epoch == status.epoch);
        status.in_flight = answer.count()?;
        let lists = answer.rest(Answer::count)?;
        let list = |tick: u64| {
            let index = usize::try_from(tick % lists.len() as u64).unwrap_or_default();
            lists.get(index).copied().unwrap_or_default()
        };
        status.closing = list(status.pointer.0);
        let farthest = status.pointer.0 + u64::from(wheel.slots() + MAX_CATCH_UP);
        for tick in status.pointer.0 + 1..=farthest {
            status.slots[wheel.slot(Tick(tick))] += list(tick);
        }
        Ok(status)
    }
}

/// Calls Redis before each move of the pointer, if this sidecar leads, to detect stalls. Never ends.
///
/// Without these calls, a leader without client requests would not notice a stall just before a tick expires. But Acks
/// may wait at the other sidecars in such a stall.
async fn watch(link: Arc<Link>) {
    let link @ Link { term, .. } = &*link;
    loop {
        let now = link.clock.now();
        let early = term.get().map_or(WATCH, |term| term.next.at.saturating_duration_since(now + WATCH));
        if early.is_zero() {
            if let Ok(session) = link.session() {
                link.probe(&session).await;
            }
            tokio::time::sleep(WATCH_EVERY).await;
        } else {
            // During this sleep the leader, and the time of the move, may change.
            tokio::time::sleep(early.min(WATCH)).await;
        }
    }
}
