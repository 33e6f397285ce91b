//! The client library for logic nodes in Rust. A logic node is a server that pushes messages to phones and receives
//! their Acks.
//!
//! A [`Client`] adds messages to an ackwheel server before they are pushed, and deletes them when their Ack arrives. A
//! [`Subscription`] yields the messages that were not acknowledged in time. Client and subscription each have their own
//! connection. They keep it alive, and reconnect after a loss.
//!
//! ```no_run
//! use ackwheel::client::{AddOptions, Client, ClientOptions, SubscribeOptions};
//! use ackwheel::core::Message;
//!
//! # async fn node() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect("127.0.0.1:7415".parse()?, ClientOptions::default()).await?;
//!
//! // Add the message before you push it: then the Ack cannot arrive before the message is tracked.
//! client.add_new_msg(&[Message::new(101, 7)], AddOptions::default()).await?;
//! // … Push the message to client 7. When its Ack arrives:
//! client.del_msg(&[Message::new(101, 7)]).await?;
//!
//! // In another task, receive the messages that were not acknowledged in time (see docs/INTEGRATION.md).
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
//! The background task owns the connection and its state. Callers only queue requests and wait for answers.
//! `pending_requests`, `keep_alive` and `received_batches` do no I/O, so their tests need none.

mod address;
mod connection;
mod error;
mod files;
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
pub(crate) use files::read_token;
#[cfg(feature = "sidecar")]
pub(crate) use handshake::{OpenConnection, open};
#[cfg(not(feature = "tls"))]
pub use options::Tls;
pub use options::{AddOptions, ClientOptions, SubscribeOptions};
pub use reconnecting_connection::Outage;
pub use subscription::{Delivered, Subscription};
#[cfg(feature = "tls")]
pub use tls::Tls;

use crate::core::{DelOutcome, Message, MessageState, Tick};
use crate::protocol::frame::{AddNewMsgAnswer, Body, MAX_MESSAGES, MAX_PING_LENGTH, Welcome};
use handshake::Dialer;
use options::{MAX_TEXT_LENGTH, check_length};
use reconnecting_connection::{ReconnectingConnection, unexpected};

/// The number of bytes of one message in a frame: a message id and a client id.
const MESSAGE_LENGTH: u32 = 16;
/// The maximum number of bytes in a frame besides its messages.
const OVERHEAD: u32 = 64;

/// A connection to an ackwheel server. All clones share the connection. After a loss, the client reconnects.
///
/// Requests are sent in the order in which their futures are first polled. A request does not wait for the answers to
/// earlier requests. If a future is dropped while its request still waits to be encoded, the request is not sent.
/// Dropping the last clone closes the connection.
///
/// When the connection is lost, requests that may already have been written fail with [`ClientError::ConnectionLost`].
/// Other requests wait for the next connection until their timeout. If the server refuses the next connection, the
/// waiting requests fail with [`Refused`](ClientError::Refused).
#[derive(Clone)]
pub struct Client {
    connection: Arc<ReconnectingConnection>,
}

impl Client {
    /// Connects and completes the Hello handshake. Must be called within a Tokio runtime with I/O and time enabled.
    /// That runtime also runs the background task.
    ///
    /// # Errors
    ///
    /// Fails if the client cannot connect or the server refuses the connection. If the connection is lost later, the
    /// client tries to reconnect until its last clone is dropped.
    pub async fn connect(address: Address, options: ClientOptions) -> Result<Client, ClientError> {
        let dialer = Dialer { address, options, subscribe: None };
        let open = dialer.dial().await?;
        Ok(Client { connection: Arc::new(ReconnectingConnection::start(dialer, open, None)) })
    }

    /// Starts the ack timeout of messages. Call this before you push the messages. Returns one outcome per message, and
    /// the deadline: the tick at whose end an unacknowledged message times out. A long slice is sent in several frames,
    /// and the latest of their deadlines is returned. An empty slice sends nothing and returns tick 0.
    ///
    /// # Errors
    ///
    /// Fails if the ack timeout is 0 ticks. For other failures see [`ClientError`]. If the call is repeated, a message
    /// that is in flight gets a new deadline. A message that was acknowledged meanwhile is added again: do not repeat it.
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

    /// Removes messages whose Ack arrived. Returns one outcome per message, in order. A long slice is sent in several
    /// frames; an empty slice sends nothing.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. Repeating the call is harmless.
    pub async fn del_msg(&self, messages: &[Message]) -> Result<Vec<DelOutcome>, ClientError> {
        self.delete(messages, false).await
    }

    /// Removes messages whose push failed at once. The server counts these messages neither as acknowledged nor in its
    /// latency metrics. Otherwise this call works like [`del_msg`](Client::del_msg).
    ///
    /// # Errors
    ///
    /// See [`ClientError`]. Repeating the call is harmless.
    pub async fn withdraw(&self, messages: &[Message]) -> Result<Vec<DelOutcome>, ClientError> {
        self.delete(messages, true).await
    }

    /// Returns the state of messages, and changes nothing. A long slice is sent in several frames; an empty slice sends
    /// nothing. Sees all requests that were answered before this call.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub async fn get_msg(&self, messages: &[Message]) -> Result<Vec<MessageState>, ClientError> {
        let read = |body| match body {
            Body::GetMsgAnswer(states) => Ok((Tick(0), states)),
            body => Err(unexpected(&body)),
        };
        Ok(self.ask_for_messages(messages, Body::GetMsg, read).await?.1)
    }

    /// Sends a Ping and returns the round-trip time. Checks that the server answers with the same payload.
    ///
    /// # Errors
    ///
    /// Fails if the payload is longer than 64 bytes. For other failures see [`ClientError`].
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

    /// Deletes a group of subscribers, and discards the timeout batches that this group has not acknowledged.
    ///
    /// # Errors
    ///
    /// Fails if the name is longer than 255 bytes, or if the group does not exist, has subscribers, or is the default
    /// group. For other failures see [`ClientError`].
    pub async fn group_delete(&self, name: &str) -> Result<(), ClientError> {
        check_length("the group's name", name.len(), MAX_TEXT_LENGTH)?;
        // The background task has already turned an answer of the wrong type into an error.
        self.connection.ask(Body::GroupDelete(name.to_owned())).await.map(drop)
    }

    /// Opens a subscription on a new connection, with the address and the options of this client.
    ///
    /// # Errors
    ///
    /// See [`Subscription::open`].
    pub async fn subscribe(&self, subscription: SubscribeOptions) -> Result<Subscription, ClientError> {
        Subscription::open(self.address().clone(), subscription, self.connection.dialer.options.clone()).await
    }

    /// Returns the start and the cause of the current outage. Returns `None` while the client is connected. During an
    /// outage, requests wait for the next connection until their timeout.
    pub fn outage(&self) -> Option<Outage> {
        self.connection.status.borrow().outage.clone()
    }

    /// Returns the Welcome frame, with the settings and limits of the server. During an outage, the frame is that of
    /// the last connection.
    pub fn welcome(&self) -> Welcome {
        self.connection.status.borrow().welcome.clone()
    }

    /// Returns the address that the client connects to.
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

    /// Sends messages in as many frames as the server's limits require. Returns the latest deadline and all outcomes.
    /// `body` builds a request from messages, and `read` takes the deadline and the outcomes from an answer.
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
