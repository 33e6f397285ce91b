//! Opens the sessions of a link, and the next one when one is of no use any more.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redis::{AsyncConnectionConfig, Cmd};
use tracing::{error, info, warn};

use crate::redis::connection::errors::Fault;
use crate::redis::connection::link::{LinkOptions, Session, Shared, State, answer};
use crate::redis::keys::{Keys, OLDEST_SCHEMA, SCHEMA, SPARE_LISTS};
use crate::redis::options::CONNECT_TIMEOUT;
use crate::redis::scripts::{Answer, SCRIPTS};

/// After a failed attempt to connect the next one comes this much later.
const RETRY: Duration = Duration::from_millis(100);

/// A session that ends sooner was of no use: the next one is not opened at once.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// So many of them in a row may be bad luck.
const FEW_SHORT_LIVES: u32 = 5;

/// The longest pause before a session is opened.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A ring in Redis that was made with other settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Differs {
    pub(crate) schema: u64,
    pub(crate) slots: u64,
    pub(crate) tick_ms: u64,
    pub(crate) rings: u64,
}

/// Why a session could not be opened.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("{}", .0.text)]
    Fault(Fault),
    #[error("the ring was made anew with other settings: {0:?}; start this sidecar with those")]
    Differs(Differs),
}

impl From<Fault> for OpenError {
    fn from(fault: Fault) -> OpenError {
        OpenError::Fault(fault)
    }
}

/// What the keeper remembers from session to session.
#[derive(Default)]
pub(crate) struct Known {
    sessions: u64,
    incarnation: Option<String>,
}

impl Shared {
    pub(crate) async fn keep(self: Arc<Self>, mut known: Known) {
        let (mut opened_at, mut short_lives) = (self.options.clock.now(), 0);
        loop {
            self.broken.notified().await;
            let is_short = self.options.clock.now().saturating_duration_since(opened_at) < SHORT_LIFE;
            short_lives = if is_short { short_lives + 1 } else { 0 };
            if short_lives > FEW_SHORT_LIVES {
                // Something is wrong that a new connection does not mend.
                tokio::time::sleep(LONGEST_PAUSE.min(RETRY * (short_lives - FEW_SHORT_LIVES))).await;
            }
            let session = self.reconnect(&mut known).await;
            opened_at = self.options.clock.now();
            self.timeouts.store(0, Ordering::Relaxed);
            self.options.metrics.redis_reconnects.inc();
            info!(ring = self.options.ring, redis = %session.found, "Redis is back");
            self.state.send_replace(State::Up(session));
        }
    }

    /// Connects, as often as it takes.
    async fn reconnect(&self, known: &mut Known) -> Session {
        let mut told = None;
        loop {
            match self.connect(known).await {
                Ok(session) => return session,
                Err(error) => {
                    if let OpenError::Fault(fault) = &error {
                        self.options.metrics.count_redis_error(fault.kind.as_str());
                    }
                    let cause = error.to_string();
                    if told.as_ref() != Some(&cause) {
                        let with_remedy = match &error {
                            OpenError::Fault(fault) => fault.with_remedy(),
                            OpenError::Differs(_) => cause.clone(),
                        };
                        warn!(
                            ring = self.options.ring,
                            cause = with_remedy,
                            "Redis cannot be used; trying again: mend what the cause names"
                        );
                        self.state.send_replace(State::Away(Arc::from(cause.as_str())));
                        told = Some(cause);
                    }
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Connects, and tries again for as long as what is in the way passes by itself.
    pub(crate) async fn connect_at_last(
        &self,
        known: &mut Known,
        patience: Duration,
    ) -> Result<Session, OpenError> {
        let (begun, mut is_told) = (self.options.clock.now(), false);
        loop {
            match self.connect(known).await {
                Err(OpenError::Fault(fault))
                    if (fault.kind.passes() || self.options.place.finds_again(fault.kind))
                        && self.options.clock.now().saturating_duration_since(begun) < patience =>
                {
                    if !std::mem::replace(&mut is_told, true) {
                        warn!(cause = fault.text, "Redis does not serve yet; trying for {patience:?}");
                    }
                }
                connected => return connected,
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    pub(crate) async fn connect(&self, known: &mut Known) -> Result<Session, OpenError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            // Everyone who asks waits by `Peer::exchange`.
            .set_response_timeout(None);
        let found = Arc::new(self.options.place.find(self.options.keys.slot, &self.options.clock).await?);
        let mut connection = found.connect(&config, "requests").await.map_err(Fault::from)?;
        let mut loads = redis::pipe();
        for script in SCRIPTS.all() {
            loads.add_command(script.load()).ignore();
        }
        let peer = self.options.peers.of(&found, &self.options.clock);
        *self.peer.write() = Some(Arc::clone(&peer));
        peer.exchange(loads.query_async::<()>(&mut connection)).await?;
        let (clock, metrics) = (&self.options.clock, &self.options.metrics);
        let begun = clock.now();
        let answered = self.progress.answered_chunk.load(Ordering::Relaxed);
        let held = self.progress.unanswered_acks.load(Ordering::Relaxed);
        let registration = registration(&self.options, known.sessions, (answered, held));
        let registered = peer.exchange(answer(&mut connection, &registration)).await;
        metrics.round_trip(SCRIPTS.open.name).record(clock.now().saturating_duration_since(begun));
        let mut answer = Answer::new(&SCRIPTS.open, registered?)?;
        match answer.text()?.as_str() {
            "open" => {}
            "differs" => {
                return Err(OpenError::Differs(Differs {
                    schema: answer.count()?,
                    slots: answer.count()?,
                    tick_ms: answer.count()?,
                    rings: answer.count()?,
                }));
            }
            word => return Err(answer.strange(word).into()),
        }
        let generation = answer.number()?;
        let incarnation = answer.text()?;
        known.sessions += 1;
        let lost = known.incarnation.replace(incarnation.clone()).is_some_and(|before| before != incarnation);
        if lost {
            self.options.metrics.redis_lost.inc();
            error!(
                ring = self.options.ring,
                "Redis came back without this ring: what was in flight is lost, with what its outbox lost of \
                 what was not acknowledged, and a new ring begins now; turn on persistence (appendonly yes) \
                 to keep it"
            );
        }
        let catch_up_max_ticks = u32::try_from(answer.count()?).unwrap_or_default();
        let chunk = answer.count()?;
        let session = Session {
            connection,
            found,
            peer,
            number: known.sessions,
            generation,
            catch_up_max_ticks,
            chunk,
            answers: Arc::new([answer.text()?, answer.text()?]),
            is_awaited: held > 0 || chunk < answered,
            recovered_at: (known.sessions > 1).then(|| self.options.clock.now()),
        };
        self.note_confirmation(&session);
        Ok(session)
    }
}

/// The call that registers a session, the `sessions`-th of its link: with the last chunk that was answered, and the number
/// of Acks that are held.
pub(crate) fn registration(options: &LinkOptions, sessions: u64, (answered, held): (u64, u64)) -> Cmd {
    let LinkOptions { keys, wheel, rings, incarnation, catch_up_max_ticks, .. } = options;
    let Keys { meta, link, outbox, groups, sidecars, held_acks, lease, messages, ticks, late, .. } = &**keys;
    let names = [meta, link, outbox, groups, sidecars, held_acks, lease, messages, ticks, late];
    let names = names.into_iter().chain(keys.lists());
    let names: Vec<&String> = names.collect();
    let mut call = SCRIPTS.open.call(names.into_iter().map(String::as_str));
    call.arg(SCHEMA).arg(OLDEST_SCHEMA).arg(wheel.slots()).arg(wheel.tick_ms()).arg(rings);
    // A ring made in a later session is another one.
    call.arg(wheel.slots() + SPARE_LISTS).arg(format!("{incarnation}-{sessions}"));
    call.arg(&keys.sidecar).arg(catch_up_max_ticks).arg(answered).arg(held);
    call
}
