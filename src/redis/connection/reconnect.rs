//! Opens the sessions of a link: the first one, and another one after each session that ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use redis::{AsyncConnectionConfig, Cmd};
use tokio::sync::{Notify, watch};
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info, warn};

use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::link::{Link, LinkOptions, Session, Shared, answer};
use crate::redis::keys::{Keys, OLDEST_SCHEMA, SCHEMA, SPARE_LISTS};
use crate::redis::options::CONNECT_TIMEOUT;
use crate::redis::scripts::{Answer, SCRIPTS};
use crate::redis::topology::confirmation::Confirmation;

/// The pause after a failed attempt to connect.
const RETRY: Duration = Duration::from_millis(100);

/// A session that ends sooner counts as short; after several of them the next one is delayed.
const SHORT_SESSION: Duration = Duration::from_secs(1);

/// So many short sessions in a row cause no delay.
const FEW_SHORT_SESSIONS: u32 = 5;

/// The longest delay.
const LONGEST_DELAY: Duration = Duration::from_secs(2);

/// Why a session could not be opened.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The ring in Redis has these settings, which are not those of this sidecar.
    #[error(
        "the ring was created again with other settings: schema {schema}, --slots {slots}, --tick {tick_ms}ms, \
         --rings {rings}; start this sidecar with those"
    )]
    OtherSettings { schema: u64, slots: u64, tick_ms: u64, rings: u64 },
}

impl Link {
    /// Connects, and from then on connects again after each fault. At the start it retries for up to `timeout`, and
    /// only after faults that end by themselves, as when Redis loads its data.
    pub(crate) async fn open(options: LinkOptions, timeout: Duration) -> Result<Link, OpenError> {
        let shared = Arc::new(Shared {
            options,
            state: watch::Sender::new(Err(Fault::new(FaultKind::Unreachable, "no connection was made yet"))),
            timeouts: AtomicU32::new(0),
            progress: Arc::default(),
            peer: RwLock::default(),
            confirmation: Confirmation::default(),
            broken: Notify::new(),
        });
        let mut sessions = Sessions { shared: Arc::clone(&shared), opened: 0, incarnation: None };
        let session = sessions.open_first(timeout).await?;
        shared.state.send_modify(|state| *state = Ok(session));
        let reconnecting = tokio::spawn(async move { sessions.run().await });
        Ok(Link { shared, _reconnecting: AbortOnDropHandle::new(reconnecting) })
    }
}

/// Opens one session of a link after the other.
struct Sessions {
    shared: Arc<Shared>,
    opened: u64,
    /// The incarnation of the ring in the last session.
    incarnation: Option<String>,
}

impl Sessions {
    /// Opens a session whenever the present one has ended.
    async fn run(&mut self) {
        let shared = Arc::clone(&self.shared);
        let clock = &shared.options.clock;
        let (mut opened_at, mut short_sessions) = (clock.now(), 0);
        loop {
            shared.broken.notified().await;
            let is_short = clock.now().saturating_duration_since(opened_at) < SHORT_SESSION;
            short_sessions = if is_short { short_sessions + 1 } else { 0 };
            if short_sessions > FEW_SHORT_SESSIONS {
                sleep(LONGEST_DELAY.min(RETRY * (short_sessions - FEW_SHORT_SESSIONS))).await;
            }
            let session = self.open_next().await;
            opened_at = clock.now();
            shared.timeouts.store(0, Ordering::Relaxed);
            shared.options.metrics.redis_reconnects.inc();
            info!(ring = shared.options.ring, redis = %session.found, "Redis is back");
            shared.state.send_modify(|state| *state = Ok(session));
        }
    }

    /// Opens the next session; retries without end.
    async fn open_next(&mut self) -> Session {
        let mut logged = None;
        loop {
            let error = match self.open().await {
                Ok(session) => return session,
                Err(error) => error,
            };
            let cause = error.to_string();
            let with_remedy = match &error {
                OpenError::Fault(fault) => {
                    self.shared.options.metrics.redis_errors.of(fault.kind.as_str()).inc();
                    fault.with_remedy()
                }
                OpenError::OtherSettings { .. } => cause.clone(),
            };
            if logged.as_ref() != Some(&cause) {
                warn!(
                    ring = self.shared.options.ring,
                    cause = with_remedy,
                    "Redis cannot be used; trying again: remove the cause"
                );
                self.shared.state.send_modify(|state| *state = Err(Fault::new(FaultKind::Unreachable, &*cause)));
                logged = Some(cause);
            }
            sleep(RETRY).await;
        }
    }

    /// Opens the first session; retries for up to `timeout` after faults that end by themselves.
    async fn open_first(&mut self, timeout: Duration) -> Result<Session, OpenError> {
        let LinkOptions { place, clock, .. } = &Arc::clone(&self.shared).options;
        let (begun, mut is_logged) = (clock.now(), false);
        loop {
            let fault = match self.open().await {
                Err(OpenError::Fault(fault))
                    if (fault.kind.passes() || place.finds_again(fault.kind))
                        && clock.now().saturating_duration_since(begun) < timeout =>
                {
                    fault
                }
                opened => return opened,
            };
            if !std::mem::replace(&mut is_logged, true) {
                warn!(cause = fault.text, "Redis does not serve yet; trying for {timeout:?}");
            }
            sleep(RETRY).await;
        }
    }

    /// Connects, loads the scripts and registers the connection.
    async fn open(&mut self) -> Result<Session, OpenError> {
        let Shared { options, progress, .. } = &*self.shared;
        let LinkOptions { place, peers, ring, keys, clock, metrics, .. } = options;
        // The response timeout is that of `Peer::exchange`.
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(None);
        let found = Arc::new(place.find(keys.slot, clock).await?);
        let mut connection = found.connect(&config, "requests").await.map_err(Fault::from)?;
        let mut loads = redis::pipe();
        for script in SCRIPTS.all() {
            loads.add_command(script.load()).ignore();
        }
        let peer = peers.of(&found, clock);
        *self.shared.peer.write() = Some(Arc::clone(&peer));
        peer.exchange(loads.query_async::<()>(&mut connection)).await?;
        let answered = progress.answered_chunk.load(Ordering::Relaxed);
        let held = progress.unanswered_acks.load(Ordering::Relaxed);
        let registration = registration(options, self.opened, (answered, held));
        let begun = clock.now();
        let registered = peer.exchange(answer(&mut connection, &registration)).await;
        metrics.redis_round_trips.of(SCRIPTS.open.name).record(clock.now().saturating_duration_since(begun));
        let mut answer = Answer::new(&SCRIPTS.open, registered?)?;
        match answer.text()?.as_str() {
            "open" => {}
            "differs" => {
                return Err(OpenError::OtherSettings {
                    schema: answer.count()?,
                    slots: answer.count()?,
                    tick_ms: answer.count()?,
                    rings: answer.count()?,
                });
            }
            word => return Err(answer.strange(word).into()),
        }
        let (generation, incarnation) = (answer.number()?, answer.text()?);
        self.opened += 1;
        if self.incarnation.as_ref().is_some_and(|before| *before != incarnation) {
            metrics.redis_lost.inc();
            error!(
                ring,
                "Redis came back without this ring: what was in flight is lost, with what its outbox lost of \
                 what was not acknowledged, and a new ring begins now; turn on persistence (appendonly yes) \
                 to keep it"
            );
        }
        self.incarnation = Some(incarnation);
        let catch_up_max_ticks = u32::try_from(answer.count()?).unwrap_or_default();
        let chunk = answer.count()?;
        let session = Session {
            connection,
            found,
            peer,
            number: self.opened,
            generation,
            catch_up_max_ticks,
            chunk,
            answers: Arc::new([answer.text()?, answer.text()?]),
            is_awaited: held > 0 || chunk < answered,
            recovered_at: (self.opened > 1).then(|| clock.now()),
        };
        self.shared.note_confirmation(&session);
        Ok(session)
    }
}

/// The call that registers session number `sessions` + 1 of a link, with the last chunk that was answered and the
/// number of Acks that are held.
pub(crate) fn registration(options: &LinkOptions, sessions: u64, (answered, held): (u64, u64)) -> Cmd {
    let LinkOptions { keys, wheel, rings, incarnation, catch_up_max_ticks, .. } = options;
    let Keys { meta, link, outbox, groups, sidecars, held_acks, lease, messages, ticks, late, .. } = &**keys;
    let names = keys.and_lists(&[meta, link, outbox, groups, sidecars, held_acks, lease, messages, ticks, late]);
    let mut call = SCRIPTS.open.call(&names);
    call.arg(SCHEMA).arg(OLDEST_SCHEMA).arg(wheel.slots()).arg(wheel.tick_ms()).arg(rings);
    // A ring that a later session creates is another one.
    call.arg(wheel.slots() + SPARE_LISTS).arg(format!("{incarnation}-{sessions}"));
    call.arg(&keys.sidecar).arg(catch_up_max_ticks).arg(answered).arg(held);
    call
}
