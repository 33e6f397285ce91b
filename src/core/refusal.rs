//! Refusals: every reason for which ackwheel rejects a request or closes a connection.
//!
//! A refusal has a reason, and a sentence for the reader. Each reason has a code, a word and a promise. The code is
//! the `status` of an Error frame of the protocol. The word is the `reason` label of the metric
//! `ackwheel_refusals_total`. The promise is one of two: nothing was applied, or the outcome is unknown.
//! docs/PROTOCOL.md lists all codes.

use std::borrow::Cow;
use std::fmt;

/// The promise that a refusal makes about the rejected request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Promise {
    /// No part of the request was applied.
    NotApplied,
    /// The request may have been applied wholly, in part, or not at all. It can be repeated, except an add whose
    /// messages were acknowledged meanwhile: they would be in flight again.
    OutcomeUnknown,
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $code:literal, $label:literal, $retryable:expr, $remedy:expr;)+) => {
        /// The reason why a request was refused or a connection was closed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name = $code,)+
        }

        impl Reason {
            /// All reasons, in the order of their codes.
            pub const ALL: &[Reason] = &[$(Reason::$name,)+];

            /// Returns the word that stands for the reason in the metrics and in docs/PROTOCOL.md.
            pub const fn as_str(self) -> &'static str {
                match self { $(Reason::$name => $label,)+ }
            }

            /// Returns whether the same request can succeed later or at another sidecar of the same store.
            pub const fn retryable(self) -> bool {
                match self { $(Reason::$name => $retryable,)+ }
            }

            /// Returns what an operator can do about refusals of this reason.
            pub const fn remedy(self) -> &'static str {
                match self { $(Reason::$name => $remedy,)+ }
            }
        }
    };
}

const RETRYABLE: bool = true;
const FINAL: bool = false;

const NO_CLIENT: &str = "a probe, a port scan, or a client of another protocol? point probes at /livez";
const CLIENT: &str = "correct the client, or update the older one; --log debug shows each refusal";
const STORE: &str = "repair the store (Redis, or the disk of --journal): the log names the fault";

reasons! {
    /// The bytes are not a frame: the stated length is shorter than a frame head.
    MalformedFrame = 1, "malformed_frame", FINAL, NO_CLIENT;
    /// The frame is longer than the server accepts.
    FrameTooLarge = 2, "frame_too_large", FINAL, "split the requests of the client, or raise --max-frame-length";
    /// The first frame was not Hello.
    HelloExpected = 3, "hello_expected", FINAL, NO_CLIENT;
    /// No Hello arrived in time.
    HelloTimeout = 4, "hello_timeout", RETRYABLE, NO_CLIENT;
    /// Hello does not begin with the magic bytes of the protocol, or its body is malformed.
    BadHello = 5, "bad_hello", FINAL, NO_CLIENT;
    /// Server and client have no protocol version in common.
    UnsupportedVersion = 6, "unsupported_version", FINAL, "update the older one of client and sidecar";
    /// The token is missing or wrong.
    Unauthorized = 7, "unauthorized", FINAL,
        "correct --token-file of the client, or --token-file and --tls-client-names of the sidecar";
    /// The server has reached its limit of connections.
    TooManyConnections = 8, "too_many_connections", RETRYABLE, "share connections, or raise --max-connections";
    /// The peer sent nothing for two ping intervals.
    PeerSilent = 9, "silent", RETRYABLE, "look for clients that are frozen, answer no Pings, or send half a command";
    /// The peer did not read what was sent to it.
    SlowReader = 10, "slow_reader", RETRYABLE, "let clients read while they send, or ask for less credit";
    /// The TLS handshake failed or took too long.
    TlsHandshake = 11, "tls_handshake", FINAL, "does the client use TLS and trust --tls-cert? see the log";
    /// The address of the peer sent too many wrong tokens.
    TooManyAttempts = 12, "too_many_attempts", RETRYABLE, "correct --token-file of the client that the log names";
    /// The sidecar is starting, and its store is not open yet.
    Starting = 13, "starting", RETRYABLE, "wait until the store is open, or look at it and at the log";
    /// The buffers of all connections have reached their limit, and those of this connection were the largest.
    ConnectionMemory = 14, "connection_memory", RETRYABLE, "find clients that do not read, or raise the limit";
    /// The token or the certificate name of the connection was withdrawn, or its rights have changed.
    AccessChanged = 15, "access_changed", RETRYABLE, "connect again, with a token or certificate name that is accepted";

    /// This version does not know the type of the frame.
    UnknownType = 32, "unknown_type", FINAL, CLIENT;
    /// The body of the frame does not have the layout of its type.
    MalformedRequest = 33, "malformed_request", FINAL, CLIENT;
    /// The frame has no message, or more messages than a frame may have.
    BadCount = 34, "bad_count", FINAL, CLIENT;
    /// The ack timeout has more ticks than the ring has slots.
    BadAckTimeout = 35, "bad_ack_timeout", FINAL, "let the client ask for at most as many ticks as --slots";
    /// The text is not a group name, or it names the default group where that is not allowed.
    BadGroupName = 36, "bad_group_name", FINAL, "use 1 to 64 of A-Z a-z 0-9 _ . - as a name; default cannot be deleted";
    /// The limit of groups is reached.
    TooManyGroups = 37, "too_many_groups", RETRYABLE, "use fewer: ackwheel group list shows those without subscriber";
    /// No group has this name.
    UnknownGroup = 38, "unknown_group", FINAL, "correct the name: ackwheel group list shows all";
    /// The group has subscribers, so it cannot be deleted.
    GroupInUse = 39, "group_in_use", RETRYABLE, "stop its subscribers at all sidecars, and wait a minute";
    /// The connection has a subscription already.
    AlreadySubscribed = 40, "already_subscribed", FINAL, CLIENT;
    /// The connection has no subscription, so it cannot acknowledge batches.
    NotSubscribed = 41, "not_subscribed", FINAL, CLIENT;
    /// The credit is 0 or above the limit of the server.
    BadCredit = 42, "bad_credit", FINAL, CLIENT;
    /// The token of the connection does not have the right that the request needs.
    NotPermitted = 43, "not_permitted", FINAL, "in --token-file, give the token of the client the right that it needs";

    /// The limit of messages in flight is reached.
    MaxInFlight = 64, "max_in_flight", RETRYABLE, "find out whether Acks are missing, or raise --max-in-flight";
    /// The sidecar is draining and takes no new messages.
    Draining = 65, "draining", RETRYABLE, "start the sidecar again: clients repeat these requests then";
    /// The store is known to be unreachable.
    StoreUnreachable = 66, "store_away", RETRYABLE, STORE;
    /// The store did not answer.
    StoreTimeout = 67, "store_silent", RETRYABLE, STORE;
    /// The store is unreachable, and the limit of acknowledgements that wait for it is reached.
    MaxHeldAcks = 68, "max_held_acks", RETRYABLE, STORE;
    /// The connection holds as many messages as it may have unacknowledged.
    MaxUnacked = 69, "max_unacked", RETRYABLE, "let consumers settle what they took: AW.ACK or AW.NACK";
}

impl Reason {
    /// Returns the number in the `status` of an Error frame.
    pub const fn code(self) -> u16 {
        self as u16
    }

    /// Returns the reason with this number, or `None` if this version does not know the number.
    pub fn from_code(code: u16) -> Option<Reason> {
        Reason::ALL.iter().copied().find(|reason| reason.code() == code)
    }

    /// Returns the reason with this word, or `None` if this version does not know the word.
    pub fn from_word(word: &str) -> Option<Reason> {
        Reason::ALL.iter().copied().find(|reason| reason.as_str() == word)
    }

    /// Returns the promise about the rejected request.
    pub fn promise(self) -> Promise {
        if self == Reason::StoreTimeout { Promise::OutcomeUnknown } else { Promise::NotApplied }
    }

    /// Returns whether the server closes the connection after the refusal. This is so for codes below 32.
    pub const fn closes(self) -> bool {
        self.code() < 32
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The rejection of a request: a reason and a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} ({reason})")]
pub struct Refusal {
    /// The reason.
    pub reason: Reason,
    /// The sentence: the cause and the remedy.
    pub text: Cow<'static, str>,
}

impl Refusal {
    /// Creates a refusal with a reason and a sentence.
    pub fn new(reason: Reason, text: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal { reason, text: text.into() }
    }

    /// Returns the refusal of an add while the sidecar drains.
    #[cfg(feature = "sidecar")]
    pub(crate) fn draining() -> Refusal {
        let text = "this sidecar is draining and takes no new messages: add them later or, with Redis, at another sidecar";
        Refusal::new(Reason::Draining, text)
    }
}

/// Returns the answers of all rings, or one refusal if any ring refused: see [`merge_refusals`].
#[cfg(feature = "sidecar")]
pub(crate) fn all_answers<T>(answers: Vec<Result<T, Refusal>>) -> Result<Vec<T>, Refusal> {
    let refusals = answers.iter().filter_map(|answer| answer.as_ref().err().cloned()).collect();
    match merge_refusals(answers.len(), "rings", refusals) {
        None => Ok(answers.into_iter().flatten().collect()),
        Some(refusal) => Err(refusal),
    }
}

/// Merges the refusals of several parts of a store, such as rings, into one. Returns `None` if there are no refusals.
/// `asked` is the number of parts that were called, and `parts` is their name in the text.
///
/// If all parts refused, returns one of their refusals: the first with an unknown outcome, or otherwise the first. If
/// only some parts refused, the request was applied in part, so the result is a refusal with an unknown outcome. The
/// exception is a refusal about the group, which is returned as it is. In this case repeating the request would not
/// help, and the caller must undo the applied parts.
#[cfg(feature = "sidecar")]
pub(crate) fn merge_refusals(asked: usize, parts: &str, mut refusals: Vec<Refusal>) -> Option<Refusal> {
    let first = refusals.first()?;
    if refusals.len() == asked {
        let unknown = refusals.iter().position(|refusal| refusal.reason.promise() == Promise::OutcomeUnknown);
        return Some(refusals.swap_remove(unknown.unwrap_or_default()));
    }
    let about_group = [Reason::TooManyGroups, Reason::UnknownGroup, Reason::GroupInUse];
    if let Some(refusal) = refusals.iter().find(|refusal| about_group.contains(&refusal.reason)) {
        return Some(refusal.clone());
    }
    let text = format!(
        "only {} of {asked} {parts} applied the request; repeat it, but no add of messages that were acknowledged \
         meanwhile; one refusal says: {first}",
        asked - refusals.len()
    );
    Some(Refusal::new(Reason::StoreTimeout, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_ascend_and_lead_back_as_words_do_to_their_reasons() {
        assert!(Reason::ALL.is_sorted_by(|a, b| a.code() < b.code()));
        for reason in Reason::ALL {
            assert_eq!(Reason::from_code(reason.code()), Some(*reason));
            assert_eq!(Reason::from_word(reason.as_str()), Some(*reason));
        }
        assert_eq!(Reason::from_code(0), None, "0 is the status of success");
    }

    #[test]
    fn an_unknown_outcome_may_be_repeated_and_keeps_the_connection() {
        for reason in Reason::ALL.iter().filter(|reason| reason.promise() == Promise::OutcomeUnknown) {
            assert!(reason.retryable() && !reason.closes(), "{reason}");
        }
    }

    #[test]
    fn a_refusal_about_the_group_is_passed_on_and_any_other_partial_refusal_makes_the_outcome_unknown() {
        let refusal = |reason| Err(Refusal::new(reason, "no"));
        for (answers, expected) in [
            (vec![Ok(()), refusal(Reason::StoreUnreachable)], Reason::StoreTimeout),
            (vec![Ok(()), refusal(Reason::MaxInFlight)], Reason::StoreTimeout),
            (
                vec![Ok(()), refusal(Reason::StoreUnreachable), refusal(Reason::TooManyGroups)],
                Reason::TooManyGroups,
            ),
            (vec![refusal(Reason::StoreUnreachable), refusal(Reason::StoreUnreachable)], Reason::StoreUnreachable),
        ] {
            assert_eq!(all_answers(answers).unwrap_err().reason, expected);
        }
    }
}
