//! The lease in Redis: SET NX with a token, an epoch, and the rules of [`Candidate`] and of [`Leaderships`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tracing::{error, info, warn};

use crate::core::lease::{Candidate, Leadership, Lease, PointerPosition};
use crate::core::refusal::Refusal;
use crate::core::ring::Reply;
use crate::core::tick::Tick;
use crate::redis::connection::link::{Link, Session};
use crate::redis::connection::stall_detector::Look;
use crate::redis::leader::rebalance::{Candidacy, Leaderships};
use crate::redis::leader::term::{Identity, LeadershipTerm, Term, from_now, whole_ms};
use crate::redis::ring::CLOCK_SLACK;
use crate::redis::ring::repair_progress::RepairProgress;
use crate::redis::scripts::{Answer, SCRIPTS};

/// How a lease is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseOptions {
    pub(crate) ring: u16,
    pub(crate) duration: Duration,
    pub(crate) tick_length: Duration,
    pub(crate) never_lead: bool,
    pub(crate) outage_grace: Duration,
}

/// Whether the lease is this sidecar's, as far as it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    No,
    /// It has asked, and may have won.
    Maybe,
    Yes,
}

/// A lease that lies in Redis.
pub(crate) struct RedisLease(Arc<Inner>);

struct Inner {
    options: LeaseOptions,
    link: Arc<Link>,
    identity: Identity,
    office: Arc<LeadershipTerm>,
    leaderships: Arc<Leaderships>,
    hold: Mutex<Hold>,
    candidate: Mutex<Candidate>,
    /// The highest epoch that was seen: a ring that was lost must not begin below it.
    highest_epoch: Mutex<u64>,
    told: RwLock<Vec<Box<dyn Fn() + Send + Sync>>>,
}

impl RedisLease {
    pub(crate) fn new(
        options: LeaseOptions,
        link: Arc<Link>,
        identity: Identity,
        (office, leaderships): (Arc<LeadershipTerm>, Arc<Leaderships>),
    ) -> RedisLease {
        RedisLease(Arc::new(Inner {
            candidate: Mutex::new(Candidate::new(options.duration)),
            options,
            link,
            identity,
            office,
            leaderships,
            hold: Mutex::new(Hold::No),
            highest_epoch: Mutex::new(0),
            told: RwLock::default(),
        }))
    }

    /// Tells who asked that the lease may be free.
    pub(crate) fn tell(&self) {
        self.0.told.read().iter().for_each(|tell| tell());
    }

    /// The lease was given up for one of the candidates: the others look as always.
    pub(crate) fn is_handed_to(&self, successor: &str) {
        if successor == self.0.identity.token {
            self.tell();
        }
    }
}

impl Lease for RedisLease {
    fn maintain(&self, now: Instant) -> Reply<Leadership> {
        if self.0.options.never_lead {
            return Reply::ok(Leadership::Follows { retry_after: self.0.options.duration });
        }
        let inner = Arc::clone(&self.0);
        Reply::Later(Box::pin(async move { inner.maintain(now).await }))
    }

    fn release(&self, _now: Instant) -> Reply<()> {
        let inner = Arc::clone(&self.0);
        Reply::Later(Box::pin(async move { inner.release().await }))
    }

    fn on_vacancy(&self, tell: Box<dyn Fn() + Send + Sync>) {
        self.0.told.write().push(tell);
    }
}

impl Inner {
    async fn maintain(&self, now: Instant) -> Result<Leadership, Refusal> {
        let session = self.link.session()?;
        let Some(term) = self.office.term_in(session.number) else { return self.stand(now, &session).await };
        if self.link.is_unconfirmed_for(&session, self.options.duration) {
            return self.step_back().await;
        }
        let may_hand_over = self.leaderships.are_shared() && self.is_calm(now);
        let Some(candidates) = self.renew(term, may_hand_over).await? else {
            return self.stand(now, &session).await;
        };
        let now = now.max(self.link.clock().now());
        self.office.note(term.epoch, |term| term.lease_until = now + self.options.duration);
        if may_hand_over
            && self.is_calm(now)
            && let Some(successor) = self.leaderships.successor(candidates, now)
        {
            return self.hand_over(&successor, now).await;
        }
        let mut renew_at = now + self.options.duration / 3;
        if self.leaderships.are_shared() && !may_hand_over {
            // It may once the pointer has moved, and from then on with each renewal, if a lease is three ticks.
            renew_at = renew_at.min(term.next.max(now) + self.options.tick_length / 16);
        }
        Ok(Leadership::Leads { epoch: term.epoch, renew_at: Some(renew_at) })
    }

    /// Whether another could make the next move as well as this sidecar, which may know that Redis stands still or was
    /// away.
    fn is_calm(&self, now: Instant) -> bool {
        let (Some(term), Ok(session)) = (self.office.term(), self.link.session()) else { return false };
        let Ok(recovered) = self.link.confirmed(&session) else { return false };
        let is_graced = recovered.is_none_or(|recovered| now >= recovered + self.options.outage_grace);
        term.session == session.number
            && is_graced
            && term.is_calm(now, self.options.tick_length)
            && self.link.silence().look(self.link.clock().now()) == Look::Answers
    }

    fn follows(&self) -> Leadership {
        Leadership::Follows { retry_after: self.candidate.lock().retry_after(crate::redis::random()) }
    }

    /// Renews the lease, if it is still ours; returns who else stands for election, if that is wanted.
    async fn renew(&self, term: Term, wanted: bool) -> Result<Option<Vec<Candidacy>>, Refusal> {
        let names = self.names();
        let asked = self.link.write(&SCRIPTS.renew, &names, |call| {
            call.arg(&self.identity.token).arg(term.epoch).arg(whole_ms(self.options.duration));
            call.arg(u8::from(wanted));
        });
        let mut answer = asked.await?;
        match answer.text()?.as_str() {
            "renewed" => {
                let mut candidates = Vec::with_capacity(answer.len() / 2);
                while !answer.is_empty() {
                    let (token, told) = (answer.text()?, answer.text()?);
                    candidates.push(Candidacy::of(token, &told).ok_or_else(|| answer.strange(&told))?);
                }
                Ok(Some(candidates))
            }
            "deposed" => {
                self.office.leave();
                warn!(
                    ring = self.options.ring,
                    epoch = term.epoch,
                    "this sidecar's lease has run out, and whoever is elected leads: if this comes again, look for a \
                     stall of this process or a slow Redis, or raise --lease"
                );
                Ok(None)
            }
            word => Err(answer.strange(word).into()),
        }
    }

    /// Gives the lease up for who leads fewer. If that one has gone, others look soon.
    async fn hand_over(&self, successor: &Candidacy, now: Instant) -> Result<Leadership, Refusal> {
        info!(
            ring = self.options.ring,
            leads = self.leaderships.count(now),
            to = successor.name,
            leads_there = successor.leads,
            "this sidecar hands the ring over to one that leads fewer"
        );
        self.give_up(["handed", &successor.token]).await?;
        Ok(self.follows())
    }

    /// Gives the lease up to a sidecar that a majority answers: without one this sidecar may not turn the ring.
    async fn step_back(&self) -> Result<Leadership, Refusal> {
        info!(
            ring = self.options.ring,
            "no majority confirms the primary to this sidecar: another may lead that is told more"
        );
        self.give_up(["vacant", "1"]).await?;
        Ok(self.follows())
    }

    fn names(&self) -> [&str; 2] {
        let keys = self.link.keys();
        [&keys.lease, &keys.candidates]
    }

    /// Stands for election. A leader whose connection was rebuilt does so too, and gets another epoch: the Redis that it
    /// reaches now may have lost writes.
    async fn stand(&self, now: Instant, session: &Session) -> Result<Leadership, Refusal> {
        let recovered = self.link.confirmed(session)?;
        let begun = now.max(self.link.clock().now());
        let term_before = self.office.term();
        if std::mem::replace(&mut *self.hold.lock(), Hold::Maybe) == Hold::Yes && term_before.is_none() {
            self.leaderships.was_deposed(begun);
        }
        let (standing, seen_ms, watches, still) = {
            let mut candidate = self.candidate.lock();
            candidate.enter_session(session.number);
            let (standing, seen) = candidate.pointer_seen(begun).unwrap_or_default();
            let still = candidate.stalled_holder(begun).unwrap_or_default();
            (standing, whole_ms(seen), candidate.watches(begun), still)
        };
        // The first grace since the pointer moved counts, so that a Redis that comes and goes does not stop the wheel.
        let graced = term_before.and_then(|term| term.graced);
        let graced = graced.or(recovered.map(|recovered| recovered + self.options.outage_grace));
        let wait = graced.map_or(Duration::ZERO, |graced| graced.saturating_duration_since(begun));
        let watches = watches || term_before.is_some();
        let highest = *self.highest_epoch.lock();
        let names = self.names();
        let asked = self.link.write_in(session, &SCRIPTS.acquire, &names, |call| {
            call.arg(&self.identity.token).arg(&self.identity.name).arg(whole_ms(self.options.duration));
            call.arg(standing.pointer.0).arg(seen_ms).arg(u8::from(!watches)).arg(highest);
            call.arg(still.0).arg(still.1).arg(whole_ms(wait)).arg(whole_ms(self.options.outage_grace));
            call.arg(whole_ms(CLOCK_SLACK));
            call.arg(self.leaderships.told(begun)).arg(standing.due_ms);
        });
        let mut answer = asked.await?;
        let now = now.max(self.link.clock().now());
        match answer.text()?.as_str() {
            "won" => self.won(&mut answer, session.number, (term_before, graced, recovered), now),
            "held" => self.held(&mut answer, now),
            word => Err(answer.strange(word).into()),
        }
    }

    fn won(
        &self,
        answer: &mut Answer,
        session: u64,
        (term_before, graced, recovered): (Option<Term>, Option<Instant>, Option<Instant>),
        now: Instant,
    ) -> Result<Leadership, Refusal> {
        let (epoch, pointer) = (answer.count()?, Tick(answer.count()?));
        let next = from_now(now, answer.number()?);
        let shifted = Duration::from_millis(answer.count()?);
        if let Some(before) = term_before.filter(|before| pointer < before.pointer) {
            self.link.count_loss();
            error!(
                ring = self.options.ring,
                %pointer,
                was = %before.pointer,
                "Redis has lost the last moves of the pointer: these ticks expire again, under a new epoch"
            );
        }
        *self.highest_epoch.lock() = epoch;
        *self.hold.lock() = Hold::Yes;
        self.candidate.lock().leads();
        self.leaderships.has_won(now);
        let lease_until = now + self.options.duration;
        self.office.enter(Term {
            epoch,
            lease_until,
            session,
            recovered,
            pointer,
            next,
            ahead: Duration::ZERO,
            is_aware: false,
            shifted,
            graced,
            held_since: term_before.and_then(|term| term.held_since),
            is_busy: false,
            frozen: term_before.map_or(Tick(0), |term| term.frozen),
            seq: term_before.map_or(0, |term| term.seq),
            mends: RepairProgress::default(),
        });
        info!(ring = self.options.ring, epoch, %pointer, "this sidecar leads");
        Ok(Leadership::Leads { epoch, renew_at: Some(now + self.options.duration / 3) })
    }

    fn held(&self, answer: &mut Answer, now: Instant) -> Result<Leadership, Refusal> {
        let holder = (answer.text()?, answer.text()?);
        let (pointer, leader) = (Tick(answer.count()?), answer.text()?);
        let lease = answer.text()?.parse().map_or(self.options.duration, Duration::from_millis);
        let (epoch, due_ms) = (answer.count()?, answer.count()?);
        let since_due_ms = answer.number()?;
        self.office.leave();
        {
            let mut highest = self.highest_epoch.lock();
            *highest = epoch.max(*highest);
        }
        *self.hold.lock() = Hold::No;
        if self.candidate.lock().observe(holder, lease, PointerPosition { pointer, due_ms }, since_due_ms, now) {
            info!(ring = self.options.ring, leader, "this sidecar follows");
        }
        Ok(self.follows())
    }

    /// Also where another leads: whoever goes is no candidate any more.
    async fn release(&self) -> Result<(), Refusal> {
        self.leaderships.stands_back(self.link.clock().now());
        let hold = *self.hold.lock();
        if hold == Hold::No && !self.leaderships.are_shared() {
            return Ok(());
        }
        let given_up = self.give_up(["vacant", "1"]).await;
        if hold == Hold::No { Ok(()) } else { given_up }
    }

    /// Gives the lease up, with a hint for the others.
    async fn give_up(&self, hint: [&str; 2]) -> Result<(), Refusal> {
        self.office.leave();
        let keys = self.link.keys();
        let token = &self.identity.token;
        self.link
            .write(&SCRIPTS.release, &[&keys.lease, &keys.candidates, &keys.news], |call| {
                call.arg(token).arg(&hint);
            })
            .await?;
        *self.hold.lock() = Hold::No;
        Ok(())
    }
}
