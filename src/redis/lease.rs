//! The lease in Redis: SET NX with a token, an epoch, and the rules of [`Candidate`] and of [`Leaderships`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tracing::{info, warn};

use super::leaderships::{Candidacy, Leaderships};
use super::link::{LINK_LIFETIME, Link};
use super::office::{Identity, Office, Term, from_now, whole_ms};
use super::ring::CLOCK_SLACK;
use super::script::{Answer, SCRIPTS};
use super::silence::Look;
use crate::core::lease::{Candidate, Leadership, Lease};
use crate::core::refusal::Refusal;
use crate::core::ring::Reply;
use crate::core::tick::Tick;

/// How a lease is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseOptions {
    pub(super) ring: u16,
    pub(super) duration: Duration,
    pub(super) tick_length: Duration,
    pub(super) never_lead: bool,
    pub(super) outage_grace: Duration,
}

/// Whose a lease is that was given up for no one in particular.
const ANYBODYS: &str = "1";

/// A lease that lies in Redis.
pub(super) struct RedisLease(Arc<Inner>);

struct Inner {
    options: LeaseOptions,
    link: Arc<Link>,
    identity: Identity,
    office: Arc<Office>,
    leaderships: Arc<Leaderships>,
    candidate: Mutex<Candidate>,
    /// The highest epoch that was seen: a ring that was lost must not begin below it.
    highest_epoch: Mutex<u64>,
    told: RwLock<Vec<Box<dyn Fn() + Send + Sync>>>,
}

impl RedisLease {
    pub(super) fn new(
        options: LeaseOptions,
        link: Arc<Link>,
        identity: Identity,
        (office, leaderships): (Arc<Office>, Arc<Leaderships>),
    ) -> RedisLease {
        RedisLease(Arc::new(Inner {
            candidate: Mutex::new(Candidate::new(options.duration)),
            options,
            link,
            identity,
            office,
            leaderships,
            highest_epoch: Mutex::new(0),
            told: RwLock::default(),
        }))
    }

    /// Tells who asked that the lease may be free.
    pub(super) fn tell(&self) {
        self.0.told.read().iter().for_each(|tell| tell());
    }

    /// The lease was given up, for `whose`: who is not meant looks as always.
    pub(super) fn is_vacant(&self, whose: &str) {
        if whose == ANYBODYS || whose == self.0.identity.token {
            self.tell();
        }
    }
}

impl Lease for RedisLease {
    fn tend(&self, now: Instant) -> Reply<Leadership> {
        if self.0.options.never_lead {
            return Reply::ok(Leadership::Follows { retry_after: self.0.options.duration });
        }
        let inner = Arc::clone(&self.0);
        Reply::Later(Box::pin(async move { inner.tend(now).await }))
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
    async fn tend(&self, now: Instant) -> Result<Leadership, Refusal> {
        let Some(term) = self.office.term() else { return self.stand(now).await };
        let Some(candidates) = self.renew(term).await? else { return self.stand(now).await };
        let now = now.max(self.link.clock().now());
        self.office.note(term.epoch, |term| term.lease_until = now + self.options.duration);
        if candidates.is_empty() {
            return Ok(self.leads(term.epoch, now));
        }
        if !self.is_calm(now) {
            // Then it will be, and from then on with each renewal, if a tick is a third of a lease.
            let moved = term.next.max(now) + self.options.tick_length / 16;
            return Ok(Leadership::Leads { epoch: term.epoch, renew_at: Some(moved.min(self.renew_at(now))) });
        }
        match self.leaderships.successor(candidates, now) {
            Some(successor) => self.hand_over(&successor).await,
            None => Ok(self.leads(term.epoch, now)),
        }
    }

    /// Whether another could make the next move as well as this sidecar, which may know that Redis stands still.
    fn is_calm(&self, now: Instant) -> bool {
        self.office.term().is_some_and(|term| term.is_calm(now, self.options.tick_length))
            && self.link.silence().look(self.link.clock().now()) == Look::Answers
    }

    fn renew_at(&self, now: Instant) -> Instant {
        now + self.options.duration / 3
    }

    fn leads(&self, epoch: u64, now: Instant) -> Leadership {
        Leadership::Leads { epoch, renew_at: Some(self.renew_at(now)) }
    }

    fn follows(&self) -> Leadership {
        Leadership::Follows { retry_after: self.candidate.lock().retry_after(super::random()) }
    }

    /// Renews the lease, if it is still ours; returns who else stands for election.
    async fn renew(&self, term: Term) -> Result<Option<Vec<Candidacy>>, Refusal> {
        let names = self.names();
        let asked = self.link.write(&SCRIPTS.renew, &names, |call| {
            call.arg(&self.identity.token).arg(term.epoch).arg(whole_ms(self.options.duration));
        });
        let mut answer = asked.await?;
        match answer.text()?.as_str() {
            "renewed" => {
                let mut candidates = Vec::with_capacity(answer.len() / 2);
                while !answer.is_empty() {
                    let (token, leads) = (answer.text()?, answer.count()?);
                    candidates.push(Candidacy { leads, token });
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

    /// Gives the lease up for who leads less. If that one has gone, others look soon.
    async fn hand_over(&self, successor: &Candidacy) -> Result<Leadership, Refusal> {
        info!(
            ring = self.options.ring,
            leads = self.leaderships.told(),
            other_leads = successor.leads,
            "this sidecar hands the ring over to one that leads fewer"
        );
        self.give_up(&successor.token).await?;
        Ok(self.follows())
    }

    fn names(&self) -> [&str; 2] {
        let keys = self.link.keys();
        [&keys.lease, &keys.candidates]
    }

    /// Stands for election.
    async fn stand(&self, now: Instant) -> Result<Leadership, Refusal> {
        let session = self.link.session()?;
        let begun = now.max(self.link.clock().now());
        let (pointer, seen_ms, still) = {
            let mut candidate = self.candidate.lock();
            candidate.enter_session(session.number);
            let (pointer, seen) = candidate.pointer_seen(begun).unwrap_or_default();
            (pointer, whole_ms(seen), candidate.standing_still(begun).unwrap_or_default())
        };
        let graced = session.recovered_at.map(|recovered| recovered + self.options.outage_grace);
        let wait = graced.map_or(Duration::ZERO, |graced| graced.saturating_duration_since(begun));
        let highest = *self.highest_epoch.lock();
        let names = self.names();
        let asked = self.link.write(&SCRIPTS.acquire, &names, |call| {
            call.arg(&self.identity.token).arg(&self.identity.name).arg(whole_ms(self.options.duration));
            call.arg(pointer.0).arg(seen_ms).arg(whole_ms(LINK_LIFETIME)).arg(highest);
            call.arg(still.0).arg(still.1).arg(whole_ms(wait)).arg(whole_ms(CLOCK_SLACK));
            match self.leaderships.told() {
                Some(leads) => call.arg(leads),
                None => call.arg(""),
            };
        });
        let mut answer = asked.await?;
        let now = now.max(self.link.clock().now());
        match answer.text()?.as_str() {
            "won" => self.won(&mut answer, session.number, now),
            "held" => self.held(&mut answer, now),
            word => Err(answer.strange(word).into()),
        }
    }

    fn won(&self, answer: &mut Answer, session: u64, now: Instant) -> Result<Leadership, Refusal> {
        let (epoch, pointer) = (answer.count()?, Tick(answer.count()?));
        let next = from_now(now, answer.number()?);
        let shifted = Duration::from_millis(answer.count()?);
        *self.highest_epoch.lock() = epoch;
        let lease_until = now + self.options.duration;
        self.office.enter(Term {
            epoch,
            lease_until,
            session,
            pointer,
            next,
            ahead: Duration::ZERO,
            is_aware: false,
            shifted,
            graced: None,
            is_busy: false,
            frozen: Tick(0),
            seq: 0,
        });
        info!(ring = self.options.ring, epoch, %pointer, "this sidecar leads");
        Ok(self.leads(epoch, now))
    }

    fn held(&self, answer: &mut Answer, now: Instant) -> Result<Leadership, Refusal> {
        let holder = (answer.text()?, answer.text()?);
        let pointer = Tick(answer.count()?);
        if self.candidate.lock().saw(holder, pointer, now) {
            let leader = answer.text()?;
            info!(ring = self.options.ring, leader, "this sidecar follows");
        }
        Ok(self.follows())
    }

    async fn release(&self) -> Result<(), Refusal> {
        if self.office.term().is_none() {
            return Ok(());
        }
        self.give_up(ANYBODYS).await
    }

    /// Gives the lease up; whose it is to be hears of it at once.
    async fn give_up(&self, whose: &str) -> Result<(), Refusal> {
        self.office.leave();
        let keys = self.link.keys();
        let token = &self.identity.token;
        self.link
            .write(&SCRIPTS.release, &[&keys.lease, &keys.news], |call| {
                call.arg(token).arg(whose);
            })
            .await?;
        Ok(())
    }
}
