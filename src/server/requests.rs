//! The hot path of a connection: reads bytes, submits the adds (AddNewMsg) and dels (DelMsg) in them to the rings in
//! one batch, and sends the answers.
//!
//! ```text
//!   read ──▶ submit_requests ──▶ submit ──▶ rings: completed in the call ──▶ send_answers ──▶ write
//!                                      ──▶ rings: completed later       ──▶ send_completed ──▶ write
//! ```

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tracing::debug;

use super::buffered_stream::{IoEvent, READ_SIZE};
use super::pending_requests::Weight;
use super::session::{Session, State};
use super::tokens::Right;
use crate::core::{Reason, Refusal, RequestBatch, SHORTEST_STALL, Submitted, WAKING_TIME};
use crate::process::panics;
use crate::protocol::codec::correlation_id;
use crate::protocol::frame::FrameType;
use crate::protocol::{DecodeError, Decoded};

/// How many reads and writes may follow each other before the session checks its other events.
const IO_ROUNDS: usize = 8;

/// How many bytes a connection reads before it yields to other tasks of its thread: about 4,000 message ids, whose
/// processing takes about half a millisecond.
const FAIR_SHARE: usize = READ_SIZE;

/// How many messages a request batch may hold before it is submitted. Large batches share the cost of locks and of
/// memory latency among their messages. Frames are not split, so the last frame may exceed this number.
const MAX_MESSAGES: usize = 4_096;

/// The limit for the memory that a thread keeps between two reads: a request batch with room for more messages than
/// this is freed.
const MAX_KEPT_BY_A_THREAD: usize = 4 * MAX_MESSAGES;

/// The same limit for `Session::completed`. It is smaller, because each connection has its own `completed`.
const MAX_KEPT: usize = 256;

/// The pause before an emptied socket is read again. A peer that has more to send fills the socket within this time.
const REFILL: Duration = Duration::from_millis(2);

thread_local! {
    /// The request batch that all connections of a thread share, so that an idle connection needs no batch. Each read
    /// takes the batch out and puts it back empty. If a connection panics, its batch is dropped with the connection.
    static BATCH: Cell<Option<Box<RequestBatch>>> = const { Cell::new(None) };
}

impl Session {
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
                self.read_frames();
            }
            Ok(IoEvent::Written) => self.keep_alive.sent(self.shared.clock.stall_aware_now()),
            // End the subscription, so that its batches go to subscribers that can still read.
            Ok(IoEvent::WriteFailed) => self.subscription = None,
            Ok(IoEvent::Ended) => self.end(),
            Ok(IoEvent::OverBudget) => self.close_over_budget(),
            Err(error) => {
                debug!(%error, "connection lost");
                self.state = State::Closing;
            }
        }
    }

    pub(super) fn read_frames(&mut self) {
        let now = self.shared.clock.now();
        while self.is_listening() {
            self.submit_requests(now);
            match self.stream.decode() {
                Ok(None) => break,
                Ok(Some(Decoded::Frame(frame))) => {
                    self.shared.metrics.count_frame(frame.body.frame_type());
                    self.handle_frame(frame);
                }
                Ok(Some(Decoded::Refused { correlation, refusal })) => {
                    self.refuse(correlation, &refusal);
                }
                Err(DecodeError { correlation, refusal }) => {
                    self.refuse_broken_frame(correlation, refusal);
                }
            }
        }
    }

    /// Submits the adds and dels at the front of the input, and answers the Pings between them. Stops at any other
    /// frame.
    fn submit_requests(&mut self, now: Instant) {
        let revolution = self.shared.rings.wheel().slots();
        self.before_write();
        let mut batch = BATCH.take().unwrap_or_default();
        loop {
            let echoed = self.stream.echo_pings();
            self.shared.metrics.count_frames(FrameType::Ping, echoed.pings);
            self.shared.metrics.count_frames(FrameType::Pong, echoed.pings + echoed.pongs);
            self.stream.take_requests(&mut batch, MAX_MESSAGES, revolution);
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
        let not_permitted = self.check_right(Right::Produce).err().map(Arc::new);
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
        self.shared.metrics.count_frames(FrameType::AddNewMsg, adds);
        self.shared.metrics.count_frames(FrameType::DelMsg, batch.requests.len() as u64 - adds);
        if not_permitted.is_some() {
            return self.send_answers(batch);
        }
        let submitted = {
            let _shared = panics::shared();
            self.requester.submit(batch, now)
        };
        match submitted {
            Submitted::Completed => self.send_answers(batch),
            Submitted::Pending => {
                batch.requests.iter().for_each(|request| self.pending.begin(Weight::of(request)));
            }
        }
    }

    /// Answers the requests that the store completed after the call that submitted them.
    pub(super) fn send_completed(&mut self) {
        let mut completed = std::mem::take(&mut self.completed);
        for request in &completed.requests {
            self.pending.end(Weight::of(request));
        }
        self.before_write();
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
                    let outcomes = &batch.outcomes()[request.range()];
                    self.stream.write(|codec, out| codec.encode_answer(request, outcomes, out));
                }
                Some(refusal) => self.refuse(correlation_id(request), refusal),
            }
        }
        self.shared.metrics.count_frames(FrameType::AddNewMsgAnswer, adds);
        self.shared.metrics.count_frames(FrameType::DelMsgAnswer, dels);
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
        while self.is_listening() && most > 0 && self.pending.has_room(usize::MAX, || self.shared.store.is_up()) {
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
        "an ack timeout of {ack_timeout_ticks} ticks is longer than the ring: ask for 1 to {slots} ticks, or 0 for \
         the default of {slots}"
    );
    Refusal::new(Reason::BadAckTimeout, text)
}
