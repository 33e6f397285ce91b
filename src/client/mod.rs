//! The client library that a logic node in Rust links.
//!
//! A [`Client`] adds messages when they are pushed and deletes them when their Ack arrives; a
//! [`Subscription`] yields the messages that were not acknowledged. Both connect, keep their connection alive
//! and make a new one when it is lost.
//!
//! ```no_run
//! use ackwheel::client::{AddOptions, Client, ClientOptions, SubscribeOptions};
//! use ackwheel::core::Message;
//!
//! # async fn node() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect("127.0.0.1:7415".parse()?, ClientOptions::default()).await?;
//!
//! // Add before you push: an Ack can then never overtake its message.
//! client.add_new_msg(&[Message::new(101, 7)], AddOptions::default()).await?;
//! // … push it to client 7, and when its Ack arrives:
//! client.del_msg(&[Message::new(101, 7)]).await?;
//!
//! // Elsewhere: messages that were not acknowledged in time. docs/INTEGRATION.md says how to judge them.
//! let mut timeouts = client.subscribe(SubscribeOptions::default().group("default")).await?;
//! while let Some(batch) = timeouts.next().await {
//!     let batch = batch?;
//!     for timed_out in &batch.messages {
//!         println!("{} was not acknowledged", timed_out.message);
//!     }
//!     if let Err(error) = batch.ack().await {
//!         println!("not acknowledged yet, the subscription repeats it: {error}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Inside
//!
//! ```text
//!   Client, Subscription ── reconnecting_connection ══ queue ══▶ task ── connection ── handshake
//!              ▲                                                  ├─ pending_requests
//!              ╚══════════════ received_batches ◀════════════════╝  └─ keep_alive
//! ```
//!
//! The background task owns the connection and everything that can change about it; callers only
//! queue and wait. The parts without I/O (`pending_requests`, `keep_alive`, `received_batches`) have tests without any.

mod address;
mod connection;
mod error;
mod handshake;
mod keep_alive;
mod options;
mod pending_requests;
mod received_batches;
mod reconnecting_connection;
mod subscription;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use address::{Address, AddressError};
pub use error::ClientError;
#[cfg(feature = "sidecar")]
pub(crate) use handshake::{OpenConnection, open};
#[cfg(not(feature = "tls"))]
pub use options::Tls;
pub use options::{AddOptions, ClientOptions, SubscribeOptions};
pub use reconnecting_connection::Outage;
pub use subscription::{Delivered, Subscription};
#[cfg(feature = "tls")]
pub use tls::Tls;

use crate::core::{DelOutcome, Message, Tick};
use crate::protocol::frame::{AddNewMsgAnswer, Body, MAX_MESSAGES, MAX_PING_LENGTH, Welcome};
use handshake::Dialer;
use options::{MAX_TEXT_LENGTH, check_length};
use reconnecting_connection::{ReconnectingConnection, unexpected};

/// Bytes of a message in a frame, and of everything else in that frame at most.
const MESSAGE_LENGTH: u32 = 16;
const OVERHEAD: u32 = 64;

/// A connection to an ackwheel, shared by all its clones. It is made again when it is lost.
///
/// Requests go out in the order in which their calls are first polled, without waiting for each other's
/// answers. A call that is dropped before its request was written is not sent. When the last clone is
/// dropped the connection is closed.
///
/// When the connection is lost, requests that were written fail with [`ClientError::ConnectionLost`]; those
/// that come later wait for the next connection, as long as a request may take. If that is refused they fail with the
/// server's [`Refused`](ClientError::Refused).
#[derive(Clone)]
pub struct Client {
    connection: Arc<ReconnectingConnection>,
}

impl Client {
    /// Connects and says Hello. Must be called within a tokio runtime with I/O and time, which then also
    /// runs the background task.
    ///
    /// # Errors
    ///
    /// When no connection can be made, or the server refuses it. Only the first connection fails like this;
    /// a lost one is made again for as long as there is a client.
    pub async fn connect(address: Address, options: ClientOptions) -> Result<Client, ClientError> {
        let dialer = Dialer { address, options, subscribe: None };
        let open = dialer.dial().await?;
        Ok(Client { connection: Arc::new(ReconnectingConnection::start(dialer, open, None)) })
    }

    /// Takes messages into flight: call it before they are pushed. Slices of any length are sent in as many
    /// frames as needed; the deadline is that of the last. An empty slice is answered at once, with tick 0.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. Repeating it is safe: messages that were added already are re-armed.
    pub async fn add_new_msg(
        &self,
        messages: &[Message],
        options: AddOptions,
    ) -> Result<AddNewMsgAnswer, ClientError> {
        if options.ack_timeout_ticks == Some(0) {
            let problem = "an ack timeout of 0 ticks is not possible: use at least 1, or none for the default";
            return Err(ClientError::InvalidRequest(problem.to_owned()));
        }
        let ack_timeout_ticks = options.ack_timeout_ticks.unwrap_or(0);
        let attempt = options.attempt;
        let body = |messages| Body::AddNewMsg { messages, ack_timeout_ticks, attempt };
        let read = |body| match body {
            Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline, outcomes }) => Ok((deadline, outcomes)),
            body => Err(unexpected(&body)),
        };
        let (deadline, outcomes) = self.ask_for_messages(messages, body, read).await?;
        Ok(AddNewMsgAnswer { deadline, outcomes })
    }

    /// Takes messages out of flight whose Ack arrived. Returns an outcome for each, in order. Slices of any length
    /// are sent in as many frames as needed, an empty one in none.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. Repeating it is harmless.
    pub async fn del_msg(&self, messages: &[Message]) -> Result<Vec<DelOutcome>, ClientError> {
        self.delete(messages, false).await
    }

    /// Takes messages out of flight whose push failed at once: they count neither as acknowledged nor in the
    /// latency. Otherwise as [`del_msg`](Client::del_msg).
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. Repeating it is harmless.
    pub async fn withdraw(&self, messages: &[Message]) -> Result<Vec<DelOutcome>, ClientError> {
        self.delete(messages, true).await
    }

    /// Sends a Ping, which the server answers with the same payload, and returns how long that took.
    ///
    /// # Errors
    ///
    /// When the payload is longer than 64 bytes; else see [`ClientError`].
    pub async fn ping(&self, payload: &[u8]) -> Result<Duration, ClientError> {
        check_length("the payload", payload.len(), MAX_PING_LENGTH)?;
        let asked = Instant::now();
        match self.connection.ask(Body::Ping(payload.to_vec())).await? {
            Body::Pong(echo) if echo == payload => Ok(asked.elapsed()),
            _ => {
                let address = self.address();
                Err(ClientError::Protocol(format!("{address} answered a ping with other bytes than it carried")))
            }
        }
    }

    /// Deletes a group, and with it the batches that it has not acknowledged.
    ///
    /// # Errors
    ///
    /// When there is no such group, or it has subscribers, or is the default group; else see [`ClientError`].
    pub async fn group_delete(&self, name: &str) -> Result<(), ClientError> {
        check_length("the group's name", name.len(), MAX_TEXT_LENGTH)?;
        // An answer of another type is an error already.
        self.connection.ask(Body::GroupDelete(name.to_owned())).await.map(drop)
    }

    /// Subscribes on a connection of its own, to the same address and with the same options.
    ///
    /// # Errors
    ///
    /// As [`Subscription::open`].
    pub async fn subscribe(&self, subscription: SubscribeOptions) -> Result<Subscription, ClientError> {
        Subscription::open(self.address().clone(), subscription, self.connection.dialer.options.clone()).await
    }

    /// Since when there is no connection, and why; none while there is one. Requests made meanwhile wait for one, up
    /// to the request timeout.
    pub fn outage(&self) -> Option<Outage> {
        self.connection.status.borrow().outage.clone()
    }

    /// The Welcome of the current connection, or of the last one.
    pub fn welcome(&self) -> Welcome {
        self.connection.status.borrow().welcome.clone()
    }

    /// Where the client connects to.
    pub fn address(&self) -> &Address {
        &self.connection.dialer.address
    }

    async fn delete(&self, messages: &[Message], withdraw: bool) -> Result<Vec<DelOutcome>, ClientError> {
        let body = |messages| Body::DelMsg { messages, withdraw };
        let read = |body| match body {
            Body::DelMsgAnswer(outcomes) => Ok((Tick(0), outcomes)),
            body => Err(unexpected(&body)),
        };
        Ok(self.ask_for_messages(messages, body, read).await?.1)
    }

    /// Sends messages in as many frames as the server's limits require. Returns the last deadline and all outcomes.
    async fn ask_for_messages<O: Clone>(
        &self,
        messages: &[Message],
        body: impl Fn(Vec<Message>) -> Body,
        read: impl Fn(Body) -> Result<(Tick, Vec<O>), ClientError>,
    ) -> Result<(Tick, Vec<O>), ClientError> {
        let Welcome { max_frame_length, max_messages, .. } = self.connection.status.borrow().welcome;
        let by_length = max_frame_length.saturating_sub(OVERHEAD) / MESSAGE_LENGTH;
        let most = (by_length.min(max_messages) as usize).clamp(1, MAX_MESSAGES);
        let read = |answer, messages| {
            let (deadline, outcomes) = read(answer)?;
            if outcomes.len() == messages {
                return Ok((deadline, outcomes));
            }
            let (address, outcomes) = (self.address(), outcomes.len());
            Err(ClientError::Protocol(format!("{address} answered {messages} messages with {outcomes} outcomes")))
        };
        let answers = self.connection.ask_in_frames(messages, most, body, read).await?;
        let (deadlines, outcomes): (Vec<Tick>, Vec<Vec<O>>) = answers.into_iter().unzip();
        Ok((deadlines.into_iter().max().unwrap_or(Tick(0)), outcomes.concat()))
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("address", self.address()).finish_non_exhaustive()
    }
}
