//! One request at a time, for callers that have no connection: tests, examples and measurements.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Instant;

use super::completions::Completions;
use super::message::Message;
use super::refusal::Refusal;
use super::request_batch::{Operation, RequestBatch};
use super::ring::{AddNewMsgAnswer, ConnectionId, DelMsgAnswer, Reply, Ring, Submitted};
use super::rings::Rings;

/// Messages that were pushed.
#[derive(Clone, Copy, Debug)]
pub struct AddNewMsg<'a> {
    /// The messages; repeats apply in order.
    pub messages: &'a [Message],
    /// Ticks that they may stay in flight, 1..=slots.
    pub ack_timeout_ticks: u16,
    /// Comes back with the timeout.
    pub attempt: u8,
}

/// Messages whose Ack arrived, or whose push failed.
#[derive(Clone, Copy, Debug)]
pub struct DelMsg<'a> {
    /// The messages; repeats apply in order.
    pub messages: &'a [Message],
    /// Whether their push failed at once: they count neither as acknowledged nor in the latency.
    pub withdraw: bool,
}

/// Submits single requests. A request has its place in the order of its connection when the call returns.
pub trait SingleRequest {
    /// Takes messages into flight, all of them or, if it is refused, none.
    fn add_new_msg(&self, request: AddNewMsg<'_>, now: Instant) -> Reply<AddNewMsgAnswer>;

    /// Takes messages out of flight.
    fn del_msg(&self, request: DelMsg<'_>, now: Instant) -> Reply<DelMsgAnswer>;
}

impl<R: Ring + ?Sized> SingleRequest for R {
    fn add_new_msg(&self, request: AddNewMsg<'_>, now: Instant) -> Reply<AddNewMsgAnswer> {
        submit_to(self, added(request), now, add_answer)
    }

    fn del_msg(&self, request: DelMsg<'_>, now: Instant) -> Reply<DelMsgAnswer> {
        submit_to(self, deleted(request), now, del_answer)
    }
}

impl SingleRequest for Rings {
    fn add_new_msg(&self, request: AddNewMsg<'_>, now: Instant) -> Reply<AddNewMsgAnswer> {
        submit_to_all(self, added(request), now, add_answer)
    }

    fn del_msg(&self, request: DelMsg<'_>, now: Instant) -> Reply<DelMsgAnswer> {
        submit_to_all(self, deleted(request), now, del_answer)
    }
}

fn submit_to<T: Send + Unpin + 'static>(
    ring: &(impl Ring + ?Sized),
    mut batch: RequestBatch,
    now: Instant,
    answer: fn(&RequestBatch) -> T,
) -> Reply<T> {
    let completions = Arc::new(Completions::default());
    match ring.submit(&mut batch, ConnectionId::default(), &completions, now) {
        Submitted::Completed => Reply::Ready(Some(outcome(&batch, answer))),
        Submitted::Pending => Reply::Later(Box::pin(async move {
            let mut completed = RequestBatch::default();
            poll_fn(|context| completions.poll(context, &mut completed)).await;
            outcome(&completed, answer)
        })),
    }
}

fn submit_to_all<T: Send + Unpin + 'static>(
    rings: &Rings,
    mut batch: RequestBatch,
    now: Instant,
    answer: fn(&RequestBatch) -> T,
) -> Reply<T> {
    let mut requester = rings.requester();
    match requester.submit(&mut batch, now) {
        Submitted::Completed => Reply::Ready(Some(outcome(&batch, answer))),
        Submitted::Pending => Reply::Later(Box::pin(async move {
            let mut completed = RequestBatch::default();
            poll_fn(|context| requester.poll(context, &mut completed)).await;
            outcome(&completed, answer)
        })),
    }
}

fn added(request: AddNewMsg<'_>) -> RequestBatch {
    let AddNewMsg { messages, ack_timeout_ticks, attempt } = request;
    of_one(Operation::Add { ack_timeout_ticks, attempt }, messages)
}

fn deleted(request: DelMsg<'_>) -> RequestBatch {
    of_one(Operation::Del { withdraw: request.withdraw }, request.messages)
}

fn of_one(operation: Operation, messages: &[Message]) -> RequestBatch {
    let mut batch = RequestBatch::default();
    batch.push(0, operation, messages.iter().copied());
    batch
}

fn outcome<T>(batch: &RequestBatch, answer: fn(&RequestBatch) -> T) -> Result<T, Refusal> {
    match &batch.requests[0].refusal {
        None => Ok(answer(batch)),
        Some(refusal) => Err(Refusal::clone(refusal)),
    }
}

fn add_answer(batch: &RequestBatch) -> AddNewMsgAnswer {
    AddNewMsgAnswer {
        deadline: batch.requests[0].deadline,
        outcomes: batch.outcomes().iter().map(|outcome| outcome.of_add()).collect(),
    }
}

fn del_answer(batch: &RequestBatch) -> DelMsgAnswer {
    DelMsgAnswer {
        outcomes: batch.outcomes().iter().map(|outcome| outcome.of_del()).collect(),
        ack_latency: batch.ack_latency.clone(),
    }
}
