//! Runs scripts on the connection to the Redis of one ring, and ends the connection after a fault.
//!
//! ```text
//!          connect, load scripts, run `open`
//!   Down ────────────────────────────────────▶ Up (session n, generation g)
//!     ▲                                           │
//!     └── a fatal fault, two timeouts in a row ───┘
//! ```
//!
//! A *session* is the time from the registration of one connection until its end. A multiplexed connection does not
//! recover by itself after a timeout or a READONLY answer. So this module ends the session after a fatal fault, or
//! after two timeouts in a row. Then [`reconnect`](crate::redis::connection::reconnect) opens the next session. Each
//! session first runs the script `open`. This script registers a *generation*, a number that grows with each
//! connection. From then on, scripts refuse writes of the previous session, which have a lower generation. `open` also
//! returns the number of the last *chunk*, that is, of the last script with adds and dels that Redis applied.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{Cmd, RedisResult, ToRedisArgs, Value};
use tokio::sync::watch;
use tracing::warn;

use crate::clock::Clock;
use crate::core::Refusal;
use crate::metrics::Metrics;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::redis_health::{RedisServer, RedisServers};
use crate::redis::connection::stall_detector::{Look, StallDetector};
use crate::redis::keys::Keys;
use crate::redis::leader::term::{CurrentTerm, Identity};
use crate::redis::options::RedisOptions;
use crate::redis::scripts::{Answer, Script};
use crate::redis::topology::Topology;
use crate::redis::topology::dial::RedisConnection;
use crate::redis::topology::majority::Confirmation;
use crate::redis::topology::nodes::Found;

/// Number of timeouts in a row after which the sidecar connects again.
const MAX_TIMEOUTS: u32 = 2;

/// How long Redis counts as full after it refused a command because it has no memory.
const FULL_TIME: Duration = Duration::from_secs(10);

/// A registered connection to Redis.
pub(crate) struct Session {
    pub(crate) connection: RedisConnection,
    /// The Redis at the other end of the connection.
    pub(crate) found: Found,
    pub(crate) server: Arc<RedisServer>,
    /// The number of this session among all sessions of the link, from 1.
    pub(crate) number: u64,
    pub(crate) generation: i64,
    /// Maximum number of missed ticks that a leader catches up. This is a setting of the ring in Redis.
    pub(crate) catch_up_max_ticks: u32,
    /// The number of the last chunk that Redis had applied for this sidecar when the session began.
    pub(crate) chunk: u64,
    /// The answers to the last two chunks that Redis had applied, each with the generation and the number of its chunk.
    pub(crate) answers: [String; 2],
    /// Whether this sidecar must tell Redis when certain Acks are applied, because the pointer (the tick that expires
    /// next) waits for them. The sidecar held these Acks when the session began, or Redis lost them.
    pub(crate) is_awaited: bool,
    pub(crate) confirmation: Mutex<Confirmation>,
    /// Number of requests in a row that timed out.
    pub(super) timeouts: AtomicU32,
}

/// The session of a link, or the reason why there is none.
pub(crate) type LinkState = Result<Arc<Session>, Fault>;

/// The state of one ring in this sidecar: its connection, and the data that lease, ring and outbox share.
/// [`reconnect`](crate::redis::connection::reconnect) opens its sessions.
pub(crate) struct Link {
    pub(crate) ring: u16,
    /// The options of the store. Each limit in them is the share of this ring.
    pub(crate) options: RedisOptions,
    pub(crate) identity: Identity,
    pub(crate) keys: Keys,
    /// The current leadership term of this sidecar.
    pub(crate) term: Arc<CurrentTerm>,
    pub(crate) topology: Arc<Topology>,
    pub(crate) servers: Arc<RedisServers>,
    pub(crate) clock: Arc<Clock>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) state: watch::Sender<LinkState>,
}

/// The progress of answers to the requests of a link.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Number of messages in dels without an answer. While Redis is unreachable, these Acks are held.
    pub(crate) unanswered_acks: AtomicU64,
    /// The number of the last answered chunk.
    pub(crate) answered_chunk: AtomicU64,
    /// When Redis last refused a command because it has no memory.
    pub(crate) out_of_memory_at: Mutex<Option<Instant>>,
}

impl Link {
    /// Returns the stall detector of the Redis that the session uses. Without a session, returns a new detector, which
    /// reports no stall.
    pub(crate) fn silence(&self) -> Arc<StallDetector> {
        self.session().map_or_else(|_| Arc::default(), |session| Arc::clone(&session.server.stall_detector))
    }

    /// Returns whether the Redis that the session uses stalls now.
    pub(crate) fn look(&self) -> Look {
        self.silence().look(self.clock.now())
    }

    /// Counts a loss of data in Redis.
    pub(crate) fn count_loss(&self) {
        self.metrics.redis_errors.of("lost").inc();
    }

    /// Returns whether the link has a session.
    pub(crate) fn is_up(&self) -> bool {
        self.state.borrow().is_ok()
    }

    /// Returns whether Redis has refused a command within [`FULL_TIME`] because it has no memory.
    pub(crate) fn is_full(&self) -> bool {
        self.progress.out_of_memory_at.lock().is_some_and(|at| self.clock.now() < at + FULL_TIME)
    }

    /// Returns the session, or a fault with the reason why there is none.
    pub(crate) fn session(&self) -> LinkState {
        self.state.borrow().clone()
    }

    /// Runs a script that writes. The script refuses the call if `session` is no longer the newest one. This function
    /// adds the keys `meta` and `link` before `keys`, and the generation before `arguments`. Returns the first word of
    /// the answer, and the other values.
    pub(crate) async fn write_in(
        &self,
        session: &Session,
        script: &'static Script,
        keys: &[impl AsRef<str>],
        arguments: impl ToRedisArgs,
    ) -> Result<(String, Answer), Refusal> {
        let call = self.guarded(session, script, keys).arg(arguments).take();
        let mut answer = self.run(session, script, &call).await?;
        Ok((answer.text()?, answer))
    }

    /// Runs a script that only reads.
    pub(crate) async fn read(
        &self,
        script: &'static Script,
        keys: &[&str],
        arguments: impl ToRedisArgs,
    ) -> Result<Answer, Refusal> {
        let session = self.session()?;
        let call = script.call(keys).arg(arguments).take();
        Ok(self.run(&session, script, &call).await?)
    }

    /// Returns the beginning of a call: its keys, and the generation of the session. `refuse_stale_connection.lua`
    /// compares this generation in Redis.
    pub(crate) fn guarded(&self, session: &Session, script: &Script, keys: &[impl AsRef<str>]) -> Cmd {
        let Keys { meta, link, .. } = &self.keys;
        let keys: Vec<&str> = [meta.as_str(), link].into_iter().chain(keys.iter().map(AsRef::as_ref)).collect();
        let mut call = script.call(&keys);
        call.arg(session.generation);
        call
    }

    async fn run(&self, session: &Session, script: &'static Script, call: &Cmd) -> Result<Answer, Fault> {
        match self.send(session, script, call).await {
            Err(Fault { kind: FaultKind::NoScript, .. }) => {
                self.send(session, script, &script.in_full(call)).await
            }
            answered => answered,
        }
    }

    /// Loads a script into Redis' cache.
    pub(crate) async fn load(&self, session: &Session, script: &'static Script) -> Result<(), Fault> {
        self.exchange(session, &script.load()).await.map(drop).map_err(|fault| self.report(session, fault))
    }

    /// Sends a call of a script and waits for its answer. Counts a fault, and ends the session after a fatal fault.
    pub(crate) async fn send(
        &self,
        session: &Session,
        script: &'static Script,
        call: &Cmd,
    ) -> Result<Answer, Fault> {
        let begun = self.clock.now();
        let answered = self.exchange(session, call).await;
        // Timeouts count too: the round trip would have taken at least the elapsed time.
        if answered.as_ref().err().is_none_or(|fault| fault.kind == FaultKind::Timeout) {
            self.metrics
                .redis_round_trips
                .of(script.name)
                .record(self.clock.now().saturating_duration_since(begun));
        }
        let value = answered.map_err(|fault| self.report(session, fault))?;
        session.timeouts.store(0, Ordering::Relaxed);
        if is_stale(&value) {
            let text = "the sidecar has registered a newer connection, or the ring does not exist any more";
            return Err(self.report(session, Fault::new(FaultKind::Stale, text)));
        }
        Answer::new(script, value)
    }

    /// Runs a script that does nothing, so that the stall detector gets an answer. A PING does not suffice, because
    /// Redis answers it even while it pauses writes. A timeout is not counted as an error, because no request is lost.
    pub(crate) async fn probe(&self, session: &Session) {
        match self.exchange(session, redis::cmd("EVAL").arg("return 1").arg(0)).await {
            Ok(_) | Err(Fault { kind: FaultKind::Timeout, .. }) => {}
            Err(fault) => drop(self.report(session, fault)),
        }
    }

    /// Sends a command and waits for its answer.
    async fn exchange(&self, session: &Session, call: &Cmd) -> Result<Value, Fault> {
        session.server.exchange(answer(&mut session.connection.clone(), call)).await
    }

    /// Counts a fault. Ends the session after a fatal fault, or after [`MAX_TIMEOUTS`] timeouts in a row.
    fn report(&self, session: &Session, fault: Fault) -> Fault {
        let (label, ends_the_connection, _) = fault.kind.effects();
        self.metrics.redis_errors.of(label).inc();
        if fault.kind == FaultKind::OutOfMemory {
            *self.progress.out_of_memory_at.lock() = Some(self.clock.now());
        }
        let many_timeouts = fault.kind == FaultKind::Timeout
            && session.timeouts.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_TIMEOUTS;
        if many_timeouts || ends_the_connection {
            self.give_up(session, &fault);
        }
        fault
    }

    /// Ends `session`, unless a newer session has replaced it. The link then connects again.
    pub(crate) fn give_up(&self, session: &Session, fault: &Fault) {
        let is_ended = self.state.send_if_modified(|state| {
            let is_current = state.as_ref().is_ok_and(|current| current.number == session.number);
            if is_current {
                *state = Err(Fault::new(FaultKind::Unreachable, &*fault.text));
            }
            is_current
        });
        if is_ended {
            warn!(
                ring = self.ring,
                cause = %fault.text,
                "Redis is unreachable: adds are refused and acknowledgements held until it answers again; the sidecar \
                 keeps connecting; look at Redis, and at the network to it"
            );
        }
    }
}

/// Sends a command and waits for its answer. If the answer contains an error, returns that error.
pub(crate) async fn answer(connection: &mut RedisConnection, call: &Cmd) -> RedisResult<Value> {
    connection.send_packed_command(call).await.and_then(Value::extract_error)
}

/// Returns whether `refuse_stale_connection.lua` refused the call.
fn is_stale(value: &Value) -> bool {
    matches!(value, Value::Array(values)
        if matches!(values.first(), Some(Value::BulkString(word)) if word == b"stale"))
}
