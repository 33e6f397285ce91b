//! Reads the socket of a connection, also for the read barrier, and submits adds (AddNewMsg) and dels (DelMsg) to the
//! rings. The protocol of the connection decodes the requests and encodes the answers.
//!
//! ```text
//!   read ──▶ read_requests ──▶ submit ──▶ rings: completed in the call ──▶ send_answers ──▶ write
//!                                     ──▶ rings: completed later       ──▶ send_completed ──▶ write
//! ```

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tracing::debug;

use super::buffered_stream::READ_SIZE;
use super::pending_requests::Weight;
use super::session::{ClientProtocol, Session, State};
use super::socket::IoEvent;
use super::tokens::Right;
use crate::core::{Reason, Refusal, RequestBatch, SHORTEST_STALL, Submitted, WAKING_TIME};
use crate::process::panics;

/// How many reads and writes may follow each other before the session checks its other events.
const IO_ROUNDS: usize = 8;

/// How many bytes a connection reads before it yields to other tasks of its thread: about 4,000 message ids, whose
/// processing takes about half a millisecond.
const FAIR_SHARE: usize = READ_SIZE;

/// The limit for the memory that [`Session::completed`] keeps: a request batch with room for more messages is freed. It
/// is small, because each connection has its own.
const MAX_KEPT: usize = 256;

/// The pause before an emptied socket is read again. A peer that has more to send fills the socket within this time.
const REFILL: Duration = Duration::from_millis(2);

impl<P: ClientProtocol> Session<P> {
    /// Reads and writes while the socket is ready, at most [`IO_ROUNDS`] times. After [`FAIR_SHARE`] bytes, yields to
    /// other tasks and returns. Returns `false` if the session is over.
    pub(super) async fn read_and_write(&mut self) -> bool {
        for _ in 0..IO_ROUNDS {
            if self.read_since_yield >= FAIR_SHARE {
                // Let other connections of this thread run. Then return, so that this connection also handles its other
                // events.
                self.read_since_yield = 0;
                tokio::task::yield_now().await;
                return true;
            }
            let reading = self.may_read();
            let Some(event) = self.stream.read_or_write(reading).now_or_never() else { return true };
            self.handle_io(event);
            if self.is_over() {
                return false;
            }
        }
        true
    }

    pub(super) fn handle_io(&mut self, event: io::Result<IoEvent>) {
        match event {
            Ok(IoEvent::Read(count)) => {
                self.read_since_yield += count;
                self.keep_alive.received(self.shared.clock.stall_aware_now());
                P::read_requests(self);
                self.charge();
            }
            Ok(IoEvent::Written) => {
                self.keep_alive.sent(self.shared.clock.stall_aware_now());
                P::written(self);
            }
            // Batches then go to subscribers that can still read.
            Ok(IoEvent::WriteFailed) => self.protocol.stop_delivery(),
            Ok(IoEvent::Ended) => P::ended(self),
            Ok(IoEvent::OverBudget) => self.close_over_budget(),
            Err(error) => {
                debug!(%error, "connection lost");
                self.state = State::Closing;
            }
        }
    }

    /// Submits adds and dels to the rings. Refuses adds once the peer knows that the sidecar drains, even if the rings
    /// still take them. Returns whether they are complete, and the number of adds. The others complete
    /// in `completed`.
    pub(super) fn submit(&mut self, batch: &mut RequestBatch, now: Instant) -> (Submitted, u64) {
        let (slots, mut adds) = (self.shared.rings.wheel().slots(), 0);
        if self.is_draining {
            batch.refuse_adds(Refusal::draining());
        }
        let not_permitted = self.grant.check(Right::Produce).err().map(Arc::new);
        for request in &mut batch.requests {
            adds += u64::from(request.operation.is_add());
            let ack_timeout_ticks = request.operation.ack_timeout_ticks();
            if ack_timeout_ticks > slots {
                request.refusal = Some(Arc::new(bad_ack_timeout(ack_timeout_ticks, slots)));
            }
            if not_permitted.is_some() {
                request.refusal.clone_from(&not_permitted);
            }
        }
        if not_permitted.is_some() {
            return (Submitted::Completed, adds);
        }
        let submitted = {
            let _shared = panics::shared();
            self.requester.submit(batch, now)
        };
        if submitted == Submitted::Pending {
            batch.requests.iter().for_each(|request| self.pending.begin(Weight::of(request)));
        }
        (submitted, adds)
    }

    /// Answers the requests that the store completed after the call that submitted them.
    pub(super) fn send_completed(&mut self) {
        let mut completed = std::mem::take(&mut self.completed);
        for request in &completed.requests {
            self.pending.end(Weight::of(request));
        }
        self.before_write();
        P::send_answers(self, &completed);
        completed.clear(MAX_KEPT);
        self.completed = completed;
    }

    /// Reads all bytes that wait in the socket, and confirms this to the read barrier. The barrier requests this
    /// reading shortly before a tick expires. Bytes that arrive after the request need not be read.
    ///
    /// During a stall of this process, the peer may have queued more bytes than the socket can hold. Therefore, within
    /// a second after a stall (`is_waking`), this function reads until the peer pauses. It also stops after
    /// [`WAKING_TIME`]: after the ticker has ended, `is_waking` stays `true`, and a peer that never pauses would be
    /// read forever.
    pub(super) async fn read_waiting(&mut self) {
        let clock = Arc::clone(&self.shared.clock);
        let (mut spent, mut last) = (Duration::ZERO, clock.now());
        while self.read_socket().await >= READ_SIZE && clock.is_waking() && spent < WAKING_TIME {
            // Count at most `SHORTEST_STALL` per round: while this process stalls, it does not read, so the peer can
            // send no more than the socket holds.
            let now = clock.now();
            spent += now.saturating_duration_since(last).min(SHORTEST_STALL);
            last = now;
            tokio::time::sleep(REFILL).await;
        }
        self.barrier.confirm_read();
    }

    /// Reads until no bytes wait in the socket, but at most about as many bytes as the socket can hold. Returns how
    /// many bytes it read.
    async fn read_socket(&mut self) -> usize {
        let all = self.stream.most_unread();
        let mut most = all;
        while self.is_listening() && most > 0 && self.has_room(usize::MAX) {
            let Some(event) = self.stream.read_waiting().await.transpose() else { break };
            if let Ok(IoEvent::Read(count)) = event {
                most = most.saturating_sub(count);
            }
            self.handle_io(event);
        }
        all - most
    }
}

fn bad_ack_timeout(ack_timeout_ticks: u16, slots: u16) -> Refusal {
    let text = format!(
        "an ack timeout of {ack_timeout_ticks} ticks is longer than the ring: ask for 1 to {slots} ticks, or leave it \
         out for the default of {slots}"
    );
    Refusal::new(Reason::BadAckTimeout, text)
}
