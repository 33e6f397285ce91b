//! Classifies the errors of commands to Redis, and converts them into refusals of requests.

use redis::{ConnectionAddr, ErrorKind, RedisError};

use crate::core::{Reason, Refusal};

/// The beginning of the error if Redis has as many connections as it allows.
pub(crate) const NO_ROOM: &str = "Redis has no room for more connections (maxclients)";

/// The reason why a command to Redis failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    pub(crate) text: String,
}

macro_rules! fault_kinds {
    ($($(#[doc = $doc:literal])+ $kind:ident => $effects:expr,)+) => {
        /// The kind of a fault. It determines whether the connection ends, and how requests are refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum FaultKind {
            $($(#[doc = $doc])+ $kind,)+
        }

        impl FaultKind {
            /// Returns three values: the label in metrics, whether the connection must end after one such fault, and
            /// whether Redis certainly did not run the command.
            pub(super) fn effects(self) -> (&'static str, bool, bool) {
                match self {
                    $(FaultKind::$kind => $effects,)+
                }
            }
        }
    };
}

fault_kinds! {
    /// No answer arrived in time.
    Timeout => ("timeout", false, false),
    /// The connection ended.
    Disconnected => ("disconnected", true, false),
    /// This Redis is a replica now and takes no writes.
    ReadOnly => ("readonly", true, true),
    /// Redis refuses every write, because it cannot save its data or has too few replicas.
    Unwritable => ("unwritable", true, true),
    /// Redis is a node of a Cluster, and another node serves the slot of the ring, or the Cluster is down.
    Clustered => ("other", true, true),
    /// The slot of the ring is being moved to another node of a Cluster. Scripts fail until the move ends.
    OpenSlot => ("open_slot", true, true),
    /// Redis is still loading its data, or is a replica that has lost its primary.
    Loading => ("loading", true, true),
    /// A script that runs for too long blocks Redis.
    Busy => ("busy", true, true),
    /// Redis has reached `maxmemory`.
    OutOfMemory => ("oom", false, true),
    /// The script is not in the cache of Redis.
    NoScript => ("noscript", false, true),
    /// The script refused this connection: the sidecar has registered a newer connection, or the ring no longer exists.
    Stale => ("stale", true, true),
    /// Redis has as many connections as it allows.
    MaxClients => ("disconnected", true, true),
    /// The command was not sent, because the sidecar has no connection to Redis.
    Unreachable => ("other", false, true),
    /// The Redis user or the password is wrong, or the user is not allowed to run the command.
    Forbidden => ("forbidden", true, false),
    /// The Redis user is not allowed to run a command of this script, or to use one of its keys. Other scripts may
    /// work.
    Denied => ("forbidden", false, false),
    /// This sidecar cannot use this version of Redis, or a ring with these settings.
    Unfit => ("other", true, true),
    /// Any other error.
    Other => ("other", false, false),
}

impl FaultKind {
    /// Returns whether such a fault usually ends soon, without action of an operator.
    pub(super) fn passes(self) -> bool {
        use FaultKind::{Busy, Disconnected, Loading, MaxClients, Timeout};
        matches!(self, Timeout | Disconnected | Loading | Busy | MaxClients)
    }
}

impl Fault {
    pub(crate) fn new(kind: FaultKind, text: impl Into<String>) -> Fault {
        Fault { kind, text: text.into() }
    }

    /// Returns the text of the fault, and a remedy. The remedy assumes that this sidecar cannot use Redis at all.
    pub(crate) fn with_remedy(&self) -> String {
        let remedy = match self.kind {
            FaultKind::ReadOnly => "this Redis is a read-only replica: name its primary in --store",
            FaultKind::Unwritable => {
                "this Redis takes no writes: look at its disk (MISCONF) or its replicas (NOREPLICAS)"
            }
            FaultKind::Clustered => {
                "it is a node of a Redis Cluster: begin --store with redis-cluster://, and look whether the Cluster is whole \
                 (CLUSTER INFO) if it does"
            }
            FaultKind::OpenSlot => {
                "the slot of the ring is open, and no script runs until the move ends: finish its move to another node, or \
                 take it back (CLUSTER SETSLOT), as docs/REDIS.md says"
            }
            FaultKind::Forbidden | FaultKind::Denied => {
                "check user and password in --store, and give that user the commands that docs/REDIS.md lists, on the \
                 keys of this --namespace"
            }
            FaultKind::Unfit => return self.text.clone(),
            FaultKind::OutOfMemory => "this Redis has no memory left: raise its maxmemory",
            FaultKind::Busy => {
                "a script of another client does not end: end the script with SCRIPT KILL, and find that client"
            }
            _ => "look at the log of this Redis",
        };
        format!("{}; {remedy}", self.text)
    }

    /// Returns the same fault, with the address of the Redis in front of the text.
    pub(crate) fn at(self, address: &ConnectionAddr) -> Fault {
        Fault { text: format!("{address}: {}", self.text), ..self }
    }
}

impl From<RedisError> for Fault {
    fn from(error: RedisError) -> Fault {
        // In a pipeline, the error of the first failed command is the cause. Later commands may fail because of it.
        let first = error.clone().into_server_errors().and_then(|errors| Some(errors.first()?.1.clone()));
        let text = first.as_ref().map_or_else(|| error.to_string(), ToString::to_string);
        let error = first.map_or(error, RedisError::from);
        let kind = match error.code() {
            _ if error.is_timeout() => FaultKind::Timeout,
            _ if is_denied(&error) => FaultKind::Denied,
            _ if error.to_string().contains(NO_ROOM) => FaultKind::MaxClients,
            _ if error.is_io_error() || error.is_connection_dropped() => FaultKind::Disconnected,
            _ if error.kind() == ErrorKind::AuthenticationFailed => FaultKind::Forbidden,
            Some("NOAUTH" | "NOPERM" | "WRONGPASS") => FaultKind::Forbidden,
            Some("READONLY") => FaultKind::ReadOnly,
            Some("LOADING" | "MASTERDOWN") => FaultKind::Loading,
            Some("ASK" | "TRYAGAIN") => FaultKind::OpenSlot,
            Some("MOVED" | "CLUSTERDOWN" | "CROSSSLOT") => FaultKind::Clustered,
            Some("NOSCRIPT") => FaultKind::NoScript,
            Some("OOM") => FaultKind::OutOfMemory,
            Some("BUSY") => FaultKind::Busy,
            Some("MISCONF" | "NOREPLICAS") => FaultKind::Unwritable,
            _ if error.is_unrecoverable_error() => FaultKind::Disconnected,
            _ => FaultKind::Other,
        };
        let text = match kind {
            FaultKind::OpenSlot => format!("the slot of this ring is being moved to another node: {text}"),
            _ => text,
        };
        Fault { kind, text }
    }
}

/// Returns whether a script failed because the Redis user is not allowed to use a command or a key. Redis 7.0 reports
/// this with a general error code, so the function searches the text.
fn is_denied(error: &RedisError) -> bool {
    let denied = ["The user executing the script can't", "ACL failure in script"];
    error.detail().is_some_and(|detail| denied.iter().any(|words| detail.contains(words)))
}

impl From<Fault> for Refusal {
    fn from(Fault { kind, text }: Fault) -> Refusal {
        let (_, _, is_not_applied) = kind.effects();
        let sentence = match kind {
            FaultKind::Timeout | FaultKind::Disconnected => return refusal_without_answer(&text),
            FaultKind::OutOfMemory => String::from(
                "Redis has no memory left (maxmemory) and takes no new messages: try again when some have timed \
                 out, or give it more",
            ),
            _ if is_not_applied => format!("Redis cannot be used now ({text}): try again"),
            _ => format!("Redis failed to apply the request ({text}); any part may be applied: repeat it"),
        };
        Refusal::new(if is_not_applied { Reason::StoreUnreachable } else { Reason::StoreTimeout }, sentence)
    }
}

/// Returns the refusal of a request that Redis did not answer.
pub(crate) fn refusal_without_answer(text: &str) -> Refusal {
    Refusal::new(
        Reason::StoreTimeout,
        format!("Redis did not answer ({text}); any part of the request may be applied: repeat it"),
    )
}

/// Returns the refusal of a request that was not sent because Redis is known to be unreachable.
pub(crate) fn refusal_while_unreachable() -> Refusal {
    Refusal::new(Reason::StoreUnreachable, "Redis is unreachable and takes no new messages now: try again")
}
