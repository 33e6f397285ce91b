//! Opens the Redis store, with all its rings, and closes it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::core::refusal::Refusal;
use crate::core::store::{Moment, RingParts, Store};
use crate::metrics::Metrics;
use crate::redis::batching::driver::{BatchDriver, Bounds};
use crate::redis::connection::hints;
use crate::redis::connection::link::{Link, LinkOptions, Links};
use crate::redis::connection::open::name_connections;
use crate::redis::connection::peer::Peers;
use crate::redis::context::RingContext;
use crate::redis::keys::{Keys, MAX_SLOTS};
use crate::redis::leader::lease::RedisLease;
use crate::redis::leader::rebalance::Leaderships;
use crate::redis::leader::term::Identity;
use crate::redis::options::RedisOptions;
use crate::redis::outbox::RedisOutbox;
use crate::redis::ring::RedisRing;
use crate::redis::startup_checks::StartupChecks;
use crate::redis::store_error::{RedisStoreError, START_TIMEOUT};
use crate::redis::topology::{Topology, watch};

/// How long a sidecar that closes waits for an unreachable Redis, if it holds acknowledgements for it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(4);

/// How often it looks whether they are applied.
const CLOSE_POLL: Duration = Duration::from_millis(10);

/// The most answered Acks that are kept over all rings, in case Redis loses them: 32 bytes each.
const KEPT_ACKS: usize = 1_000_000;

/// A wheel that lives in Redis and is shared by all sidecars of its namespace.
pub struct RedisStore {
    rings: Vec<RingParts>,
    links: Arc<Links>,
    peers: Arc<Peers>,
    drivers: Vec<Arc<BatchDriver>>,
    /// The outbox of each ring, with the task that sends heartbeats.
    outboxes: Vec<(Arc<RedisOutbox>, AbortOnDropHandle<()>)>,
    leaderships: Arc<Leaderships>,
    tasks: Vec<AbortOnDropHandle<()>>,
}

impl RedisStore {
    /// Connects to Redis and opens every ring. A ring that does not exist is created.
    ///
    /// # Errors
    ///
    /// When Redis cannot be reached or used, or its rings were made with other settings.
    ///
    /// # Panics
    ///
    /// Not with a number of slots that `--slots` allows for a Redis store.
    pub async fn open(
        options: &RedisOptions,
        clock: &Arc<Clock>,
        metrics: &Arc<Metrics>,
    ) -> Result<RedisStore, RedisStoreError> {
        assert!(options.wheel.slots() <= MAX_SLOTS, "the configuration is checked");
        let topology = Topology::parse(&options.url).map_err(RedisStoreError::Address)?;
        let topology = Arc::new(topology.without_majority(options.expire_without_majority));
        let identity = identity(&options.name);
        name_connections(&identity.name);
        let checks = StartupChecks {
            topology: Arc::clone(&topology),
            slots: (0..options.rings).map(|ring| Keys::slot_of(&options.namespace, ring)).collect(),
            clock: Arc::clone(clock),
            ack_timeout: options.wheel.ticks(options.wheel.slots().into()),
        };
        let findings = checks.first().await?;
        watch::warn_of_settings(&topology);
        let mut store = RedisStore {
            rings: Vec::new(),
            links: Arc::default(),
            peers: Arc::default(),
            drivers: Vec::new(),
            outboxes: Vec::new(),
            leaderships: Arc::new(Leaderships::new(identity.clone(), options.lease, options.rings)),
            tasks: Vec::new(),
        };
        let links = Arc::clone(&store.links);
        let watching = watch::watch(Arc::clone(&topology), links, Arc::clone(clock), Arc::clone(metrics));
        store.tasks.push(AbortOnDropHandle::new(tokio::spawn(watching)));
        let options_of_ring = options.of_one_ring();
        for ring in 0..options.rings {
            store.open_ring(ring, &options_of_ring, &topology, &identity, clock, metrics).await?;
        }
        store.tasks.push(AbortOnDropHandle::new(tokio::spawn(checks.repeat(findings))));
        info!(
            namespace = options.namespace,
            rings = options.rings,
            sidecar = identity.sidecar,
            "the wheel is in Redis"
        );
        Ok(store)
    }

    /// Opens one ring. `options` have the bounds of one ring.
    async fn open_ring(
        &mut self,
        ring: u16,
        options: &RedisOptions,
        topology: &Arc<Topology>,
        identity: &Identity,
        clock: &Arc<Clock>,
        metrics: &Arc<Metrics>,
    ) -> Result<(), RedisStoreError> {
        let link_options = LinkOptions {
            place: Arc::clone(topology),
            peers: Arc::clone(&self.peers),
            ring,
            rings: options.rings,
            wheel: options.wheel,
            catch_up_max_ticks: options.catch_up_max_ticks,
            keys: Arc::new(Keys::new(&options.namespace, ring, options.wheel.slots(), &identity.sidecar)),
            incarnation: crate::redis::random_name(),
            clock: Arc::clone(clock),
            metrics: Arc::clone(metrics),
        };
        let opened = Link::open(link_options, START_TIMEOUT).await;
        let link = Arc::new(opened.map_err(|error| RedisStoreError::of(error, options))?);
        let caught_up = link.session().map_or(0, |session| session.catch_up_max_ticks);
        if caught_up != u32::from(options.catch_up_max_ticks) {
            warn!(
                ring,
                "--catch-up-max-ticks {} is not what the ring was made with: {caught_up} holds for all sidecars; say \
                 --catch-up-max-ticks {caught_up} here",
                options.catch_up_max_ticks
            );
        }
        self.links.push(Arc::clone(&link));
        let bounds = Bounds {
            max_in_flight: options.max_in_flight,
            max_held_acks: options.max_held_acks,
            kept_acks: KEPT_ACKS.div_ceil(options.rings.into()),
        };
        let driver = BatchDriver::new(Arc::clone(&link), Arc::clone(&self.links), bounds);
        let driver = Arc::new(driver);
        let term = Arc::clone(&self.leaderships.terms[usize::from(ring)]);
        let (options, identity) = (options.clone(), identity.clone());
        let context = Arc::new(RingContext { ring, options, identity, link, term });
        let lease = Arc::new(RedisLease::new(Arc::clone(&context), Arc::clone(&self.leaderships)));
        let outbox = Arc::new(RedisOutbox::new(Arc::clone(&context)));
        let (link, news) = (Arc::clone(&context.link), context.link.keys().news.clone());
        self.tasks.push(hints::listen(link, news, Arc::clone(&outbox), Arc::clone(&lease)));
        let ring = Arc::new(RedisRing::new(context, Arc::clone(&driver)));
        self.drivers.push(driver);
        let heartbeats = tokio::spawn(Arc::clone(&outbox).send_heartbeats());
        self.outboxes.push((Arc::clone(&outbox), AbortOnDropHandle::new(heartbeats)));
        self.rings.push(RingParts { ring, outbox, lease });
        Ok(())
    }
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
        self.links.are_up()
    }

    async fn close(&self, _moment: Moment) -> Result<String, Refusal> {
        let waited = tokio::time::timeout(CLOSE_TIMEOUT, async {
            while held(&self.drivers) > 0 {
                tokio::time::sleep(CLOSE_POLL).await;
            }
        });
        if waited.await.is_err() {
            error!(
                messages = held(&self.drivers),
                "Redis was unreachable for too long: the acknowledgements that this sidecar holds end with its \
                 process, and their messages will time out; look at the clients of the next storm with care"
            );
        }
        for (outbox, heartbeats) in &self.outboxes {
            if let Err(refusal) = outbox.depart(heartbeats).await {
                warn!(%refusal, "this sidecar could not remove itself from Redis: the leader will remove it");
            }
        }
        Ok(String::from("the wheel stays in Redis"))
    }
}

/// How many acknowledgements wait for Redis.
fn held(drivers: &[Arc<BatchDriver>]) -> u64 {
    drivers.iter().map(|driver| driver.unanswered_acks()).sum()
}

/// Unique names for this sidecar.
fn identity(name: &str) -> Identity {
    let legal = |character: &char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | ':' | '-');
    let plain: String = name.chars().filter(legal).take(64).collect();
    let random = crate::redis::random_name();
    Identity { name: name.to_owned(), sidecar: format!("{plain}-{random}"), token: crate::redis::random_name() }
}
