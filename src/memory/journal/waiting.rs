//! Requests and tasks that wait until the journal has written what they depend on.

use std::sync::Arc;
use std::task::Waker;

use tokio::sync::oneshot;

use crate::core::{Completions, Refusal, RequestBatch};

/// The memory that a batch takes without its requests and outcomes, rounded up.
const BATCH_BYTES: u64 = 1_024;

/// The memory that a request takes in a batch, rounded up.
const REQUEST_BYTES: u64 = 64;

#[expect(clippy::large_enum_variant, reason = "nearly all that waits are batches")]
pub(super) enum Waiting {
    Batch(Arc<Completions>, RequestBatch),
    Task(oneshot::Sender<()>),
}

impl Waiting {
    /// Returns the memory that it takes.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Waiting::Batch(_, batch) => {
                BATCH_BYTES + REQUEST_BYTES * batch.requests.len() as u64 + batch.outcomes().len() as u64
            }
            Waiting::Task(_) => BATCH_BYTES,
        }
    }
}

/// Ends the wait, with a refusal of all adds if there is one. Returns the batches, whose memory can be used again.
pub(super) fn release(released: Vec<Waiting>, refusal: Option<&Arc<Refusal>>) -> Vec<RequestBatch> {
    let (mut wakers, mut spare) = (Vec::new(), Vec::new());
    for waiting in released {
        match waiting {
            Waiting::Batch(completions, mut batch) => {
                if let Some(refusal) = refusal {
                    batch.refuse_adds(Arc::clone(refusal));
                }
                wakers.extend(completions.put(|completed| completed.take_completed(&mut batch)));
                spare.push(batch);
            }
            // The task may have given up.
            Waiting::Task(task) => drop(task.send(())),
        }
    }
    wakers.into_iter().for_each(Waker::wake);
    spare
}
