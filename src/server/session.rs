//! Serves one connection, from Welcome to its end.
//!
//! ```text
//!  serving ── GoAway, end of stream ──▶ ended ── all answers written ──▶ connection closed
//!     │                                                                        ▲
//!     └── Error that closes, lost connection ──▶ closing ── queue written ─────┘
//! ```

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio::time::Sleep;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::info;

use super::access::Grant;
use super::buffered_stream::BufferedStream;
use super::keep_alive::{Action, KeepAlive};
use super::pending_requests::{MAX_REQUESTS, PendingRequests};
use super::shared::{DRAIN_GRACE, MAX_CREDIT, Phase, Shared};
use crate::clock::stall_aware_timeout;
use crate::core::{Delivery as Delivered, Reason, Refusal, RequestBatch, Requester};
use crate::delivery::Subscription;
use crate::process::panics::contained;
use crate::protocol::Codec;
use crate::protocol::frame::{Body, Frame, FrameType, GoAwayReason, MAX_MESSAGES, Welcome};
use crate::ticker::read_barrier::Member;

/// How often a session with too many waiting requests checks whether the store is up. While the store is unreachable,
/// waiting Acks (DelMsg) do not count for the limit of waiting requests, so the session may read again. The session
/// must check this itself, because no event reports that the store became unreachable.
const STORE_CHECK: Duration = Duration::from_millis(100);

/// How long the peer may take to read the last queued bytes when the connection closes.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) stream: BufferedStream,
    phase: watch::Receiver<Phase>,
    /// The membership in the read barrier. Before a tick expires, the barrier asks all sessions to read what waits in
    /// their sockets, and waits for them.
    pub(super) barrier: Member,
    pub(super) state: State,
    /// The name and the rights of the connection.
    pub(super) grant: Grant,
    pub(super) keep_alive: KeepAlive,
    /// The timer for `keep_alive`. It fires no later than the next check is due.
    timer: Pin<Box<Sleep>>,
    /// Submits adds and dels to the rings.
    pub(super) requester: Requester,
    pub(super) pending: PendingRequests,
    /// Adds (AddNewMsg) and dels (DelMsg) that the store completed after the call that submitted them. Empty once they
    /// are answered.
    pub(super) completed: RequestBatch,
    /// The subscription, with the correlation id of its Subscribe.
    pub(super) subscription: Option<(u32, Subscription)>,
    /// Whether a Subscribe waits for the store.
    pub(super) is_subscribing: bool,
    /// Limits this connection to one group deletion at a time, because a deletion holds a lock that other connections
    /// may need. Closed when the connection ends, so that waiting deletions do not begin.
    pub(super) group_deletions: Arc<Semaphore>,
    /// The Error that ends the connection. It is sent after the answers to all earlier requests.
    pub(super) final_error: Option<(u32, Refusal)>,
    /// Bytes read since the session last yielded to other tasks of its thread.
    pub(super) read_since_yield: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Serving,
    /// The session no longer reads. It still answers the requests that wait for the store.
    Ended,
    /// The session writes all queued bytes, then closes the connection.
    Closing,
}

/// The part of an accepted Hello that the Welcome answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Greeting {
    pub(super) correlation: u32,
    /// The version of the protocol that the connection uses.
    pub(super) version: u8,
}

impl Session {
    /// Creates the session of an admitted client and queues its Welcome. `stream` may contain frames that followed the
    /// Hello.
    pub(super) fn new(
        mut stream: BufferedStream,
        greeting: Greeting,
        grant: Grant,
        shared: Arc<Shared>,
        phase: watch::Receiver<Phase>,
    ) -> Session {
        let (options, barrier) = (&shared.options, stream.join(&shared.read_barrier));
        stream.codec = Codec::new(options.max_frame_length);
        let welcome = Body::Welcome(welcome(&shared, greeting.version));
        let mut session = Session {
            stream,
            barrier,
            phase,
            state: State::Serving,
            grant,
            keep_alive: KeepAlive::new(shared.clock.stall_aware_now(), options.ping_interval),
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            requester: shared.rings.requester(),
            pending: PendingRequests::default(),
            completed: RequestBatch::default(),
            subscription: None,
            is_subscribing: false,
            group_deletions: Arc::new(Semaphore::new(1)),
            final_error: None,
            read_since_yield: 0,
            shared,
        };
        session.send(&Frame::new(greeting.correlation, welcome));
        session
    }

    /// Serves the peer until the connection ends. Holds `unanswered` until all queued bytes are written. While it is
    /// held, the shutdown knows that this connection still owes answers.
    pub(super) async fn run(mut self, unanswered: TaskTrackerToken) {
        self.change_phase();
        // The client may have sent requests together with its Hello.
        self.read_frames();
        while !self.is_over() {
            self.step().await;
        }
        drop(self.subscription.take());
        // The session no longer reads, so the read barrier must not wait for it.
        drop(self.barrier);
        self.group_deletions.close();
        if self.pending.is_waiting() {
            let metrics = Arc::clone(&self.shared.metrics);
            tokio::spawn(contained(self.pending.complete(self.requester, metrics)));
        }
        let _ = stall_aware_timeout(CLOSE_TIMEOUT, self.stream.close(unanswered)).await;
    }

    pub(super) fn is_over(&self) -> bool {
        match self.state {
            State::Closing => true,
            // After a failed write, no answer can be sent, so the session is over. `run` still completes the requests
            // that wait.
            State::Ended => {
                self.stream.write_failed
                    || !self.pending.is_waiting() && self.final_error.is_none() && self.stream.is_flushed()
            }
            State::Serving => false,
        }
    }

    pub(super) fn is_listening(&self) -> bool {
        self.state == State::Serving
    }

    pub(super) fn may_read(&self) -> bool {
        self.is_listening() && self.has_room() && self.stream.has_room()
    }

    fn has_room(&self) -> bool {
        self.pending.has_room(MAX_REQUESTS, || self.shared.store.is_up())
    }

    /// Reads and writes while the socket is ready. Then waits for the next event and handles it.
    async fn step(&mut self) {
        if !self.pending.is_waiting()
            && let Some((correlation, refusal)) = self.final_error.take()
        {
            return self.refuse(correlation, &refusal);
        }
        if !self.read_and_write().await {
            return;
        }
        let reading = self.may_read();
        if !reading {
            // While the session does not read, it cannot tell whether the peer is silent.
            self.keep_alive.received(self.shared.clock.stall_aware_now());
        }
        self.set_timer();
        let room_for_batches = self.stream.has_room_for_batches();
        tokio::select! {
            event = self.stream.read_or_write(reading) => self.handle_io(event),
            () = poll_fn(|context| self.requester.poll(context, &mut self.completed)) => self.send_completed(),
            Some(completed) = self.pending.next() => self.answer(completed),
            Some((correlation, delivery)) = next_batch(&mut self.subscription), if room_for_batches => {
                self.send_batch(correlation, &delivery);
            }
            () = self.barrier.read_requested() => self.read_waiting().await,
            changed = self.phase.changed(), if self.is_listening() => match changed {
                Ok(()) if *self.phase.borrow() != Phase::Closed => self.change_phase(),
                _ => {
                    // Read the requests that wait in the socket, so that they are still answered.
                    self.read_waiting().await;
                    if self.is_listening() {
                        self.end();
                    }
                }
            },
            () = self.timer.as_mut() => self.check_peer(),
        }
    }

    /// Sets the timer again if it would fire too late. A timer that fires too early has no effect, and costs less than
    /// setting the timer after every frame.
    fn set_timer(&mut self) {
        let next_check = self.keep_alive.next_check(self.stream.is_flushed());
        let mut wait = next_check.saturating_duration_since(self.shared.clock.stall_aware_now());
        if !self.has_room() {
            wait = wait.min(STORE_CHECK);
        }
        let wanted = tokio::time::Instant::from_std(self.shared.clock.now()) + wait;
        if self.timer.is_elapsed() || self.timer.deadline() > wanted {
            self.timer.as_mut().reset(wanted);
        }
    }

    /// Pings the peer or closes the connection, if this is due.
    fn check_peer(&mut self) {
        let (is_listening, stream) = (self.is_listening(), &self.stream);
        let has_unread = || is_listening && stream.has_unread();
        match self.keep_alive.check(self.shared.clock.stall_aware_now(), stream.is_flushed(), has_unread) {
            Action::Wait => {}
            Action::Ping => self.send(&Frame::new(0, Body::Ping(Vec::new()))),
            Action::Close(refusal) => self.refuse(0, &refusal),
        }
    }

    /// Closes the connection, because the memory budget has chosen it. Its buffers are dropped at once, with the answers
    /// in them. Sends an Error frame only if no other frame is half written.
    pub(super) fn close_over_budget(&mut self) {
        let refusal = Refusal::new(
            Reason::ConnectionMemory,
            "the buffers of all connections reached --max-connection-memory, and those of this connection were the \
             largest: read answers while sending, send smaller requests, or ask for less credit",
        );
        if self.stream.discard() {
            self.refuse(0, &refusal);
        } else {
            info!(%refusal, "connection closed");
            self.shared.metrics.refusals.of(refusal.reason).inc();
            self.stream.write_failed = true;
        }
        self.state = State::Closing;
    }

    /// Queues a frame.
    pub(super) fn send(&mut self, frame: &Frame) {
        self.before_write();
        self.shared.metrics.count_frame(frame.body.frame_type());
        self.stream.write(|codec, out| codec.encode_frame(frame, out));
    }

    fn send_batch(&mut self, correlation: u32, delivery: &Delivered) {
        self.before_write();
        self.shared.metrics.count_frame(FrameType::TimeoutBatch);
        self.stream.write(|codec, out| codec.encode_delivery(correlation, delivery, out));
    }

    /// Must be called each time before bytes are queued. If none are queued yet, starts the timeout of a slow reader.
    pub(super) fn before_write(&mut self) {
        if self.stream.is_flushed() {
            self.keep_alive.sent(self.shared.clock.stall_aware_now());
        }
    }

    fn change_phase(&mut self) {
        let phase = *self.phase.borrow_and_update();
        match phase {
            Phase::Serving => {}
            Phase::Draining => {
                let grace_ms = u32::try_from(DRAIN_GRACE.as_millis()).unwrap_or(u32::MAX);
                self.send(&Frame::new(0, Body::GoAway { reason: GoAwayReason::Draining, grace_ms }));
            }
            // The server closed while it accepted this connection.
            Phase::Closed => self.state = State::Ended,
        }
    }

    /// Stops reading, and ends the subscription. The session still answers the requests that wait.
    pub(super) fn end(&mut self) {
        self.state = State::Ended;
        self.subscription = None;
    }
}

/// Waits for the next batch of the subscription. Returns it with the correlation id of the Subscribe, or `None` if no
/// more batches come. Without a subscription, never resolves.
async fn next_batch(subscription: &mut Option<(u32, Subscription)>) -> Option<(u32, Delivered)> {
    let Some((correlation, subscription)) = subscription else { return std::future::pending().await };
    let delivery = subscription.next().await?;
    Some((*correlation, delivery))
}

/// Returns the Welcome of a connection that uses this version of the protocol.
fn welcome(shared: &Shared, version: u8) -> Welcome {
    let (wheel, options) = (shared.rings.wheel(), &shared.options);
    Welcome {
        version,
        slots: wheel.slots(),
        tick_ms: wheel.tick_ms(),
        max_frame_length: options.max_frame_length,
        max_messages: u32::try_from(MAX_MESSAGES).unwrap_or(u32::MAX),
        max_credit: MAX_CREDIT,
        ping_interval_ms: u32::try_from(options.ping_interval.as_millis()).unwrap_or(u32::MAX),
        store: String::from(shared.store.kind()),
        server_name: String::from(concat!("ackwheel/", env!("CARGO_PKG_VERSION"))),
    }
}
