//! A subscription: a stream of timeout batches on a connection of its own, which it makes again when it is lost.

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
/// After a lost connection it subscribes again by itself, to the same group, or to a new ephemeral one. The
/// reader sees no error, and [`reconnects`](Subscription::reconnects) counts it. Only an error that trying again cannot
/// remove is yielded, and ends the stream.
///
/// A batch that is not acknowledged is redelivered, here or to another member of the group. So is a batch that
/// a member held when its connection was lost. A duplicate has the same [`BatchId`].
///
/// Call [`ack`](Subscription::ack) once. If it fails, the subscription repeats it: on the next connection, and when the
/// batch is redelivered, which is then not yielded a second time. It remembers up to 4,096 such batches.
///
/// Dropping the subscription leaves the group: batches that are not acknowledged by then go to others, and later
/// acknowledgements fail with [`ClientError::Closed`].
pub struct Subscription {
    shared: Arc<Shared>,
}

/// The parts that a subscription and its batches share.
struct Shared {
    connection: ReconnectingConnection,
    received: Arc<ReceivedBatches>,
}

impl Shared {
    /// Acknowledges batches. Returns how many of them were not settled before.
    async fn ack(&self, batches: &[BatchId]) -> Result<u64, ClientError> {
        // If this is dropped before the batches are settled, the acknowledgement is repeated.
        let _acknowledgement = self.received.acknowledge(batches);
        let read = |answer, _| match answer {
            Body::BatchAckAnswer { settled } => Ok(u64::from(settled)),
            body => Err(unexpected(&body)),
        };
        let settled = self.connection.ask_in_frames(batches, MAX_BATCH_IDS, Body::BatchAck, read).await?;
        self.received.settled(batches);
        Ok(settled.into_iter().sum())
    }

    /// Returns a batch to the server. Returns whether this connection held it.
    async fn nack(&self, batch: BatchId, delay: Duration) -> Result<bool, ClientError> {
        let delay_ms = u32::try_from(delay.as_millis()).unwrap_or(u32::MAX);
        // An answer of another type is an error already.
        let answer = self.connection.ask(Body::BatchNack { batch, delay_ms }).await?;
        Ok(matches!(answer, Body::BatchNackAnswer { held: true }))
    }
}

impl Subscription {
    /// Connects to `address` and subscribes.
    ///
    /// # Errors
    ///
    /// When no connection can be made, or the server refuses it or the subscription.
    pub async fn open(
        address: Address,
        subscription: SubscribeOptions,
        options: ClientOptions,
    ) -> Result<Subscription, ClientError> {
        let credit = subscription.credit;
        let dialer = Dialer { address, options, subscribe: Some(subscription.subscribe()?) };
        let mut open = dialer.dial().await?;
        let received = Arc::new(ReceivedBatches::new(credit, std::mem::take(&mut open.group)));
        let connection = ReconnectingConnection::start(dialer, open, Some(Arc::clone(&received)));
        Ok(Subscription { shared: Arc::new(Shared { connection, received }) })
    }

    /// The next batch; none after the end. Cancel-safe: no batch is lost if this future is dropped.
    pub async fn next(&mut self) -> Option<Result<Delivered, ClientError>> {
        poll_fn(|context| self.poll(context)).await
    }

    /// Acknowledges a batch: it is settled for the whole group. Returns whether it was not settled before.
    ///
    /// # Errors
    ///
    /// When the request fails; the subscription repeats it.
    pub async fn ack(&self, batch: BatchId) -> Result<bool, ClientError> {
        self.shared.ack(&[batch]).await.map(|settled| settled > 0)
    }

    /// Acknowledges many batches at once. Returns how many of them were not settled before.
    ///
    /// # Errors
    ///
    /// When a request fails; the subscription repeats it.
    pub async fn ack_all(&self, batches: &[BatchId]) -> Result<u64, ClientError> {
        self.shared.ack(batches).await
    }

    /// Returns a batch to the server: it goes to another member of the group, or to this one after the delay. Returns
    /// whether this connection held it.
    ///
    /// # Errors
    ///
    /// When the request fails; repeating it is safe.
    pub async fn nack(&self, batch: BatchId, delay: Duration) -> Result<bool, ClientError> {
        self.shared.nack(batch, delay).await
    }

    /// The group joined: the name that the server chose, if none was given. It changes when an ephemeral
    /// group was lost with its connection.
    pub fn group(&self) -> String {
        self.shared.received.state().group.clone()
    }

    /// How often a connection was lost and the subscription renewed on another.
    pub fn reconnects(&self) -> u64 {
        self.shared.received.state().reconnects
    }

    /// Since when there is no connection, and why; none while there is one. No batch arrives meanwhile.
    pub fn outage(&self) -> Option<Outage> {
        self.shared.connection.status.borrow().outage.clone()
    }

    /// The Welcome of the current connection, or of the last one.
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
        // Delivered batches keep the connection, but a subscription without a reader must not take more of them.
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

/// A delivered batch. Only [`ack`](Delivered::ack) settles it: a batch that is dropped is redelivered.
///
/// It can be moved to another task and acknowledged there while the stream is read.
#[derive(Clone)]
pub struct Delivered {
    /// The batch.
    pub batch: TimeoutBatch,
    shared: Arc<Shared>,
}

impl Delivered {
    /// Acknowledges the batch: it is settled for the whole group. Returns whether it was not settled before.
    ///
    /// # Errors
    ///
    /// When the request fails; the subscription repeats it.
    pub async fn ack(&self) -> Result<bool, ClientError> {
        self.shared.ack(&[self.batch.id]).await.map(|settled| settled > 0)
    }

    /// Returns the batch to the server: it goes to another member of the group, or to this one after the delay.
    /// Returns whether this connection held it.
    ///
    /// # Errors
    ///
    /// When the request fails; repeating it is safe.
    pub async fn nack(&self, delay: Duration) -> Result<bool, ClientError> {
        self.shared.nack(self.batch.id, delay).await
    }

    /// The batch alone, which can no longer be acknowledged by itself.
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
