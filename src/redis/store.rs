//! Opens the Redis store, with all its rings, and closes it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::core::{Reason, Refusal, RingParts, Store, StoreReport};
use crate::metrics::Metrics;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::hints;
use crate::redis::connection::link::Link;
use crate::redis::connection::reconnect::Sessions;
use crate::redis::keys::{Keys, MAX_SLOTS};
use crate::redis::leader::lease::RedisLease;
use crate::redis::leader::rebalance::Leaderships;
use crate::redis::leader::term::Identity;
use crate::redis::options::RedisOptions;
use crate::redis::outbox::RedisOutbox;
use crate::redis::ring::RedisRing;
use crate::redis::startup_checks::{RedisStoreError, StartupChecks};
use crate::redis::topology::Topology;
use crate::redis::topology::nodes::name_connections;
use crate::redis::topology::watch::{warn_of_settings, watch};

/// How long a closing sidecar waits at most for Redis to answer the Acks that the sidecar has received.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(4);

/// How long the sidecar may take to remove itself from Redis. Together with [`CLOSE_TIMEOUT`] it is shorter than the time
/// that a drain gives the store, so a drain always reports the Acks that are lost.
const DEPART_TIMEOUT: Duration = Duration::from_millis(1_500);

/// How often a closing sidecar checks whether Redis has answered all its Acks.
const CLOSE_POLL: Duration = Duration::from_millis(10);

/// A store in Redis. All sidecars with the same namespace share it.
pub struct RedisStore {
    rings: Vec<RingParts>,
    links: Arc<[Arc<Link>]>,
    /// The outbox of each ring, and the task that sends this sidecar's heartbeats to that outbox.
    outboxes: Vec<(Arc<RedisOutbox>, AbortOnDropHandle<()>)>,
    /// The report of the last check.
    report: Arc<Mutex<StoreReport>>,
    _tasks: JoinSet<()>,
}

impl RedisStore {
    /// Connects to Redis and opens every ring. Creates the rings that do not exist.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis cannot be reached or used, or if its rings were created with other settings.
    ///
    /// # Panics
    ///
    /// Panics if the number of slots exceeds `MAX_SLOTS`. The check of the configuration refuses such a number earlier.
    pub async fn open(
        options: &RedisOptions,
        clock: &Arc<Clock>,
        metrics: &Arc<Metrics>,
    ) -> Result<RedisStore, RedisStoreError> {
        assert!(options.wheel.slots() <= MAX_SLOTS, "the check of the configuration refuses more slots");
        let mut topology = Topology::with_files(&options.url, &options.files).map_err(RedisStoreError::Address)?;
        topology.is_without_majority = options.expire_without_majority;
        let topology = Arc::new(topology);
        let identity = Identity { name: options.name.clone(), token: crate::redis::random_name() };
        let sidecar = unique_sidecar(&options.name);
        name_connections(&options.name);
        let keys =
            (0..options.rings).map(|ring| Keys::new(&options.namespace, ring, options.wheel.slots(), &sidecar));
        let keys: Vec<Keys> = keys.collect();
        let report = Arc::new(Mutex::new(StoreReport::default()));
        let checks = StartupChecks {
            topology: Arc::clone(&topology),
            slots: keys.iter().map(|keys| keys.slot).collect(),
            clock: Arc::clone(clock),
            ack_timeout: options.wheel.ticks(options.wheel.slots().into()),
            known: Arc::clone(&report),
            keys: Keys::new(&options.namespace, 0, options.wheel.slots(), &sidecar),
        };
        checks.first().await?;
        warn_of_settings(&topology);
        let mut tasks = JoinSet::new();
        let (mut links, servers) = (Vec::new(), Arc::default());
        let leaderships = Arc::new(Leaderships::new(identity.clone(), options.lease, options.rings));
        for ((ring, keys), term) in (0..).zip(keys).zip(&leaderships.terms) {
            let link = Arc::new(Link {
                ring,
                options: options.of_one_ring(),
                identity: identity.clone(),
                keys,
                term: Arc::clone(term),
                topology: Arc::clone(&topology),
                servers: Arc::clone(&servers),
                clock: Arc::clone(clock),
                metrics: Arc::clone(metrics),
                progress: Arc::default(),
                state: watch::Sender::new(Err(Fault::new(FaultKind::Unreachable, "no connection was made yet"))),
            });
            tasks.spawn(open_link(&link).await?.run());
            links.push(link);
        }
        let links: Arc<[Arc<Link>]> = links.into();
        tasks.spawn(watch(topology, Arc::clone(&links), Arc::clone(clock), Arc::clone(metrics)));
        let (mut rings, mut outboxes) = (Vec::new(), Vec::new());
        for link in &*links {
            let lease = Arc::new(RedisLease::new(Arc::clone(link), Arc::clone(&leaderships)));
            let outbox = Arc::new(RedisOutbox::new(Arc::clone(link)));
            tasks.spawn(hints::listen(
                Arc::clone(link),
                Arc::clone(&links),
                Arc::clone(&outbox),
                Arc::clone(&lease),
            ));
            let heartbeats = tokio::spawn(Arc::clone(&outbox).send_heartbeats());
            outboxes.push((Arc::clone(&outbox), AbortOnDropHandle::new(heartbeats)));
            rings.push(RingParts {
                ring: Arc::new(RedisRing::new(Arc::clone(link), Arc::clone(&links))),
                outbox,
                lease,
            });
        }
        tasks.spawn(checks.repeat());
        info!(namespace = options.namespace, rings = options.rings, sidecar, "the wheel is in Redis");
        Ok(RedisStore { rings, links, outboxes, report, _tasks: tasks })
    }
}

/// Opens the first session of a link, the connection of a ring to Redis. Warns if the ring was created with another
/// `--catch-up-max-ticks`.
async fn open_link(link: &Arc<Link>) -> Result<Sessions, RedisStoreError> {
    let sessions = Sessions::begin(Arc::clone(link)).await.map_err(|fault| match fault.kind {
        FaultKind::Unfit => RedisStoreError::Differs(fault.text),
        _ => RedisStoreError::Unusable(fault.with_remedy()),
    })?;
    if let Ok(session) = link.session()
        && session.catch_up_max_ticks != u32::from(link.options.catch_up_max_ticks)
    {
        warn!(
            ring = link.ring,
            "--catch-up-max-ticks {} is ignored: the ring was created with {caught_up}, which applies to all sidecars; \
             start this sidecar with --catch-up-max-ticks {caught_up}",
            link.options.catch_up_max_ticks,
            caught_up = session.catch_up_max_ticks
        );
    }
    Ok(sessions)
}

#[async_trait]
impl Store for RedisStore {
    fn kind(&self) -> &'static str {
        "redis"
    }

    fn rings(&self) -> &[RingParts] {
        &self.rings
    }

    fn is_up(&self) -> bool {
        self.links.iter().all(|link| link.is_up())
    }

    fn is_full(&self) -> bool {
        self.links.iter().any(|link| link.is_full())
    }

    fn report(&self) -> StoreReport {
        self.report.lock().clone()
    }

    async fn close(&self) -> Result<String, Refusal> {
        let waited = tokio::time::timeout(CLOSE_TIMEOUT, async {
            while held(&self.links) > 0 {
                tokio::time::sleep(CLOSE_POLL).await;
            }
        });
        let lost = if waited.await.is_err() { held(&self.links) } else { 0 };
        if lost > 0 {
            error!(
                messages = lost,
                "Redis was unreachable for too long: the acknowledgements that this sidecar holds are lost when its \
                 process ends, and their messages will time out although they were acknowledged"
            );
        }
        // All rings at the same time: one after the other, a Redis that stalls would exceed the time of the drain.
        let departing = join_all(self.outboxes.iter().map(|(outbox, heartbeats)| outbox.depart(heartbeats)));
        match tokio::time::timeout(DEPART_TIMEOUT, departing).await {
            Err(_) => warn!("this sidecar did not remove itself from Redis in time: the leader will remove it"),
            Ok(departed) => {
                if let Some(refusal) = departed.into_iter().find_map(Result::err) {
                    warn!(%refusal, "this sidecar could not remove itself from Redis: the leader will remove it");
                }
            }
        }
        if lost > 0 {
            let text =
                format!("the drain lost {lost} acknowledgements, because Redis was unreachable for too long");
            return Err(Refusal::new(Reason::Draining, text));
        }
        Ok(String::from("the wheel stays in Redis"))
    }
}

/// Returns the number of Acks that this sidecar has received and Redis has not answered.
fn held(links: &[Arc<Link>]) -> u64 {
    links.iter().map(|link| link.progress.unanswered_acks.load(Ordering::Relaxed)).sum()
}

/// Returns a unique name of this sidecar for use in Redis: the letters, digits and `._:-` of `name`, at most 64 of
/// them, and then random digits.
fn unique_sidecar(name: &str) -> String {
    let legal = |character: &char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | ':' | '-');
    let plain: String = name.chars().filter(legal).take(64).collect();
    format!("{plain}-{}", crate::redis::random_name())
}
