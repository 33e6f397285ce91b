//! Implements the lease of a ring in Redis: a key with the token of the leader, and the time at which the lease ends.
//! The sidecar that holds the lease leads the ring, that is, moves its pointer, the tick that expires next. Each
//! election begins a new *epoch*, a number that only grows. [`Candidate`] decides when to poll the lease, and
//! [`Leaderships`] distributes several rings over the sidecars.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::{Mutex, RwLock};
use tracing::{error, info, warn};

use crate::core::{Candidate, Leadership, Lease, PointerPosition, Refusal, Tick};
use crate::redis::connection::link::{Link, Session};
use crate::redis::connection::stall_detector::Look;
use crate::redis::leader::rebalance::{Candidacy, Leaderships};
use crate::redis::leader::term::{CLOCK_SLACK, NextMove, Term, from_now, whole_ms};
use crate::redis::scripts::{Answer, SCRIPTS};

/// The lease of one ring.
pub(crate) struct RedisLease {
    link: Arc<Link>,
    leaderships: Arc<Leaderships>,
    state: Mutex<State>,
    on_lease_free: RwLock<Vec<Box<dyn Fn() + Send + Sync>>>,
}

struct State {
    possession: Possession,
    candidate: Candidate,
    /// The highest epoch that this sidecar has seen. If Redis loses the ring, the next election must still begin a
    /// higher epoch.
    highest_epoch: u64,
}

/// Whether this sidecar holds the lease, as far as it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Possession {
    NotHeld,
    /// The sidecar has requested an election and has no answer yet. It may have won.
    Requested,
    Held,
}

#[async_trait]
impl Lease for RedisLease {
    async fn maintain(&self, now: Instant) -> Result<Leadership, Refusal> {
        let link @ Link { ring, options, term: current, .. } = &*self.link;
        if options.never_lead {
            return Ok(Leadership::Follows { retry_after: options.lease });
        }
        let session = link.session()?;
        let Some(term) = current.in_session(session.number) else {
            return self.stand_for_election(now, &session).await;
        };
        if link.unconfirmed_for(&session) >= Some(options.lease) {
            info!(
                ring,
                "no majority of the Sentinels or primaries confirms this Redis, so this sidecar gives the lease up: \
                 another sidecar may have a majority"
            );
            return self.give_up(("vacant", "1")).await;
        }
        let may_hand_over = self.leaderships.are_shared() && self.can_hand_over(now);
        let Some(candidates) = self.renew(&session, term, may_hand_over).await? else {
            return self.stand_for_election(now, &session).await;
        };
        let now = now.max(link.clock.now());
        current.update(term.epoch, |term| term.lease_until = now + options.lease);
        if may_hand_over
            && self.can_hand_over(now)
            && let Some(successor) = self.leaderships.successor(candidates, now)
        {
            info!(
                ring,
                leads = self.leaderships.count(now),
                to = successor.name,
                leads_there = successor.leads,
                "this sidecar hands the ring over to a sidecar that leads fewer rings"
            );
            return self.give_up(("handed", &successor.token)).await;
        }
        let mut renew_at = now + options.lease / 3;
        if self.leaderships.are_shared() && !may_hand_over {
            // The sidecar cannot hand the ring over now, but perhaps soon after the next move of the pointer. So it
            // renews its lease then. Otherwise a hand-over may never be possible at a renewal: if a lease lasts three
            // ticks, all renewals come at the same point of a tick.
            renew_at = renew_at.min(term.next.at.max(now) + options.wheel.tick_length() / 16);
        }
        Ok(Leadership::Leads { epoch: term.epoch, renew_at: Some(renew_at) })
    }

    /// Gives up the lease. With several rings, also runs the script `release` if another sidecar leads, because that
    /// script ends the candidacy of this sidecar.
    async fn release(&self, _now: Instant) -> Result<(), Refusal> {
        self.leaderships.withdraw(self.link.clock.now());
        let is_held = self.state.lock().possession != Possession::NotHeld;
        if !is_held && !self.leaderships.are_shared() {
            return Ok(());
        }
        let given_up = self.give_up(("vacant", "1")).await.map(drop);
        if is_held { given_up } else { Ok(()) }
    }

    fn on_lease_free(&self, listener: Box<dyn Fn() + Send + Sync>) {
        self.on_lease_free.write().push(listener);
    }
}

impl RedisLease {
    pub(crate) fn new(link: Arc<Link>, leaderships: Arc<Leaderships>) -> RedisLease {
        let candidate = Candidate::new(link.options.lease);
        let state = Mutex::new(State { possession: Possession::NotHeld, candidate, highest_epoch: 0 });
        RedisLease { link, leaderships, state, on_lease_free: RwLock::default() }
    }

    /// Calls the listeners. Must be called when the lease may be free.
    pub(crate) fn notify(&self) {
        self.on_lease_free.read().iter().for_each(|listener| listener());
    }

    /// Returns whether this sidecar may hand the ring over at `now`. It must not if it knows of a recent stall or
    /// outage of Redis: the next leader might not know of the stall, and would not wait for Acks.
    fn can_hand_over(&self, now: Instant) -> bool {
        let link @ Link { options, term: current, .. } = &*self.link;
        let (Some(term), Ok(session)) = (current.get(), link.session()) else { return false };
        let Ok(recovered_at) = link.confirmed(&session) else { return false };
        let is_grace_over = recovered_at.is_none_or(|recovered_at| now >= recovered_at + options.outage_grace);
        term.session == session.number
            && is_grace_over
            && term.is_calm(now, options.wheel.tick_length())
            && link.look() == Look::Answers
    }

    /// Renews the lease. Returns `None` if this sidecar no longer holds it. Otherwise returns the candidates of the
    /// ring, or an empty list if `wanted` is false.
    async fn renew(&self, session: &Session, term: Term, wanted: bool) -> Result<Option<Vec<Candidacy>>, Refusal> {
        let link @ Link { ring, options, identity, term: current, .. } = &*self.link;
        let arguments = (&identity.token, term.epoch, whole_ms(options.lease), wanted);
        let keys = &link.keys;
        let keys = &[&keys.lease, &keys.candidates];
        let (word, mut answer) = self.link.write_in(session, &SCRIPTS.renew, keys, arguments).await?;
        match word.as_str() {
            "renewed" => {
                let candidates = answer.rest(|answer| {
                    let (token, announced) = (answer.text()?, answer.text()?);
                    Candidacy::parse(token, &announced).ok_or_else(|| answer.strange(&announced))
                });
                Ok(Some(candidates?))
            }
            "deposed" => {
                current.end();
                warn!(
                    ring,
                    epoch = term.epoch,
                    "this sidecar's lease has run out, and the next election decides which sidecar leads: if this \
                     comes again, look for a stall of this process or a slow Redis, or raise --lease"
                );
                Ok(None)
            }
            word => Err(answer.strange(word).into()),
        }
    }

    /// Stands for election. After a new connection, a leader also stands again and gets a new epoch, because Redis may
    /// have lost writes.
    async fn stand_for_election(&self, now: Instant, session: &Session) -> Result<Leadership, Refusal> {
        let link @ Link { options, identity, term: current, .. } = &*self.link;
        let recovered_at = link.confirmed(session)?;
        let begun = now.max(link.clock.now());
        let before = current.get();
        // After an outage, the pointer waits for Acks during a grace period. Further outages before the next move of
        // the pointer do not extend this period, so that many short outages cannot stop the pointer.
        let grace_until = before.and_then(|term| term.grace_until);
        let grace_until = grace_until.or(recovered_at.map(|recovered_at| recovered_at + options.outage_grace));
        let wait = grace_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(begun));
        let arguments = {
            let State { possession, candidate, highest_epoch } = &mut *self.state.lock();
            if std::mem::replace(possession, Possession::Requested) == Possession::Held && before.is_none() {
                self.leaderships.record_loss(begun);
            }
            candidate.enter_session(session.number);
            let (position, seen) = candidate.observed_pointer(begun).unwrap_or_default();
            let is_newcomer = !candidate.is_current(begun) && before.is_none();
            let stalled = candidate.stalled_holder(begun).unwrap_or_default();
            (
                (&identity.token, &identity.name, whole_ms(options.lease)),
                (position.pointer.0, whole_ms(seen), is_newcomer, *highest_epoch, stalled),
                (whole_ms(wait), whole_ms(options.outage_grace), whole_ms(CLOCK_SLACK)),
                (self.leaderships.announcement(begun), position.due_ms),
            )
        };
        let keys = &link.keys;
        let keys = &[&keys.lease, &keys.candidates];
        let (word, mut answer) = self.link.write_in(session, &SCRIPTS.acquire, keys, arguments).await?;
        let now = now.max(link.clock.now());
        match word.as_str() {
            "won" => self.lead(&mut answer, session, before, (recovered_at, grace_until), now),
            "held" => self.follow(&mut answer, now),
            word => Err(answer.strange(word).into()),
        }
    }

    /// Processes a won election, and begins a term.
    fn lead(
        &self,
        answer: &mut Answer,
        session: &Session,
        before: Option<Term>,
        (recovered_at, grace_until): (Option<Instant>, Option<Instant>),
        now: Instant,
    ) -> Result<Leadership, Refusal> {
        let link @ Link { ring, options, term: current, .. } = &*self.link;
        let (epoch, pointer) = (answer.count()?, Tick(answer.count()?));
        let next = NextMove { at: from_now(now, answer.number()?), ahead: Duration::ZERO };
        let shifted = Duration::from_millis(answer.count()?);
        if let Some(before) = before.filter(|before| pointer < before.pointer) {
            link.count_loss();
            error!(
                ring,
                %pointer,
                was = %before.pointer,
                "Redis has lost the last moves of the pointer: these ticks expire again, under a new epoch"
            );
        }
        {
            let mut state = self.state.lock();
            (state.highest_epoch, state.possession) = (epoch, Possession::Held);
            state.candidate.forget_holder();
        }
        self.leaderships.record_win(now);
        current.begin(Term {
            epoch,
            lease_until: now + options.lease,
            session: session.number,
            recovered_at,
            pointer,
            next,
            is_aware: false,
            shifted,
            grace_until,
            held_since: before.and_then(|term| term.held_since),
            is_busy: false,
            frozen: before.map_or(Tick(0), |term| term.frozen),
            seq: before.map_or(0, |term| term.seq),
        });
        info!(ring, epoch, %pointer, "this sidecar leads");
        Ok(Leadership::Leads { epoch, renew_at: Some(now + options.lease / 3) })
    }

    /// Processes a lost election, and records the state of the leader.
    fn follow(&self, answer: &mut Answer, now: Instant) -> Result<Leadership, Refusal> {
        let Link { ring, options, term: current, .. } = &*self.link;
        let holder = (answer.text()?, answer.text()?);
        let (pointer, leader) = (Tick(answer.count()?), answer.text()?);
        let lease = answer.text()?.parse().map_or(options.lease, Duration::from_millis);
        let (epoch, due_ms) = (answer.count()?, answer.count()?);
        let since_due_ms = answer.number()?;
        current.end();
        let is_other = {
            let mut state = self.state.lock();
            (state.highest_epoch, state.possession) = (epoch.max(state.highest_epoch), Possession::NotHeld);
            state.candidate.observe(holder, lease, PointerPosition { pointer, due_ms }, since_due_ms, now)
        };
        if is_other {
            info!(ring, leader, "this sidecar follows");
        }
        Ok(self.follows())
    }

    fn follows(&self) -> Leadership {
        let random = RandomState::new().hash_one(0);
        Leadership::Follows { retry_after: self.state.lock().candidate.retry_after(random) }
    }

    /// Gives up the lease, and sends the other sidecars a hint. `hint` is the field of the hint, and its value.
    async fn give_up(&self, hint: (&str, &str)) -> Result<Leadership, Refusal> {
        let link @ Link { identity, term: current, .. } = &*self.link;
        current.end();
        let keys = &link.keys;
        let keys = &[&keys.lease, &keys.candidates, &keys.news];
        self.link.write_in(&*link.session()?, &SCRIPTS.release, keys, (&identity.token, hint)).await?;
        self.state.lock().possession = Possession::NotHeld;
        Ok(self.follows())
    }
}
