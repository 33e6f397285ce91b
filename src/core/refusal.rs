//! Refusals: every way in which ackwheel says no, once.
//!
//! A refusal carries a code, a sentence, and one of two promises: nothing was applied, or the outcome is
//! unknown and repeating the request is safe. The codes are the `status` of an Error frame and the
//! `reason` label of `ackwheel_refusals_total`; docs/PROTOCOL.md lists them for other languages.

use std::borrow::Cow;
use std::fmt;

/// What a refusal promises about the request that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Promise {
    /// No part of the request was applied.
    NotApplied,
    /// Any part of the request may have been applied; repeating it is safe.
    OutcomeUnknown,
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $code:literal, $label:literal, $traits:expr;)+) => {
        /// Why a request was refused or a connection closed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name = $code,)+
        }

        impl Reason {
            /// Every reason, in the order of their codes.
            pub const ALL: &[Reason] = &[$(Reason::$name,)+];

            /// The word of the metrics' label and of docs/PROTOCOL.md.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Reason::$name => $label,)+ }
            }

            const fn traits(self) -> Traits {
                match self { $(Reason::$name => $traits,)+ }
            }
        }
    };
}

/// What follows from a reason, for the caller.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Traits {
    /// The connection is closed; the same will fail again.
    Closes,
    /// The connection is closed; another attempt, later or elsewhere, can succeed.
    ClosesRetryable,
    /// The request is wrong; the same will fail again.
    Wrong,
    /// The request is right, but not now or not here.
    NotNow,
    /// Nobody can say what became of it; repeat it.
    Unknown,
}

reasons! {
    /// The bytes are not a frame: its length is shorter than its head.
    MalformedFrame = 1, "malformed_frame", Traits::Closes;
    /// The frame is longer than the server accepts.
    FrameTooLarge = 2, "frame_too_large", Traits::Closes;
    /// The first frame was not Hello.
    HelloExpected = 3, "hello_expected", Traits::Closes;
    /// No Hello came in time.
    HelloTimeout = 4, "hello_timeout", Traits::ClosesRetryable;
    /// Hello does not begin with the magic, or its body is malformed.
    BadHello = 5, "bad_hello", Traits::Closes;
    /// Server and client share no version of the protocol.
    UnsupportedVersion = 6, "unsupported_version", Traits::Closes;
    /// The token is missing or wrong.
    Unauthorized = 7, "unauthorized", Traits::Closes;
    /// The server has as many connections as it accepts.
    TooManyConnections = 8, "too_many_connections", Traits::ClosesRetryable;
    /// Nothing was heard of the peer for two ping intervals.
    Silent = 9, "silent", Traits::ClosesRetryable;
    /// The peer did not read what was sent to it.
    SlowReader = 10, "slow_reader", Traits::ClosesRetryable;
    /// The TLS handshake failed or took too long.
    TlsHandshake = 11, "tls_handshake", Traits::Closes;

    /// The frame's type is not known to this version.
    UnknownType = 32, "unknown_type", Traits::Wrong;
    /// The frame's body does not have the layout of its type.
    MalformedRequest = 33, "malformed_request", Traits::Wrong;
    /// No message, or more than a frame may carry.
    BadCount = 34, "bad_count", Traits::Wrong;
    /// The ack timeout is longer than the ring.
    BadAckTimeout = 35, "bad_ack_timeout", Traits::Wrong;
    /// The group's name has other characters or another length than a group's name may have, or is of a group that is
    /// always there.
    BadGroupName = 36, "bad_group_name", Traits::Wrong;
    /// There are as many groups as there may be.
    TooManyGroups = 37, "too_many_groups", Traits::NotNow;
    /// There is no group of this name.
    UnknownGroup = 38, "unknown_group", Traits::Wrong;
    /// The group has subscribers, or is the default group, and is not deleted.
    GroupInUse = 39, "group_in_use", Traits::NotNow;
    /// The connection has its subscription already.
    AlreadySubscribed = 40, "already_subscribed", Traits::Wrong;
    /// The connection has no subscription whose batches it could acknowledge.
    NotSubscribed = 41, "not_subscribed", Traits::Wrong;
    /// The credit is 0 or more than the server grants.
    BadCredit = 42, "bad_credit", Traits::Wrong;

    /// As many messages are in flight as may be.
    MaxInFlight = 64, "max_in_flight", Traits::NotNow;
    /// The sidecar is draining and takes no new messages.
    Draining = 65, "draining", Traits::NotNow;
    /// The store is known to be away.
    StoreAway = 66, "store_away", Traits::NotNow;
    /// The store did not answer.
    StoreSilent = 67, "store_silent", Traits::Unknown;
    /// As many acknowledgements are held for a store that is away as may be.
    MaxHeldAcks = 68, "max_held_acks", Traits::NotNow;
}

impl Reason {
    /// The number in the `status` of an Error frame.
    #[must_use]
    pub const fn code(self) -> u16 {
        self as u16
    }

    /// The reason with this number, if this version knows it.
    #[must_use]
    pub fn from_code(code: u16) -> Option<Reason> {
        Reason::ALL.iter().copied().find(|reason| reason.code() == code)
    }

    /// What the refusal promises about the request.
    #[must_use]
    pub fn promise(self) -> Promise {
        match self.traits() {
            Traits::Unknown => Promise::OutcomeUnknown,
            _ => Promise::NotApplied,
        }
    }

    /// Whether the same request can succeed later or at another sidecar.
    #[must_use]
    pub fn retryable(self) -> bool {
        matches!(self.traits(), Traits::NotNow | Traits::Unknown | Traits::ClosesRetryable)
    }

    /// Whether the connection is closed after the refusal.
    #[must_use]
    pub fn closes(self) -> bool {
        matches!(self.traits(), Traits::Closes | Traits::ClosesRetryable)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A request that was refused: why, in a word and in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} ({reason})")]
pub struct Refusal {
    /// The word.
    pub reason: Reason,
    /// The sentence: what was wrong and what to do.
    pub text: Cow<'static, str>,
}

impl Refusal {
    /// A refusal with its sentence.
    #[must_use]
    pub fn new(reason: Reason, text: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal { reason, text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_ascend_and_lead_back_to_their_reasons() {
        assert!(Reason::ALL.is_sorted_by(|a, b| a.code() < b.code()));
        for reason in Reason::ALL {
            assert_eq!(Reason::from_code(reason.code()), Some(*reason));
        }
        assert_eq!(Reason::from_code(0), None, "0 is the status of success");
    }

    #[test]
    fn an_unknown_outcome_may_be_repeated_and_keeps_the_connection() {
        for reason in Reason::ALL.iter().filter(|reason| reason.promise() == Promise::OutcomeUnknown) {
            assert!(reason.retryable() && !reason.closes(), "{reason}");
        }
    }
}
