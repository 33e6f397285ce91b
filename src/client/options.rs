//! The options of clients, AddNewMsgs and subscriptions, with defaults that fit most uses.

use std::time::Duration;

use super::error::ClientError;
#[cfg(feature = "tls")]
use super::tls::Tls;
use crate::protocol::frame::{Hello, MAX_TOKEN_LENGTH, Secret, Subscribe, VERSIONS};

/// The longest text of the protocol: its length is one byte.
pub(super) const MAX_TEXT_LENGTH: usize = 255;

/// The certificates that a client trusts when a server speaks TLS. Without the feature `tls` there are none.
#[cfg(not(feature = "tls"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {}

/// Methods that set one option each.
macro_rules! setters {
    ($options:ident { $($(#[$attribute:meta])+ $option:ident($value:ident: $type:ty) = $set:expr;)+ }) => {
        impl $options {
            $($(#[$attribute])+
            #[must_use]
            pub fn $option(mut self, $value: $type) -> Self {
                self.$option = $set;
                self
            })+
        }
    };
}

/// How a client connects, waits and reconnects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// The secret that the server requires, if it requires one.
    pub token: Option<Secret>,
    /// The trusted certificates, if the server speaks TLS on its TCP port. Needs the feature `tls`.
    pub tls: Option<Tls>,
    /// A name for the server's logs, at most 255 bytes.
    pub client_name: String,
    /// How long a call may take, waiting for room and for a connection included.
    pub request_timeout: Duration,
    /// How long it may take until a connection is ready for requests.
    pub connect_timeout: Duration,
    /// The pause before the first attempt to reconnect; it doubles with every attempt.
    pub first_backoff: Duration,
    /// The longest pause between two attempts to reconnect.
    pub max_backoff: Duration,
}

impl Default for ClientOptions {
    fn default() -> Self {
        ClientOptions {
            token: None,
            tls: None,
            client_name: concat!("ackwheel-rust/", env!("CARGO_PKG_VERSION")).to_owned(),
            request_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            first_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(2),
        }
    }
}

setters! {
    ClientOptions {
        /// Sets the secret that the server requires.
        token(token: impl Into<Vec<u8>>) = Some(Secret(token.into()));
        /// Makes the client speak TLS on TCP.
        #[cfg(feature = "tls")]
        tls(tls: Tls) = Some(tls);
        /// Sets the name for the server's logs.
        client_name(name: impl Into<String>) = name.into();
        /// Sets how long a call may take.
        request_timeout(timeout: Duration) = timeout;
        /// Sets how long it may take until a connection is ready.
        connect_timeout(timeout: Duration) = timeout;
    }
}

impl ClientOptions {
    /// Sets the first and the longest pause between attempts to reconnect.
    #[must_use]
    pub fn backoff(mut self, first: Duration, max: Duration) -> Self {
        self.first_backoff = first;
        self.max_backoff = max;
        self
    }

    pub(super) fn hello(&self) -> Result<Hello, ClientError> {
        let (token, client_name) = (self.token.clone().unwrap_or_default(), self.client_name.clone());
        check_length("the token", token.0.len(), MAX_TOKEN_LENGTH)?;
        check_length("the client's name", client_name.len(), MAX_TEXT_LENGTH)?;
        Ok(Hello { lowest_version: *VERSIONS.start(), highest_version: *VERSIONS.end(), token, client_name })
    }
}

/// The options of an AddNewMsg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddOptions {
    /// Ticks that the messages may stay in flight, 1 to the slots of the ring; none for one revolution.
    pub ack_timeout_ticks: Option<u16>,
    /// The timeout batch repeats it.
    pub attempt: u8,
}

impl Default for AddOptions {
    fn default() -> Self {
        AddOptions { ack_timeout_ticks: None, attempt: 1 }
    }
}

setters! {
    AddOptions {
        /// Sets how many ticks the messages may stay in flight.
        ack_timeout_ticks(ticks: u16) = Some(ticks);
        /// Sets the attempt that the timeout batch repeats.
        attempt(attempt: u8) = attempt;
    }
}

/// The options of a subscription: the group, and how many messages at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubscribeOptions {
    /// The group to join; none for a new ephemeral group, which the server names.
    pub group: Option<String>,
    /// How many messages may be delivered and not yet acknowledged.
    pub credit: u32,
    /// Whether the group, if it is new, begins with the next batch and not with the oldest kept.
    pub from_end: bool,
    /// Whether the group is deleted with its last member. It begins with the next batch.
    pub ephemeral: bool,
}

impl Default for SubscribeOptions {
    fn default() -> Self {
        SubscribeOptions { group: None, credit: 16_384, from_end: false, ephemeral: false }
    }
}

setters! {
    SubscribeOptions {
        /// Sets the group to join.
        group(name: impl Into<String>) = Some(name.into());
        /// Sets how many messages may be delivered and not yet acknowledged.
        credit(messages: u32) = messages;
        /// Sets whether the group, if it is new, begins with the next batch.
        from_end(from_end: bool) = from_end;
        /// Sets whether the group is deleted with its last member.
        ephemeral(ephemeral: bool) = ephemeral;
    }
}

impl SubscribeOptions {
    pub(super) fn subscribe(&self) -> Result<Subscribe, ClientError> {
        let group = self.group.clone().unwrap_or_default();
        check_length("the group's name", group.len(), MAX_TEXT_LENGTH)?;
        let ephemeral = self.ephemeral || self.group.is_none();
        Ok(Subscribe { group, credit: self.credit, ephemeral, from_end: self.from_end })
    }
}

/// Refuses a field that no frame can carry. The server checks the rest.
pub(super) fn check_length(field: &str, length: usize, most: usize) -> Result<(), ClientError> {
    if length > most {
        return Err(ClientError::InvalidRequest(format!("{field} has {length} bytes: use at most {most}")));
    }
    Ok(())
}
