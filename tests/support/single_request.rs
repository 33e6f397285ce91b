//! Submits one request at a time to a ring, without a connection. The unit tests of the library use it too.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use ackwheel::core::{
    AddNewMsgAnswer, Completions, ConnectionId, DelOutcome, LatencyHistogram, Message, Operation, Refusal,
    RequestBatch, Ring, Submitted,
};

/// An AddNewMsg.
#[derive(Clone, Copy, Debug)]
pub struct AddNewMsg<'a> {
    /// The messages. Repeated messages are applied in order.
    pub messages: &'a [Message],
    /// The ack timeout in ticks, 1..=slots.
    pub ack_timeout_ticks: u16,
    /// The number that the timeout batch repeats.
    pub attempt: u8,
}

/// A DelMsg.
#[derive(Clone, Copy, Debug)]
pub struct DelMsg<'a> {
    /// The messages. Repeated messages are applied in order.
    pub messages: &'a [Message],
    /// Whether their push failed at once. Then they count neither as acknowledged nor in the latency.
    pub withdraw: bool,
}

/// The answer to a DelMsg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DelMsgAnswer {
    /// For each message, in order.
    pub outcomes: Vec<DelOutcome>,
    /// Time from add to del of the acknowledged messages, late ones included. A late message counts once.
    pub ack_latency: LatencyHistogram,
}

/// The answer to a request, which comes later.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Refusal>> + Send>>;

/// A batch that completes later.
pub type Completed = Pin<Box<dyn Future<Output = RequestBatch> + Send>>;

/// Submits single requests. The ring has them when the call returns.
pub trait SingleRequest {
    /// Submits a batch.
    fn submit_single(&self, batch: RequestBatch, now: Instant) -> Completed;

    /// Adds all messages or, if it is refused, none.
    fn add_new_msg(&self, request: AddNewMsg<'_>, now: Instant) -> Answer<AddNewMsgAnswer> {
        let AddNewMsg { messages, ack_timeout_ticks, attempt } = request;
        let mut batch = RequestBatch::default();
        batch.push(0, Operation::Add { ack_timeout_ticks, attempt }, messages.iter().copied());
        let completed = self.submit_single(batch, now);
        Box::pin(async move {
            let batch = accepted(completed.await)?;
            let outcomes = batch.outcomes().iter().map(|outcome| outcome.of_add()).collect();
            Ok(AddNewMsgAnswer { deadline: batch.requests[0].deadline, outcomes })
        })
    }

    /// Deletes the messages.
    fn del_msg(&self, request: DelMsg<'_>, now: Instant) -> Answer<DelMsgAnswer> {
        let mut batch = RequestBatch::default();
        batch.push(0, Operation::Del { withdraw: request.withdraw }, request.messages.iter().copied());
        let completed = self.submit_single(batch, now);
        Box::pin(async move {
            let batch = accepted(completed.await)?;
            let outcomes = batch.outcomes().iter().map(|outcome| outcome.of_del()).collect();
            Ok(DelMsgAnswer { outcomes, ack_latency: batch.ack_latency })
        })
    }
}

impl<R: Ring + ?Sized> SingleRequest for R {
    fn submit_single(&self, mut batch: RequestBatch, now: Instant) -> Completed {
        let completions = Arc::new(Completions::default());
        let submitted = self.submit(&mut batch, ConnectionId::default(), &completions, now);
        Box::pin(async move {
            if submitted == Submitted::Pending {
                batch = RequestBatch::default();
                poll_fn(|context| completions.poll(context, &mut batch)).await;
            }
            batch
        })
    }
}

fn accepted(batch: RequestBatch) -> Result<RequestBatch, Refusal> {
    batch.requests[0].refusal.as_deref().cloned().map_or(Ok(batch), Err)
}
