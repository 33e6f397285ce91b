//! A subscription: a stream of timeout batches on its own connection, which it restores after a loss. A timeout batch
//! is a list of messages that were not acknowledged in time.

use std::fmt;
use std::future::poll_fn;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;

use super::address::Address;
use super::error::ClientError;
use super::handshake::Dialer;
use super::options::{ClientOptions, SubscribeOptions};
use super::received_batches::ReceivedBatches;
use super::reconnecting_connection::{Outage, ReconnectingConnection, unexpected};
use crate::core::BatchId;
use crate::protocol::frame::{Body, MAX_BATCH_IDS, TimeoutBatch, Welcome};

/// A stream of timeout batches.
///
/// After a lost connection, the stream subscribes again with the same options. If the options name no group, the server
/// creates a new group for it. The reader sees no error; [`reconnects`](Subscription::reconnects) counts these events.
/// The stream yields an error only if the error is not retryable, and then ends.
///
/// The server redelivers a batch if it is not acknowledged in time, or if its subscriber loses the connection. The
/// batch goes to this subscriber or to another member of the group. A redelivered batch has the same [`BatchId`].
///
/// Call [`ack`](Subscription::ack) once per batch. If the call fails, the subscription repeats the acknowledgement: on
/// the next connection, and when the batch is redelivered. The redelivered batch is not yielded again. The subscription
/// remembers up to 4,096 such batches.
///
/// When the subscription is dropped, this subscriber leaves the group. The batches that it has not acknowledged by then
/// go to other members. Later acknowledgements fail with [`ClientError::Closed`].
pub struct Subscription {
    shared: Arc<Shared>,
}

/// The state that a subscription shares with its batches.
struct Shared {
    connection: ReconnectingConnection,
    received: Arc<ReceivedBatches>,
    created: bool,
}

impl Shared {
    /// Acknowledges batches, which settles them: the server does not deliver them to the group again. Returns how many
    /// of them were not settled before.
    async fn ack(&self, batches: &[BatchId]) -> Result<u64, ClientError> {
        // If this value is dropped before the batches are settled, the acknowledgement is repeated.
        let _acknowledgement = self.received.acknowledge(batches);
        let read = |answer, _| match answer {
            Body::BatchAckAnswer { settled } => Ok(u64::from(settled)),
            body => Err(unexpected(&body)),
        };
        let settled = self.connection.ask_in_frames(batches, MAX_BATCH_IDS, Body::BatchAck, read).await?;
        self.received.settled(batches);
        Ok(settled.into_iter().sum())
    }

    /// Sends a batch back to the server. Returns whether this connection held the batch.
    async fn nack(&self, batch: BatchId, delay: Duration) -> Result<bool, ClientError> {
        let delay_ms = u32::try_from(delay.as_millis()).unwrap_or(u32::MAX);
        // The background task has already turned an answer of the wrong type into an error.
        let answer = self.connection.ask(Body::BatchNack { batch, delay_ms }).await?;
        Ok(matches!(answer, Body::BatchNackAnswer { held: true }))
    }
}

impl Subscription {
    /// Connects to `address` and subscribes.
    ///
    /// # Errors
    ///
    /// Fails if the client cannot connect, or if the server refuses the connection or the subscription.
    pub async fn open(
        address: Address,
        subscription: SubscribeOptions,
        options: ClientOptions,
    ) -> Result<Subscription, ClientError> {
        let credit = subscription.credit;
        let dialer = Dialer { address, options, subscribe: Some(subscription.subscribe()?) };
        let mut open = dialer.dial().await?;
        let (received, created) =
            (Arc::new(ReceivedBatches::new(credit, std::mem::take(&mut open.group))), open.created);
        let connection = ReconnectingConnection::start(dialer, open, Some(Arc::clone(&received)));
        Ok(Subscription { shared: Arc::new(Shared { connection, received, created }) })
    }

    /// Waits for the next batch; returns `None` after the end. Cancel-safe: no batch is lost if this future is dropped.
    pub async fn next(&mut self) -> Option<Result<Delivered, ClientError>> {
        poll_fn(|context| self.poll(context)).await
    }

    /// Acknowledges a batch, which settles it: the server does not deliver it to the group again. Returns whether the
    /// batch was not settled before.
    ///
    /// # Errors
    ///
    /// Fails if the request fails. The subscription then repeats the acknowledgement.
    pub async fn ack(&self, batch: BatchId) -> Result<bool, ClientError> {
        self.shared.ack(&[batch]).await.map(|settled| settled > 0)
    }

    /// Acknowledges several batches at once. Returns how many of them were not settled before.
    ///
    /// # Errors
    ///
    /// Fails if a request fails. The subscription then repeats the acknowledgement.
    pub async fn ack_all(&self, batches: &[BatchId]) -> Result<u64, ClientError> {
        self.shared.ack(batches).await
    }

    /// Sends a batch back to the server, which delivers it to another member of the group or, after `delay`, to this
    /// subscriber. Returns whether this connection held the batch.
    ///
    /// # Errors
    ///
    /// Fails if the request fails. Repeating the call is safe.
    pub async fn nack(&self, batch: BatchId, delay: Duration) -> Result<bool, ClientError> {
        self.shared.nack(batch, delay).await
    }

    /// Returns the name of the group. If the options name no group, the server chooses the name, and the name changes
    /// when the subscription is renewed on a new connection.
    pub fn group(&self) -> String {
        self.shared.received.state().group.clone()
    }

    /// Returns whether [`open`](Subscription::open) created the group.
    pub fn created(&self) -> bool {
        self.shared.created
    }

    /// Returns how many times the subscription was renewed after a lost connection.
    pub fn reconnects(&self) -> u64 {
        self.shared.received.state().reconnects
    }

    /// Returns the start and the cause of the current outage. Returns `None` while the subscription is connected.
    /// During an outage, no batch arrives.
    pub fn outage(&self) -> Option<Outage> {
        self.shared.connection.status.borrow().outage.clone()
    }

    /// Returns the Welcome frame, with the settings and limits of the server. During an outage, the frame is that of
    /// the last connection.
    pub fn welcome(&self) -> Welcome {
        self.shared.connection.status.borrow().welcome.clone()
    }

    fn poll(&self, context: &Context<'_>) -> Poll<Option<Result<Delivered, ClientError>>> {
        let delivered = |batch| Delivered { batch, shared: Arc::clone(&self.shared) };
        self.shared.received.poll(context).map(|next| next.map(|batch| batch.map(delivered)))
    }
}

impl Stream for Subscription {
    type Item = Result<Delivered, ClientError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll(context)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // Batches that the caller still holds would keep the connection open. But without a reader, the subscription
        // must not receive more batches.
        self.shared.connection.close();
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription")
            .field("address", &self.shared.connection.dialer.address)
            .field("group", &self.group())
            .field("reconnects", &self.reconnects())
            .finish_non_exhaustive()
    }
}

/// A delivered batch. Dropping it does not acknowledge it: the server redelivers a batch that is not acknowledged with
/// [`ack`](Delivered::ack) or [`Subscription::ack`].
///
/// A batch can be acknowledged in another task while the stream is read.
#[derive(Clone)]
pub struct Delivered {
    /// The batch.
    pub batch: TimeoutBatch,
    shared: Arc<Shared>,
}

impl Delivered {
    /// Acknowledges the batch, which settles it: the server does not deliver it to the group again. Returns whether the
    /// batch was not settled before.
    ///
    /// # Errors
    ///
    /// Fails if the request fails. The subscription then repeats the acknowledgement.
    pub async fn ack(&self) -> Result<bool, ClientError> {
        self.shared.ack(&[self.batch.id]).await.map(|settled| settled > 0)
    }

    /// Sends the batch back to the server, which delivers it to another member of the group or, after `delay`, to this
    /// subscriber. Returns whether this connection held the batch.
    ///
    /// # Errors
    ///
    /// Fails if the request fails. Repeating the call is safe.
    pub async fn nack(&self, delay: Duration) -> Result<bool, ClientError> {
        self.shared.nack(self.batch.id, delay).await
    }

    /// Returns the batch without its connection: acknowledge it with [`Subscription::ack`].
    pub fn into_batch(self) -> TimeoutBatch {
        self.batch
    }
}

impl Deref for Delivered {
    type Target = TimeoutBatch;

    fn deref(&self) -> &TimeoutBatch {
        &self.batch
    }
}

impl fmt::Debug for Delivered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivered").field("batch", &self.batch).finish_non_exhaustive()
    }
}
