//! The options of clients, of AddNewMsg requests and of subscriptions, with their defaults.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::error::ClientError;
use super::files::read_token;
#[cfg(feature = "tls")]
use super::tls::Tls;
use crate::protocol::frame::{Hello, MAX_TOKEN_LENGTH, Secret, Subscribe, VERSIONS};

/// The maximum length of a client name or a group name, in bytes: the protocol encodes the length in one byte.
pub(super) const MAX_TEXT_LENGTH: usize = 255;

/// The certificates that a client trusts when a server uses TLS. Without the feature `tls`, this type has no values.
#[cfg(not(feature = "tls"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {}

/// Defines methods that set one option each.
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

/// The options of a connection: credentials, timeouts and reconnection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// The secret that the server requires; `None` if it requires none.
    pub token: Option<Secret>,
    /// The file with the secret, in place of `token`. It is read again for every connection, so that a client follows a
    /// new token.
    pub token_file: Option<PathBuf>,
    /// The certificates to trust; `None` for a connection without TLS. Needs the feature `tls`.
    pub tls: Option<Tls>,
    /// The name of this client in the server's logs, at most 255 bytes.
    pub client_name: String,
    /// The timeout of a call, including the wait for room in the queue of requests and the wait for a connection.
    pub request_timeout: Duration,
    /// The timeout for opening a connection, including the handshake.
    pub connect_timeout: Duration,
    /// The pause before the first attempt to reconnect. The pause doubles with every attempt. The client waits for a
    /// random part of each pause, at least half of it.
    pub first_backoff: Duration,
    /// The maximum pause between two attempts to reconnect. It is also the pause after the server refused a connection.
    pub max_backoff: Duration,
}

impl Default for ClientOptions {
    fn default() -> Self {
        ClientOptions {
            token: None,
            token_file: None,
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
        /// Sets the file with the secret that the server requires. The client presents the first token of the file, in
        /// the format of the server's `--token-file`. It reads the file again for every connection, and
        /// does not give up a subscription when it is refused a token of the file.
        token_file(path: impl Into<PathBuf>) = Some(path.into());
        /// Sets the certificates to trust, and turns on TLS for TCP connections.
        #[cfg(feature = "tls")]
        tls(tls: Tls) = Some(tls);
        /// Sets the name of this client in the server's logs.
        client_name(name: impl Into<String>) = name.into();
        /// Sets the timeout of a call.
        request_timeout(timeout: Duration) = timeout;
        /// Sets the timeout for opening a connection.
        connect_timeout(timeout: Duration) = timeout;
    }
}

impl ClientOptions {
    /// Sets the first and the maximum pause between attempts to reconnect.
    #[must_use]
    pub fn backoff(mut self, first: Duration, max: Duration) -> Self {
        self.first_backoff = first;
        self.max_backoff = max;
        self
    }

    /// Reads the token of [`ClientOptions::token_file`] now, to report an error before connecting.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or has no token. The error names the file.
    pub fn check_token_file(&self) -> io::Result<()> {
        self.token_file.as_deref().map_or(Ok(()), |path| read_token(path).map(drop))
    }

    /// Returns the frame that opens a connection. Reads the token file, if there is one.
    pub(super) fn hello(&self) -> Result<Hello, ClientError> {
        let token = match self.token_file.as_deref().map(read_token) {
            None => self.token.clone().unwrap_or_default(),
            Some(Ok(token)) => Secret(token),
            Some(Err(cause)) => return Err(ClientError::TokenFile(Arc::new(cause))),
        };
        let client_name = self.client_name.clone();
        check_length("the token", token.0.len(), MAX_TOKEN_LENGTH)?;
        check_length("the client's name", client_name.len(), MAX_TEXT_LENGTH)?;
        Ok(Hello { lowest_version: *VERSIONS.start(), highest_version: *VERSIONS.end(), token, client_name })
    }
}

/// The options of an AddNewMsg request, which starts the ack timeout of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddOptions {
    /// The ack timeout in ticks (one second by default), from 1 to the number of slots of the server's ring. `None`
    /// means the maximum, one revolution of the ring.
    pub ack_timeout_ticks: Option<u16>,
    /// The number of this attempt to push the messages. If they time out, the timeout batch repeats this number.
    pub attempt: u8,
}

impl Default for AddOptions {
    fn default() -> Self {
        AddOptions { ack_timeout_ticks: None, attempt: 1 }
    }
}

setters! {
    AddOptions {
        /// Sets the ack timeout in ticks.
        ack_timeout_ticks(ticks: u16) = Some(ticks);
        /// Sets the number of this attempt to push the messages.
        attempt(attempt: u8) = attempt;
    }
}

/// The options of a subscription: which group of subscribers it joins, and how many unacknowledged messages it may
/// hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubscribeOptions {
    /// The group to join. With `None`, the server creates and names a new group, and deletes it when its last member
    /// leaves.
    pub group: Option<String>,
    /// The credit, in messages. The server delivers another batch only while fewer messages than this are
    /// unacknowledged.
    pub credit: u32,
    /// Whether a group that this subscription creates starts at the next batch. Otherwise the new group starts at the
    /// oldest batch that the server keeps.
    pub from_end: bool,
    /// Whether the server deletes the group when its last member leaves. A group that is created with this option is
    /// ephemeral, and always starts at the next batch.
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
        /// Sets the credit, in messages. The server delivers another batch only while fewer messages than the credit are
        /// unacknowledged.
        credit(messages: u32) = messages;
        /// Sets whether a new group starts at the next batch.
        from_end(from_end: bool) = from_end;
        /// Sets whether the server deletes the group when its last member leaves.
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

/// Returns an error if a field is longer than `most` bytes. The server checks all other properties of the field.
pub(super) fn check_length(field: &str, length: usize, most: usize) -> Result<(), ClientError> {
    if length > most {
        return Err(ClientError::InvalidRequest(format!("{field} has {length} bytes: use at most {most}")));
    }
    Ok(())
}
