//! What can go wrong with a command to Redis, and what that promises.

use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::core::refusal::{Reason, Refusal};

/// Why a command has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    pub(crate) text: String,
}

/// What kind of fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// No answer came in time.
    Timeout,
    /// The connection ended.
    Disconnected,
    /// This Redis takes no writes: it is a replica now.
    ReadOnly,
    /// It refuses every write for now: it cannot save, or has too few replicas.
    Unwritable,
    /// It is a node of a Redis Cluster, and has not, or not yet, or no longer, what was asked for.
    Clustered,
    /// The slot of the ring is being moved to another node of a Cluster: no script is carried out until it is there.
    OpenSlot,
    /// It is not ready yet.
    Loading,
    /// Somebody's script takes too long, and it does nothing else.
    Busy,
    /// It has no memory left.
    OutOfMemory,
    /// The script is not in its cache.
    NoScript,
    /// The link was opened anew since, or the ring is gone.
    Stale,
    /// It was known to be away, and not asked.
    Away,
    /// User or password are wrong, or the user may not do this.
    Forbidden,
    /// The user may not do something that a script does; other scripts may well be carried out.
    Denied,
    /// Something else.
    Other,
}

impl FaultKind {
    /// The label of the metric.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            FaultKind::Timeout => "timeout",
            FaultKind::Disconnected => "disconnected",
            FaultKind::ReadOnly => "readonly",
            FaultKind::Unwritable => "unwritable",
            FaultKind::OpenSlot => "open_slot",
            FaultKind::Loading => "loading",
            FaultKind::Busy => "busy",
            FaultKind::OutOfMemory => "oom",
            FaultKind::NoScript => "noscript",
            FaultKind::Stale => "stale",
            FaultKind::Forbidden | FaultKind::Denied => "forbidden",
            FaultKind::Clustered | FaultKind::Away | FaultKind::Other => "other",
        }
    }

    /// Whether the connection is of no use any more, after one such fault.
    pub(crate) fn ends_the_connection(self) -> bool {
        matches!(
            self,
            FaultKind::Disconnected
                | FaultKind::ReadOnly
                | FaultKind::Unwritable
                | FaultKind::Clustered
                | FaultKind::OpenSlot
                | FaultKind::Loading
                | FaultKind::Busy
                | FaultKind::Stale
                | FaultKind::Forbidden
        )
    }

    /// Whether it may pass by itself, and soon.
    pub(crate) fn passes(self) -> bool {
        matches!(self, FaultKind::Timeout | FaultKind::Disconnected | FaultKind::Loading | FaultKind::Busy)
    }

    /// Whether the command was certainly not carried out.
    pub(crate) fn is_not_applied(self) -> bool {
        !matches!(
            self,
            FaultKind::Timeout
                | FaultKind::Disconnected
                | FaultKind::Forbidden
                | FaultKind::Denied
                | FaultKind::Other
        )
    }
}

impl Fault {
    /// The fault of a command that was not sent, because Redis is known to be away.
    pub(crate) fn away(cause: &str) -> Fault {
        Fault { kind: FaultKind::Away, text: cause.to_owned() }
    }

    /// What is wrong and what to do about it, where this Redis cannot be used at all.
    pub(crate) fn with_remedy(&self) -> String {
        let remedy = match self.kind {
            FaultKind::ReadOnly => "it is a read-only replica: name its primary",
            FaultKind::Unwritable => "it takes no writes: look at its disk (MISCONF) or its replicas (NOREPLICAS)",
            FaultKind::Clustered => {
                "it is a node of a Redis Cluster: begin --store with redis-cluster://, and look whether the Cluster is whole \
                 (CLUSTER INFO) if it does"
            }
            FaultKind::OpenSlot => {
                "the slot of the ring is open, and nothing can be done there meanwhile: finish its move to another node, or \
                 take it back (CLUSTER SETSLOT), as docs/REDIS.md says"
            }
            FaultKind::Forbidden | FaultKind::Denied => {
                "check user and password in --store, and give that user the commands that docs/REDIS.md lists, on the \
                 keys of this --namespace"
            }
            FaultKind::OutOfMemory => "it has no memory left: raise its maxmemory",
            FaultKind::Busy => "somebody runs a script without end: find whose, and end it with SCRIPT KILL",
            _ => "look at its log",
        };
        format!("{}; {remedy}", self.text)
    }

    /// A reply that no script of this version gives.
    pub(crate) fn strange(script: &str, what: &str) -> Fault {
        let text = format!("the reply of the script {script} is not understood: {what}");
        Fault { kind: FaultKind::Other, text }
    }

    /// No answer came within this time.
    pub(crate) fn silent(patience: Duration) -> Fault {
        Fault { kind: FaultKind::Timeout, text: format!("no answer within {patience:?}") }
    }

    /// No answer came on this connection, though Redis answers others.
    pub(crate) fn lost_answer(waited: Duration) -> Fault {
        let text = format!("the connection lost an answer: none within {waited:?}, while Redis answers others");
        Fault { kind: FaultKind::Disconnected, text }
    }

    /// The refusal of a link that was opened anew since.
    pub(crate) fn stale() -> Fault {
        Fault { kind: FaultKind::Stale, text: String::from("the link was opened anew since, or the ring is gone") }
    }
}

impl From<RedisError> for Fault {
    fn from(error: RedisError) -> Fault {
        // Of several commands sent together, the first that failed says what the others do.
        let first = error.clone().into_server_errors().and_then(|errors| Some(errors.first()?.1.clone()));
        let text = first.as_ref().map_or_else(|| error.to_string(), ToString::to_string);
        let error = first.map_or(error, RedisError::from);
        let kind = match (error.kind(), error.code()) {
            _ if error.is_timeout() => FaultKind::Timeout,
            _ if is_denied(&error) => FaultKind::Denied,
            _ if error.is_io_error() || error.is_connection_dropped() => FaultKind::Disconnected,
            (ErrorKind::Server(ServerErrorKind::ReadOnly), _) => FaultKind::ReadOnly,
            (ErrorKind::Server(ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown), _) => {
                FaultKind::Loading
            }
            (ErrorKind::Server(ServerErrorKind::Ask | ServerErrorKind::TryAgain), _) => FaultKind::OpenSlot,
            (
                ErrorKind::Server(
                    ServerErrorKind::Moved | ServerErrorKind::ClusterDown | ServerErrorKind::CrossSlot,
                ),
                _,
            ) => FaultKind::Clustered,
            (ErrorKind::Server(ServerErrorKind::NoScript), _) => FaultKind::NoScript,
            (ErrorKind::Server(ServerErrorKind::NoPerm) | ErrorKind::AuthenticationFailed, _)
            | (_, Some("NOAUTH" | "WRONGPASS")) => FaultKind::Forbidden,
            (_, Some("OOM")) => FaultKind::OutOfMemory,
            (_, Some("BUSY")) => FaultKind::Busy,
            (_, Some("MISCONF" | "NOREPLICAS")) => FaultKind::Unwritable,
            (_, Some("READONLY")) => FaultKind::ReadOnly,
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

/// Whether a script was denied a command or a key. Redis 7.0 says so with the code of any error.
fn is_denied(error: &RedisError) -> bool {
    let denied = ["The user executing the script can't", "ACL failure in script"];
    error.detail().is_some_and(|detail| denied.iter().any(|words| detail.contains(words)))
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        let Fault { kind, text } = fault;
        let (reason, sentence) = match kind {
            FaultKind::OutOfMemory => (
                Reason::StoreAway,
                String::from(
                    "Redis has no memory left (maxmemory) and takes no new messages: try again when some have timed \
                     out, or give it more",
                ),
            ),
            kind if kind.is_not_applied() => {
                (Reason::StoreAway, format!("Redis cannot be used now ({text}): try again"))
            }
            FaultKind::Other | FaultKind::Forbidden | FaultKind::Denied => (
                Reason::StoreSilent,
                format!("Redis could not carry this out ({text}); any part of it may be applied: repeat it"),
            ),
            _ => (
                Reason::StoreSilent,
                format!("Redis did not answer ({text}); any part of the request may be applied: repeat it"),
            ),
        };
        Refusal::new(reason, sentence)
    }
}
