//! Why a Redis store cannot be opened, and what to do about it.

use std::time::Duration;

use crate::redis::connection::reconnect::OpenError;
use crate::redis::options::RedisOptions;

/// How long a sidecar that starts waits for a Redis that is not there yet.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum RedisStoreError {
    /// The URL is not valid.
    #[error("--store: {0}; write it as docs/REDIS.md says")]
    Address(String),
    /// Redis does not answer.
    #[error("Redis cannot be reached within {START_TIMEOUT:?}: {0}; {hint}", hint = hint(.0))]
    Unreachable(String),
    /// This Redis cannot be used.
    #[error("this Redis cannot be used: {0}")]
    Unusable(String),
    /// The ring in Redis has other dimensions.
    #[error("{0}")]
    Differs(String),
}

impl RedisStoreError {
    /// The error of a ring that could not be opened with these options.
    pub(super) fn of(error: OpenError, options: &RedisOptions) -> RedisStoreError {
        let (schema, slots, tick_ms, rings) = match error {
            OpenError::Fault(fault) => return RedisStoreError::Unusable(fault.with_remedy()),
            OpenError::OtherSettings { schema, slots, tick_ms, rings } => (schema, slots, tick_ms, rings),
        };
        let RedisOptions { wheel, namespace, .. } = options;
        let own = (u64::from(wheel.slots()), u64::from(wheel.tick_ms()), u64::from(options.rings));
        if (slots, tick_ms, rings) == own {
            return RedisStoreError::Differs(format!(
                "the rings of namespace {namespace} in Redis have schema {schema}, which this version does not serve: \
                 update this sidecar, or drain the others; docs/REDIS.md has the procedure"
            ));
        }
        RedisStoreError::Differs(format!(
            "the rings of namespace {namespace} in Redis were made with --slots {slots} --tick {tick_ms}ms --rings \
             {rings}, and this sidecar was started with --slots {} --tick {}ms --rings {}: start it with theirs, or \
             change theirs as docs/REDIS.md says, or choose another --namespace",
            own.0, own.1, own.2
        ))
    }
}

/// Words in a cause, and what to do about it.
const HINTS: &[(&str, &str)] = &[
    ("knows no primary", "name it in ?master= of --store as `sentinel monitor` has it"),
    ("unknown command 'SENTINEL'", "name the Sentinels in --store, and not the Redis that they watch"),
    (
        "UnknownIssuer",
        "name the certificate of the authority that signed that of Redis in SSL_CERT_FILE, in the environment of this \
         sidecar",
    ),
    ("PEM", "correct the file that SSL_CERT_FILE names in the environment of this sidecar, or name another"),
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
    ("cluster support disabled", "begin --store with redis://, since this Redis is no node of a Cluster"),
    ("no node of the Cluster answers", "are the nodes running, and are their addresses in --store right?"),
    ("no Sentinel names", "are the Sentinels running, and are their addresses in --store right?"),
];

const MAYBE_TLS: &str = "is it running, is the address in --store right, and does that begin with rediss:// where the \
                         port speaks TLS, and with redis:// where it does not?";

/// The remedy for a Redis that cannot be reached, by the cause.
pub(super) fn hint(cause: &str) -> &'static str {
    let found = HINTS.iter().find(|(words, _)| cause.contains(words));
    found.map_or("is it running, and is the address in --store right?", |(_, hint)| hint)
}
