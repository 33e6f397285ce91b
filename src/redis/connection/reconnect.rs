//! Opens the sessions of a link. A *link* connects this sidecar to the Redis of one ring. A *session* is one registered
//! connection of a link. Whenever a session ends, this module opens the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use redis::Cmd;
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::link::{Link, LinkState, Session, answer};
use crate::redis::connection::redis_health::RedisServer;
use crate::redis::keys::{Keys, OLDEST_SCHEMA, SCHEMA, SPARE_LISTS};
use crate::redis::options::{RedisOptions, START_TIMEOUT};
use crate::redis::scripts::{Answer, SCRIPTS};
use crate::redis::topology::majority::Confirmation;

/// The pause after a failed attempt to connect.
const RETRY: Duration = Duration::from_millis(100);

/// A session that ends sooner than this is *short*. After several short sessions in a row, this module waits before it
/// opens the next one.
const SHORT_SESSION: Duration = Duration::from_secs(1);

/// Maximum number of short sessions in a row after which the next session begins without a delay.
const FEW_SHORT_SESSIONS: u32 = 5;

/// The maximum delay before the next session. The delay grows with each further short session.
const LONGEST_DELAY: Duration = Duration::from_secs(2);

/// Opens the sessions of a link, one after the other.
pub(crate) struct Sessions {
    link: Arc<Link>,
    opened: u64,
    /// The incarnation of the ring in the last session: a random name that changes when the ring is created again. A
    /// change shows that Redis has lost the ring.
    incarnation: Option<String>,
    /// The Redis of the last session. It is kept so that its stall detector is still there in the next session: the
    /// detector may have recorded the stall that ended the last session.
    server: Option<Arc<RedisServer>>,
}

impl Sessions {
    /// Opens the first session. Retries for up to [`START_TIMEOUT`] after a fault that usually ends by itself, for
    /// example while Redis loads its data. Retries without end while Redis has no room for the connection: other
    /// sidecars then close theirs for hints, or its limit is raised. Returns any other fault at once.
    pub(crate) async fn begin(link: Arc<Link>) -> Result<Sessions, Fault> {
        let mut sessions = Sessions { link, opened: 0, incarnation: None, server: None };
        let Link { topology, clock, state, .. } = &*Arc::clone(&sessions.link);
        let (begun, mut is_logged) = (clock.now(), false);
        loop {
            let fault = match sessions.open().await {
                Ok(session) => {
                    state.send_modify(|state| *state = Ok(session));
                    return Ok(sessions);
                }
                Err(fault) => fault,
            };
            let ends_by_itself = fault.kind.passes() || topology.finds_again(fault.kind);
            let is_over = clock.now().saturating_duration_since(begun) >= START_TIMEOUT;
            if !ends_by_itself || (is_over && fault.kind != FaultKind::MaxClients) {
                return Err(fault);
            }
            if !std::mem::replace(&mut is_logged, true) {
                warn!(cause = fault.text, "Redis does not serve yet; trying again");
            }
            sleep(RETRY).await;
        }
    }

    /// Opens a new session whenever the current session has ended. Never ends.
    pub(crate) async fn run(mut self) {
        let link = Arc::clone(&self.link);
        let Link { ring, clock, metrics, state, .. } = &*link;
        let (mut opened_at, mut short_sessions, mut states) = (clock.now(), 0, state.subscribe());
        loop {
            let _ = states.wait_for(LinkState::is_err).await;
            let is_short = clock.now().saturating_duration_since(opened_at) < SHORT_SESSION;
            short_sessions = if is_short { short_sessions + 1 } else { 0 };
            if short_sessions > FEW_SHORT_SESSIONS {
                sleep(LONGEST_DELAY.min(RETRY * (short_sessions - FEW_SHORT_SESSIONS))).await;
            }
            let session = self.open_next().await;
            opened_at = clock.now();
            metrics.redis_reconnects.inc();
            info!(ring, redis = %session.found, "Redis is back");
            state.send_modify(|state| *state = Ok(session));
        }
    }

    /// Opens the next session. Retries until this succeeds.
    async fn open_next(&mut self) -> Arc<Session> {
        let mut logged = None;
        loop {
            let fault = match self.open().await {
                Ok(session) => return session,
                Err(fault) => fault,
            };
            let Link { ring, metrics, state, .. } = &*self.link;
            if fault.kind != FaultKind::Unfit {
                metrics.redis_errors.of(fault.kind.effects().0).inc();
            }
            if logged.as_ref() != Some(&fault.text) {
                let cause = fault.with_remedy();
                warn!(ring, cause, "Redis cannot be used; trying again: remove the cause");
                let down = Fault::new(FaultKind::Unreachable, &*fault.text);
                state.send_modify(|state| *state = Err(down));
                logged = Some(fault.text);
            }
            sleep(RETRY).await;
        }
    }

    /// Connects, loads the scripts, and registers the connection with the script `open`.
    async fn open(&mut self) -> LinkState {
        let Link { ring, keys, topology, servers, clock, metrics, progress, .. } = &*self.link;
        // The connection has no timeout for answers, because `RedisServer::exchange` applies one.
        let found = topology.find_all(&[keys.slot], clock).await?.remove(0);
        let mut connection = topology.connect(&found, "requests", None).await?;
        let mut loads = redis::pipe();
        for script in SCRIPTS.all() {
            loads.add_command(script.load()).ignore();
        }
        let server = servers.of(&found, clock);
        self.server = Some(Arc::clone(&server));
        server.exchange(loads.query_async::<()>(&mut connection)).await?;
        let answered = progress.answered_chunk.load(Ordering::Relaxed);
        let held = progress.unanswered_acks.load(Ordering::Relaxed);
        let registration = self.registration(answered, held);
        let begun = clock.now();
        let registered = server.exchange(answer(&mut connection, &registration)).await;
        metrics.redis_round_trips.of(SCRIPTS.open.name).record(clock.now().saturating_duration_since(begun));
        let mut answer = Answer::new(&SCRIPTS.open, registered?)?;
        match answer.text()?.as_str() {
            "open" => {}
            "differs" => return Err(self.other_settings(&mut answer)?),
            word => return Err(answer.strange(word)),
        }
        let (generation, incarnation) = (answer.number()?, answer.text()?);
        self.opened += 1;
        if self.incarnation.as_ref().is_some_and(|before| *before != incarnation) {
            metrics.redis_lost.inc();
            error!(
                ring,
                "Redis has lost this ring: the messages in flight are lost, and batches of its outbox may \
                 be lost; a new ring begins now; turn on persistence (appendonly yes) \
                 to keep it"
            );
        }
        self.incarnation = Some(incarnation);
        let catch_up_max_ticks = u32::try_from(answer.count()?).unwrap_or_default();
        let (chunk, now) = (answer.count()?, clock.now());
        let confirmed_until = topology.views.lock().confirmed_until(&found, keys.slot);
        let confirmation = Confirmation::new((self.opened > 1).then_some(now), confirmed_until, now);
        Ok(Arc::new(Session {
            connection,
            found,
            server,
            number: self.opened,
            generation,
            catch_up_max_ticks,
            chunk,
            answers: [answer.text()?, answer.text()?],
            is_awaited: held > 0 || chunk < answered,
            confirmation: Mutex::new(confirmation),
            timeouts: AtomicU32::new(0),
        }))
    }

    /// Returns the call that registers the next session. `answered` is the number of the last chunk of requests that
    /// Redis answered. `held` is the number of Acks that this sidecar holds.
    fn registration(&self, answered: u64, held: u64) -> Cmd {
        let Link { keys, options: RedisOptions { wheel, rings, catch_up_max_ticks, .. }, .. } = &*self.link;
        let Keys { meta, link, outbox, groups, sidecars, held_acks, lease, messages, ticks, late, .. } = keys;
        let names =
            keys.and_lists(&[meta, link, outbox, groups, sidecars, held_acks, lease, messages, ticks, late]);
        let mut call = SCRIPTS.open.call(&names);
        call.arg(SCHEMA).arg(OLDEST_SCHEMA).arg(wheel.slots()).arg(wheel.tick_ms()).arg(rings);
        // The random name becomes the incarnation, if this call creates the ring. If Redis lost an older ring, the
        // changed name shows this.
        call.arg(wheel.slots() + SPARE_LISTS).arg(crate::redis::random_name());
        call.arg(&keys.sidecar).arg(catch_up_max_ticks).arg(answered).arg(held);
        call
    }

    /// Returns the fault for a ring whose settings in Redis differ from those of this sidecar. `answer` has the
    /// settings in Redis.
    fn other_settings(&self, answer: &mut Answer) -> Result<Fault, Fault> {
        let RedisOptions { wheel, namespace, rings: own_rings, .. } = &self.link.options;
        let (schema, slots, tick_ms, rings) = (answer.count()?, answer.count()?, answer.count()?, answer.count()?);
        let own = (u64::from(wheel.slots()), u64::from(wheel.tick_ms()), u64::from(*own_rings));
        let text = if (slots, tick_ms, rings) == own {
            format!(
                "the rings of namespace {namespace} in Redis have schema {schema}, which this version does not serve: \
                 update this sidecar, or drain the other sidecars; docs/REDIS.md has the procedure"
            )
        } else {
            format!(
                "the rings of namespace {namespace} in Redis were made with --slots {slots} --tick {tick_ms}ms \
                 --rings {rings}, and this sidecar was started with --slots {} --tick {}ms --rings {}: start it with \
                 the settings in Redis, or change those as docs/REDIS.md says, or choose another --namespace",
                own.0, own.1, own.2
            )
        };
        Ok(Fault::new(FaultKind::Unfit, text))
    }
}
