//! The hot path: all adds and dels of a read are submitted together, and all that are complete are answered together.
//!
//! ```text
//!   read ──▶ submit_requests ──▶ submit ──▶ rings: completed in the call ──▶ send_answers ──▶ write
//!                                      ──▶ rings: later, in completions ──▶ send_completed ──▶ write
//! ```

use std::cell::Cell;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Instant;

use super::pending::{Load, Pending};
use super::session::{Done, Session, State};
use crate::core::refusal::{Reason, Refusal};
use crate::core::request_batch::{Operation, Request, RequestBatch};
use crate::core::requester::Requester;
use crate::core::ring::Submitted;
use crate::metrics::Metrics;
use crate::process::panics;
use crate::protocol::frame::FrameType;

/// A batch is submitted once it has so many messages: enough to share a lock and a wait for memory well. A frame is not
/// cut, so the last one may bring more.
const MAX_MESSAGES: usize = 4_096;

/// Room for so many messages is kept from one batch of a thread to the next.
const MAX_KEPT_BY_A_THREAD: usize = 4 * MAX_MESSAGES;

/// Room for so many messages is kept for requests that complete later: each connection has that for itself.
const MAX_KEPT: usize = 256;

thread_local! {
    /// Used again by every read of a thread, so that an idle connection has none. A read takes it out and puts it back
    /// empty. If a connection panics, what it had in the batch is dropped with that connection.
    static BATCH: Cell<Option<Box<RequestBatch>>> = const { Cell::new(None) };
}

impl Session {
    /// Submits the adds and dels at the front of what was read, and answers the Pings between them.
    pub(super) fn submit_requests(&mut self, now: Instant) {
        if self.state != State::Serving {
            return;
        }
        let revolution = self.shared.rings.wheel().slots();
        self.will_write();
        let mut batch = BATCH.take().unwrap_or_default();
        loop {
            let echoed = self.wire.echo_pings();
            self.shared.metrics.count_frames(FrameType::Ping, echoed.pings);
            self.shared.metrics.count_frames(FrameType::Pong, echoed.pings + echoed.pongs);
            self.wire.take_requests(&mut batch, MAX_MESSAGES, revolution);
            if !batch.is_empty() {
                self.submit(&mut batch, now);
                batch.clear(MAX_KEPT_BY_A_THREAD);
            } else if echoed.bytes == 0 {
                break;
            }
        }
        BATCH.set(Some(batch));
    }

    fn submit(&mut self, batch: &mut RequestBatch, now: Instant) {
        let (slots, mut adds) = (self.shared.rings.wheel().slots(), 0);
        for request in &mut batch.requests {
            adds += u64::from(request.operation.is_add());
            let ack_timeout_ticks = request.operation.ack_timeout_ticks();
            if ack_timeout_ticks > slots {
                request.refusal = Some(Arc::new(bad_ack_timeout(ack_timeout_ticks, slots)));
            }
        }
        self.shared.metrics.count_frames(FrameType::AddNewMsg, adds);
        self.shared.metrics.count_frames(FrameType::DelMsg, batch.requests.len() as u64 - adds);
        let submitted = {
            let _shared = panics::shared();
            self.requester.submit(batch, now)
        };
        match submitted {
            Submitted::Completed => self.send_answers(batch),
            Submitted::Pending => batch.requests.iter().for_each(|request| self.pending.begin(load(request))),
        }
    }

    /// Answers the requests that were completed later.
    pub(super) fn send_completed(&mut self) {
        let mut completed = std::mem::take(&mut self.completed);
        for request in &completed.requests {
            self.pending.end(load(request));
        }
        self.will_write();
        self.send_answers(&completed);
        completed.clear(MAX_KEPT);
        self.completed = completed;
    }

    fn send_answers(&mut self, batch: &RequestBatch) {
        self.shared.metrics.count_requests(batch);
        let (mut adds, mut dels) = (0, 0);
        for request in &batch.requests {
            match &request.refusal {
                None => {
                    adds += u64::from(request.operation.is_add());
                    dels += u64::from(!request.operation.is_add());
                    self.wire.answer(request, &batch.outcomes()[request.range()]);
                }
                Some(refusal) => self.refuse(correlation_id(request), refusal),
            }
        }
        self.shared.metrics.count_frames(FrameType::AddNewMsgAnswer, adds);
        self.shared.metrics.count_frames(FrameType::DelMsgAnswer, dels);
    }
}

/// Waits for the requests of a connection that is closed: they are done all the same, and count.
pub(super) async fn outlive(mut pending: Pending<Done>, mut requester: Requester, metrics: Arc<Metrics>) {
    let mut completed = RequestBatch::default();
    while pending.is_waiting() {
        tokio::select! {
            () = poll_fn(|context| requester.poll(context, &mut completed)) => {
                for request in &completed.requests {
                    pending.end(load(request));
                    request.refusal.iter().for_each(|refusal| metrics.count_refusal(refusal.reason));
                }
                metrics.count_requests(&completed);
                completed.clear(0);
            }
            Some(done) = pending.next(), if !pending.is_empty() => {
                done.refused().into_iter().for_each(|reason| metrics.count_refusal(reason));
            }
        }
    }
}

/// The load that a request is while it is pending.
fn load(request: &Request) -> Load {
    let messages = request.range().len();
    match request.operation {
        Operation::Add { .. } => Load::Other(messages),
        Operation::Del { .. } => Load::Acks(messages),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the id was made of a correlation id")]
const fn correlation_id(request: &Request) -> u32 {
    request.id as u32
}

fn bad_ack_timeout(ack_timeout_ticks: u16, slots: u16) -> Refusal {
    let text = format!(
        "an ack timeout of {ack_timeout_ticks} ticks is longer than the ring: ask for 1 to {slots} ticks, or 0 for \
         the default of {slots}"
    );
    Refusal::new(Reason::BadAckTimeout, text)
}
