//! The Redis store as a whole.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::core::batch::StormRule;
use crate::core::outbox::Retention;
use crate::core::ring::Reply;
use crate::core::store::{Moment, RingParts, Store};
use crate::metrics::Metrics;
use crate::redis::batching::driver::{BatchDriver, Bounds};
use crate::redis::connection::hints;
use crate::redis::connection::link::{Link, LinkOptions, Links};
use crate::redis::connection::open::name_connections;
use crate::redis::connection::peer::Peers;
use crate::redis::connection::reconnect::OpenError;
use crate::redis::keys::{Keys, MAX_SLOTS};
use crate::redis::leader::lease::{LeaseOptions, RedisLease};
use crate::redis::leader::rebalance::Leaderships;
use crate::redis::leader::term::Identity;
use crate::redis::options::RedisOptions;
use crate::redis::outbox::RedisOutbox;
use crate::redis::ring::{RedisRing, RingOptions};
use crate::redis::startup_findings::Checks;
use crate::redis::topology::Topology;
use crate::redis::topology::cluster::Slot;
use crate::redis::topology::confirmation;

/// How long a sidecar that starts waits for a Redis that is not there yet.
pub(super) const START_PATIENCE: Duration = Duration::from_secs(10);

/// How long a sidecar that goes waits for a Redis that is away, if it holds acknowledgements for it.
const CLOSE_PATIENCE: Duration = Duration::from_secs(4);

/// How often it looks.
const CLOSE_POLL: Duration = Duration::from_millis(10);

/// The most answered Acks that are kept over all rings, in case that Redis loses them: 32 bytes each.
const KEPT_ACKS: usize = 1_000_000;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum RedisStoreError {
    /// The address is none.
    #[error("--store: {0}; write it as docs/REDIS.md says")]
    Address(String),
    /// There is no Redis.
    #[error("Redis cannot be reached within {START_PATIENCE:?}: {0}; {hint}", hint = hint(.0))]
    Unreachable(String),
    /// This Redis cannot be used.
    #[error("this Redis cannot be used: {0}")]
    Unusable(String),
    /// The ring in Redis has other dimensions.
    #[error("{0}")]
    Differs(String),
}

/// A wheel that lives in Redis and is shared by all sidecars of its namespace.
pub struct RedisStore {
    seats: Vec<RingParts>,
    links: Arc<Links>,
    peers: Arc<Peers>,
    coalescers: Vec<Arc<BatchDriver>>,
    outboxes: Vec<Arc<RedisOutbox>>,
    leaderships: Arc<Leaderships>,
    tasks: Vec<AbortOnDropHandle<()>>,
}

impl RedisStore {
    /// Connects to Redis and opens every ring, which is made if it is not there.
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
        let place = Topology::parse(&options.url).map_err(RedisStoreError::Address)?;
        let place = Arc::new(place.without_majority(options.expire_without_majority));
        let slots: Vec<Slot> = (0..options.rings).map(|ring| Keys::slot_of(&options.namespace, ring)).collect();
        let identity = identity(&options.name);
        name_connections(&identity.name);
        let checks = Checks {
            place: Arc::clone(&place),
            slots,
            clock: Arc::clone(clock),
            ack_timeout: options.wheel.ticks(options.wheel.slots().into()),
        };
        let findings = checks.first().await?;
        confirmation::warn_of_settings(&place);
        let mut store = RedisStore {
            seats: Vec::new(),
            links: Arc::default(),
            peers: Arc::default(),
            coalescers: Vec::new(),
            outboxes: Vec::new(),
            leaderships: Arc::new(Leaderships::new(identity.clone(), options.lease)),
            tasks: Vec::new(),
        };
        let links = Arc::clone(&store.links);
        let watch = confirmation::watch(Arc::clone(&place), links, Arc::clone(clock), Arc::clone(metrics));
        store.tasks.push(AbortOnDropHandle::new(tokio::spawn(watch)));
        for ring in 0..options.rings {
            store.open_ring(ring, options, &place, &identity, clock, metrics).await?;
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

    async fn open_ring(
        &mut self,
        ring: u16,
        options: &RedisOptions,
        place: &Arc<Topology>,
        identity: &Identity,
        clock: &Arc<Clock>,
        metrics: &Arc<Metrics>,
    ) -> Result<(), RedisStoreError> {
        let wheel = options.wheel;
        let keys = Arc::new(Keys::new(&options.namespace, ring, wheel.slots(), &identity.sidecar));
        let link_options = LinkOptions {
            place: Arc::clone(place),
            peers: Arc::clone(&self.peers),
            ring,
            rings: options.rings,
            wheel,
            catch_up_max_ticks: options.catch_up_max_ticks,
            keys: Arc::clone(&keys),
            incarnation: crate::redis::random_name(),
            clock: Arc::clone(clock),
            metrics: Arc::clone(metrics),
        };
        let link = Link::open(link_options, START_PATIENCE);
        let link = Arc::new(link.await.map_err(|error| explain(error, options))?);
        let caught_up = link.session().map_or(0, |session| session.catch_up_max_ticks);
        if caught_up != u32::from(options.catch_up_max_ticks) {
            warn!(
                ring,
                "--catch-up-max-ticks {} is not what the ring was made with: {caught_up} holds for all sidecars; say \
                 --catch-up-max-ticks {caught_up} here",
                options.catch_up_max_ticks
            );
        }
        let bounds = Bounds {
            max_in_flight: options.per_ring(options.max_in_flight),
            max_held_acks: options.per_ring(options.max_held_acks),
            kept_acks: KEPT_ACKS.div_ceil(options.rings.into()),
        };
        self.links.push(Arc::clone(&link));
        let links = Arc::clone(&self.links);
        let coalescer = Arc::new(BatchDriver::new(Arc::clone(&link), links, bounds));
        self.coalescers.push(Arc::clone(&coalescer));
        let office = self.leaderships.add_term();
        // Messages are spread evenly over the rings, and so is a storm.
        let storm = StormRule { min: options.per_ring(options.storm.min), ..options.storm };
        let ring_options = RingOptions { ring, wheel, storm, outage_grace: options.outage_grace };
        let lease_options = LeaseOptions {
            ring,
            duration: options.lease,
            tick_length: wheel.tick_length(),
            never_lead: options.never_lead,
            outage_grace: options.outage_grace,
        };
        let retention =
            Retention { time: options.retention.time, max_ids: options.per_ring(options.retention.max_ids) };
        let (link_of_lease, link_of_ring) = (Arc::clone(&link), Arc::clone(&link));
        let leadership = (Arc::clone(&office), Arc::clone(&self.leaderships));
        let lease = Arc::new(RedisLease::new(lease_options, link_of_lease, identity.clone(), leadership));
        let sidecar = identity.sidecar.clone();
        let outbox =
            RedisOutbox::new(Arc::clone(&link), ring, retention, sidecar, options.lease, Arc::clone(&office));
        let outbox = Arc::new(outbox);
        let ring = RedisRing::new(ring_options, link_of_ring, coalescer, identity.clone(), office);
        let listener =
            hints::listen(Arc::clone(&link), keys.news.clone(), Arc::clone(&outbox), Arc::clone(&lease));
        self.tasks.push(listener);
        self.outboxes.push(Arc::clone(&outbox));
        self.seats.push(RingParts { ring: Arc::new(ring), outbox, lease });
        Ok(())
    }
}

impl Store for RedisStore {
    fn kind(&self) -> &'static str {
        "redis"
    }

    fn rings(&self) -> &[RingParts] {
        &self.seats
    }

    fn is_up(&self) -> bool {
        self.links.are_up()
    }

    fn close(&self, _moment: Moment) -> Reply<String> {
        let (outboxes, coalescers) = (self.outboxes.clone(), self.coalescers.clone());
        Reply::Later(Box::pin(async move {
            let waited = tokio::time::timeout(CLOSE_PATIENCE, async {
                while held(&coalescers) > 0 {
                    tokio::time::sleep(CLOSE_POLL).await;
                }
            });
            if waited.await.is_err() {
                error!(
                    messages = held(&coalescers),
                    "Redis did not come back in time for the acknowledgements that were held for it: they end with this \
                     process, and their messages will time out; look at the clients of the next storm with care"
                );
            }
            for outbox in outboxes {
                if let Err(refusal) = outbox.depart().await {
                    warn!(%refusal, "Redis was not told that this sidecar goes; the others see it by themselves");
                }
            }
            Ok(String::from("the wheel stays in Redis"))
        }))
    }
}

/// Acknowledgements that wait for Redis.
fn held(coalescers: &[Arc<BatchDriver>]) -> u64 {
    coalescers.iter().map(|coalescer| coalescer.unanswered_acks()).sum()
}

/// What a cause says, and where to look then for what keeps a Redis from being reached.
const HINTS: &[(&str, &str)] = &[
    ("knows no primary", "name it in ?master= of --store as `sentinel monitor` has it"),
    ("unknown command 'SENTINEL'", "name the Sentinels in --store, and not the Redis that they watch"),
    (
        "UnknownIssuer",
        "name the certificate of whoever signed that of Redis in SSL_CERT_FILE, in the environment of this sidecar",
    ),
    ("PEM", "mend the file that SSL_CERT_FILE names in the environment of this sidecar, or name another"),
    ("certificate expired", "renew the certificate of Redis"),
    ("certificate not valid yet", "are the clocks right, here and where Redis has its certificate from?"),
    ("not valid for name", "reach it in --store by a name that its certificate has"),
    ("DB index", "correct the number of the database at the end of --store"),
    (
        "maxclients",
        "a sidecar has two connections to Redis for each ring, and opens one for a moment once a minute",
    ),
    ("timed out", MAYBE_TLS),
    ("reset by peer", MAYBE_TLS),
    ("InvalidContentType", MAYBE_TLS),
    ("cluster support disabled", "begin --store with redis://, for this Redis is of no Cluster"),
    ("no node of the Cluster answers", "are the nodes running, and are their addresses in --store right?"),
    ("no Sentinel names", "are the Sentinels running, and are their addresses in --store right?"),
];

const MAYBE_TLS: &str = "is it running, is the address in --store right, and does that begin with rediss:// where the \
                         port speaks TLS, and with redis:// where it does not?";

pub(super) fn hint(cause: &str) -> &'static str {
    let found = HINTS.iter().find(|(words, _)| cause.contains(words));
    found.map_or("is it running, and is the address in --store right?", |(_, hint)| hint)
}

fn explain(error: OpenError, options: &RedisOptions) -> RedisStoreError {
    let (schema, slots, tick_ms, rings) = match error {
        OpenError::Fault(fault) => return RedisStoreError::Unusable(fault.with_remedy()),
        OpenError::OtherSettings { schema, slots, tick_ms, rings } => (schema, slots, tick_ms, rings),
    };
    let (wheel, namespace) = (options.wheel, &options.namespace);
    if (slots, tick_ms, rings) == (u64::from(wheel.slots()), u64::from(wheel.tick_ms()), u64::from(options.rings))
    {
        return RedisStoreError::Differs(format!(
            "the rings of namespace {namespace} in Redis have schema {schema}, which this version does not serve: \
             update this sidecar, or drain the others; docs/REDIS.md has the procedure"
        ));
    }
    RedisStoreError::Differs(format!(
        "the rings of namespace {namespace} in Redis were made with --slots {slots} --tick {tick_ms}ms --rings {rings}, \
         and this sidecar was started with --slots {} --tick {}ms --rings {}: start it with theirs, or change theirs \
         as docs/REDIS.md says, or choose another --namespace",
        wheel.slots(),
        wheel.tick_ms(),
        options.rings
    ))
}

/// Names that nobody has had before.
fn identity(name: &str) -> Identity {
    let legal = |character: &char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | ':' | '-');
    let plain: String = name.chars().filter(legal).take(64).collect();
    let random = crate::redis::random_name();
    Identity { name: name.to_owned(), sidecar: format!("{plain}-{random}"), token: crate::redis::random_name() }
}
