//! Implements a ring in Redis: accepts requests, moves the pointer, publishes expired ticks and reads the status.
//!
//! The deadline of a message is a tick. The pointer, a field of the Redis hash `meta`, is the tick that expires next.
//! Scripts determine the outcome of a message by comparing its deadline with the pointer. Redis runs one script at a
//! time. So if an Ack and a timeout race, exactly one of them wins.
//!
//! # Time
//!
//! `due_ms`, another field of `meta`, is the time by Redis' clock at which the pointer was due to reach its tick. The
//! script that adds a message computes from `due_ms` which tick is due now, and counts the deadline from that tick.
//! Unless a clock was set, the script `advance` moves the pointer at `due_ms` plus one tick or later. The new `due_ms`
//! is also at least one tick later. Both scripts use Redis' clock, so no network delay makes a message time out early.
//! For a message that is added at the time `x`, with an ack timeout of `k` ticks:
//!
//! ```text
//!   tick due at x = pointer + (x - due_ms) / tick, rounded down      time of the next move >= due_ms + tick
//!   deadline      = tick due at x + k                                next due_ms           >= due_ms + tick
//!
//!   hence: time at which the deadline expires > x + k * tick
//! ```
//!
//! If `advance` moves the pointer, or finds that the move is not due yet, its answer contains the time until the next
//! move. The leader waits for this time by its own monotonic clock. If the clocks of the leader and of Redis differ by
//! more than [`CLOCK_SLACK`](crate::redis::leader::term::CLOCK_SLACK) within a tick, one of them was set. Then the
//! monotonic clock determines when the pointer moves.

mod advance;
mod get;
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
    Advance, Completions, ConnectionId, DrainOutcome, Message, MessageState, PublishStep, Reason, Refusal,
    Request, RequestBatch, Ring, RingStatus, Submitted, Tick, Wheel,
};
use crate::redis::batching::driver::send_requests;
use crate::redis::batching::incoming_requests::Inbox;
use crate::redis::connection::errors::refusal_while_unreachable;
use crate::redis::connection::link::Link;
use crate::redis::keys::MAX_CATCH_UP;
use crate::redis::leader::term::WATCH;
use crate::redis::scripts::{Answer, SCRIPTS};

/// The pause between two calls of `watch` to Redis. A stall may begin in this pause, and its measured length is then
/// too short by at most this pause.
const WATCH_EVERY: Duration = Duration::from_millis(25);

/// A ring in Redis, as one sidecar uses it.
pub(super) struct RedisRing {
    link: Arc<Link>,
    /// The links, that is the connections to Redis, of all rings. The number of unanswered Acks is limited only while
    /// one of these links is down.
    links: Arc<[Arc<Link>]>,
    /// The requests that wait until a separate task sends them to Redis.
    inbox: Arc<Inbox>,
    /// Whether this sidecar refuses adds because it is shutting down.
    draining: AtomicBool,
    /// The repair of tick sets that Redis has lost. Used only by the leader.
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

    /// Adds the messages of a DelMsg to the number of unanswered Acks. If that number exceeds the limit and the link of
    /// any ring is down, refuses the DelMsg instead.
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
            batch.refuse_adds(Refusal::draining());
        } else if !self.link.is_up() {
            batch.refuse_adds(refusal_while_unreachable());
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

    async fn get(&self, messages: &[Message], _now: Instant) -> Result<Vec<MessageState>, Refusal> {
        self.read_states(messages).await
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

/// Calls Redis again and again during the time [`WATCH`] before each move of the pointer, to detect stalls. Makes no
/// calls while this sidecar does not lead. Never ends.
///
/// A leader that sends no requests to Redis would otherwise not notice a stall just before a tick expires. During such
/// a stall, Acks may wait at other sidecars, and the acknowledged messages would time out.
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
            // The sleep is at most `WATCH` long, because the leader and the time of the next move may change.
            tokio::time::sleep(early.min(WATCH)).await;
        }
    }
}
