//! A connection that heals: one a ring.
//!
//! ```text
//!            connect, load scripts, `open`
//!   Away ────────────────────────────────────▶ Up (session n, generation g)
//!     ▲                                           │
//!     └── an error that ends it, two silences ────┘
//! ```
//!
//! A multiplexed connection does not come back by itself after a timeout or a READONLY answer, so every fault is
//! judged here, and the connection is made anew. Each session registers first: from then on a late write of
//! the one before is refused by the scripts, and its `open` tells which chunks of adds and dels were applied.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisResult, Value};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tracing::warn;

use crate::clock::Clock;
use crate::core::refusal::Refusal;
use crate::core::tick::Wheel;
use crate::metrics::Metrics;
use crate::redis::batching::request::Progress;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::peer::{Peer, Peers};
use crate::redis::connection::reconnect::{Known, OpenError};
use crate::redis::connection::stall_detector::StallDetector;
use crate::redis::keys::Keys;
use crate::redis::scripts::{Answer, Script};
use crate::redis::topology::Topology;
use crate::redis::topology::confirmation::Confirmation;
use crate::redis::topology::nodes::Found;

/// How often in a row nothing at all may be heard of Redis before the connection is made anew.
const MOST_TIMEOUTS: u32 = 2;

/// What a link needs to know.
pub(crate) struct LinkOptions {
    pub(crate) place: Arc<Topology>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) ring: u16,
    pub(crate) rings: u16,
    pub(crate) wheel: Wheel,
    /// The most ticks that are caught up, if the ring is new.
    pub(crate) catch_up_max_ticks: u16,
    pub(crate) keys: Arc<Keys>,
    /// What a ring that is made by this link is called, to be told from one made later.
    pub(crate) incarnation: String,
    pub(crate) clock: Arc<Clock>,
    pub(crate) metrics: Arc<Metrics>,
}

/// A connection that is registered.
#[derive(Clone)]
pub(crate) struct Session {
    pub(crate) connection: MultiplexedConnection,
    /// To whom.
    pub(crate) found: Arc<Found>,
    pub(crate) peer: Arc<Peer>,
    /// Counts the sessions of this process.
    pub(crate) number: u64,
    pub(crate) generation: i64,
    /// The most ticks that are caught up, as the ring was made.
    pub(crate) catch_up_max_ticks: u32,
    /// The last chunk applied for this sidecar.
    pub(crate) chunk: u64,
    /// The answers to the last two, with generation and number.
    pub(crate) answers: Arc<[String; 2]>,
    /// Whether the pointer waits for this sidecar: it held Acks when the session began, or Redis lost some.
    pub(crate) is_awaited: bool,
    /// When an outage ended with it; none for the first.
    pub(crate) recovered_at: Option<Instant>,
}

/// The state of a link.
#[derive(Clone)]
pub(crate) enum State {
    /// For this cause.
    Away(Arc<str>),
    Up(Session),
}

/// The way to one ring in Redis.
pub(crate) struct Link {
    shared: Arc<Shared>,
    keeper: JoinHandle<()>,
}

pub(crate) struct Shared {
    pub(crate) options: LinkOptions,
    pub(crate) state: watch::Sender<State>,
    pub(crate) timeouts: AtomicU32,
    pub(crate) progress: Arc<Progress>,
    /// The Redis that was last connected to.
    pub(crate) peer: RwLock<Option<Arc<Peer>>>,
    pub(crate) confirmation: Confirmation,
    /// Told when the session is of no use any more.
    pub(crate) broken: Notify,
}

/// The links of all rings.
#[derive(Default)]
pub(crate) struct Links(RwLock<Vec<Arc<Link>>>);

impl Links {
    pub(crate) fn push(&self, link: Arc<Link>) {
        self.0.write().push(link);
    }

    pub(crate) fn all(&self) -> Vec<Arc<Link>> {
        self.0.read().clone()
    }

    /// Whether Redis is believed to answer for each ring.
    pub(crate) fn are_up(&self) -> bool {
        self.0.read().iter().all(|link| link.is_up())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Link {
    /// Connects, and from then on keeps the connection. What passes by itself, as that Redis loads its file, is waited for.
    pub(crate) async fn open(options: LinkOptions, patience: Duration) -> Result<Link, OpenError> {
        let (state, _) = watch::channel(State::Away(Arc::from("no connection was made yet")));
        let shared = Arc::new(Shared {
            options,
            state,
            timeouts: AtomicU32::new(0),
            progress: Arc::default(),
            peer: RwLock::default(),
            confirmation: Confirmation::default(),
            broken: Notify::new(),
        });
        let mut known = Known::default();
        let session = shared.connect_at_last(&mut known, patience).await?;
        shared.state.send_replace(State::Up(session));
        let keeper = tokio::spawn(Arc::clone(&shared).keep(known));
        Ok(Link { shared, keeper })
    }

    pub(crate) fn keys(&self) -> &Keys {
        &self.shared.options.keys
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.shared.options.clock
    }

    /// Whether Redis stalled lately, as far as its answers to this process tell.
    pub(crate) fn silence(&self) -> Arc<StallDetector> {
        self.shared.peer.read().as_ref().map_or_else(Arc::default, |peer| Arc::clone(&peer.silence))
    }

    /// Whether Redis is believed to answer.
    pub(crate) fn is_up(&self) -> bool {
        matches!(&*self.shared.state.borrow(), State::Up(_))
    }

    /// The state, as it changes.
    pub(crate) fn states(&self) -> watch::Receiver<State> {
        self.shared.state.subscribe()
    }

    /// The session, if Redis is believed to answer.
    pub(crate) fn session(&self) -> Result<Session, Fault> {
        match &*self.shared.state.borrow() {
            State::Up(session) => Ok(session.clone()),
            State::Away(cause) => Err(Fault::away(cause)),
        }
    }

    /// Runs a script that writes, in this session and no other: `keys` follow those of meta and link, `arguments` the
    /// generation.
    pub(crate) async fn write_in(
        &self,
        session: &Session,
        script: &'static Script,
        keys: &[&str],
        arguments: impl FnOnce(&mut Cmd),
    ) -> Result<Answer, Refusal> {
        let mut call = self.guarded(session, script, keys, (0, 0));
        arguments(&mut call);
        Ok(self.ask(session, script, &call).await?)
    }

    /// Runs a script that only reads.
    pub(crate) async fn read(
        &self,
        script: &'static Script,
        keys: &[&str],
        arguments: impl FnOnce(&mut Cmd),
    ) -> Result<Answer, Refusal> {
        let session = self.session()?;
        let mut call = script.call(keys.iter().copied());
        arguments(&mut call);
        Ok(self.ask(&session, script, &call).await?)
    }

    /// The beginning of a call that the guard lets through in this session, with room for more arguments: their
    /// number, and their bytes.
    pub(crate) fn guarded(&self, session: &Session, script: &Script, keys: &[&str], room: (usize, usize)) -> Cmd {
        let Keys { meta, link, .. } = self.keys();
        let keys: Vec<&str> = [meta.as_str(), link.as_str()].into_iter().chain(keys.iter().copied()).collect();
        let mut call = script.call_with_room(keys.into_iter(), room);
        call.arg(session.generation);
        call
    }

    async fn ask(&self, session: &Session, script: &'static Script, call: &Cmd) -> Result<Answer, Fault> {
        match self.send(session, script, call).await {
            Err(Fault { kind: FaultKind::NoScript, .. }) => {
                self.send(session, script, &script.in_full(call)).await
            }
            answered => answered,
        }
    }

    /// Puts a script into Redis' cache.
    pub(crate) async fn load(&self, session: &Session, script: &'static Script) -> Result<(), Fault> {
        self.exchange(session, &script.load()).await.map(drop).map_err(|fault| self.judge(session, fault))
    }

    /// Sends a call and waits for its answer. What goes wrong is counted, and ends the session where it must.
    pub(crate) async fn send(
        &self,
        session: &Session,
        script: &'static Script,
        call: &Cmd,
    ) -> Result<Answer, Fault> {
        let Shared { options, timeouts, .. } = &*self.shared;
        let begun = options.clock.now();
        let answered = self.exchange(session, call).await;
        // One that was given up lasted at least as long.
        if answered.as_ref().err().is_none_or(|fault| fault.kind == FaultKind::Timeout) {
            options.metrics.round_trip(script.name).record(options.clock.now().saturating_duration_since(begun));
        }
        let value = answered.map_err(|fault| self.judge(session, fault))?;
        timeouts.store(0, Ordering::Relaxed);
        if is_stale(&value) {
            return Err(self.judge(session, Fault::stale()));
        }
        Answer::new(script, value)
    }

    /// Asks whether Redis carries scripts out, so that its silence is known: one that takes no writes for a moment answers
    /// a PING. Without an answer nothing was lost, and it is no fault.
    pub(crate) async fn probe(&self, session: &Session) {
        match self.exchange(session, redis::cmd("EVAL").arg("return 1").arg(0)).await {
            Ok(_) | Err(Fault { kind: FaultKind::Timeout, .. }) => {}
            Err(fault) => drop(self.judge(session, fault)),
        }
    }

    /// Sends a command and waits for its answer.
    async fn exchange(&self, session: &Session, call: &Cmd) -> Result<Value, Fault> {
        let mut connection = session.connection.clone();
        session.peer.exchange(answer(&mut connection, call)).await
    }

    /// Counts a fault, and ends the session if it is of no use any more.
    fn judge(&self, session: &Session, fault: Fault) -> Fault {
        let shared = &self.shared;
        shared.options.metrics.count_redis_error(fault.kind.as_str());
        let many_timeouts = fault.kind == FaultKind::Timeout
            && shared.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= MOST_TIMEOUTS;
        if many_timeouts || fault.kind.ends_the_connection() {
            self.give_up(session, &fault);
        }
        fault
    }

    /// Ends a session: its connection is made anew.
    pub(crate) fn give_up(&self, session: &Session, fault: &Fault) {
        let gone = |state: &mut State| match state {
            State::Up(present) if present.number == session.number => {
                *state = State::Away(Arc::from(fault.text.as_str()));
                true
            }
            _ => false,
        };
        if self.shared.state.send_if_modified(gone) {
            let ring = self.shared.options.ring;
            warn!(
                ring,
                cause = %fault.text,
                "Redis is away: adds are refused and acknowledgements held until it is back, which is noticed here; look \
                 at Redis, and at the network to it"
            );
            self.shared.broken.notify_one();
        }
    }
}

/// The answer to a command.
pub(crate) async fn answer(connection: &mut MultiplexedConnection, call: &Cmd) -> RedisResult<Value> {
    connection.send_packed_command(call).await.and_then(Value::extract_error)
}

/// Whether a script's reply says that the guard did not let it through.
fn is_stale(value: &Value) -> bool {
    matches!(value, Value::Array(values)
        if matches!(values.first(), Some(Value::BulkString(word)) if word == b"stale"))
}
