//! Serves one admitted connection to its end. The type parameter is the protocol that the client speaks.
//!
//! ```text
//!  serving ── end of stream, drain ──▶ ended ── all answers written ──▶ connection closed
//!     │                                                                       ▲
//!     └── error that closes, lost connection ──▶ closing ── queue written ────┘
//! ```

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Sleep;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::info;

use super::access::Grant;
use super::buffered_stream::BufferedStream;
use super::keep_alive::{Action, KeepAlive};
use super::pending_requests::{Completion, MAX_REQUESTS, PendingRequests};
use super::shared::{Phase, Shared};
use crate::clock::stall_aware_timeout;
use crate::core::{Reason, Refusal, RequestBatch, Requester};
use crate::process::panics::contained;
use crate::ticker::read_barrier::Member;

/// How often a session with too many waiting requests checks whether the store is up. While the store is unreachable,
/// waiting Acks (DelMsg) do not count for the limit of waiting requests, so the session may read again. The session
/// must check this itself, because no event reports that the store became unreachable.
const STORE_CHECK: Duration = Duration::from_millis(100);

/// How long the peer may take to read the last queued bytes when the connection closes.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A protocol of clients: how a session reads requests and writes answers.
pub(super) trait ClientProtocol: Sized + Send + 'static {
    /// The result of a request that waited for the store.
    type Completed: Completion + Send + 'static;
    /// An event of [`ClientProtocol::next_event`].
    type Event: Send;

    /// Handles the complete requests in the input.
    fn read_requests(session: &mut Session<Self>);

    /// Sends the answers to adds (AddNewMsg) and dels (DelMsg) that are complete.
    fn send_answers(session: &mut Session<Self>, batch: &RequestBatch);

    /// Answers a request that was added to [`Session::pending`] and is complete.
    fn answer(session: &mut Session<Self>, completed: Self::Completed);

    /// Waits for an event of the protocol, such as a batch to be sent. Never resolves if there is none. Cancel-safe.
    fn next_event(&mut self) -> impl Future<Output = Option<Self::Event>> + Send;

    /// Handles an event of [`ClientProtocol::next_event`].
    fn handle_event(session: &mut Session<Self>, event: Self::Event);

    /// Sends a refusal that ends the connection.
    fn refuse_connection(session: &mut Session<Self>, refusal: &Refusal);

    /// Ends waiting for batches, because the peer can get no more.
    fn stop_delivery(&mut self);

    /// Handles that the socket took bytes.
    fn written(_session: &mut Session<Self>) {}

    /// Handles that the peer sends no more.
    fn ended(session: &mut Session<Self>) {
        session.end();
    }

    /// Continues with what waited for room in the output, or for the end of another command.
    fn resume(_session: &mut Session<Self>) {}

    /// Returns the memory that the protocol holds for the connection, beside its buffers and its waiting requests.
    fn bytes(&self) -> usize;

    /// Sends a Ping.
    fn ping(_session: &mut Session<Self>) {}

    /// Tells the peer that the sidecar drains.
    fn announce_drain(_session: &mut Session<Self>) {}

    /// Sends the answer that must follow all others. Called while no request waits for the store, and the session no
    /// longer reads. Returns whether there was one.
    fn send_last_answer(_session: &mut Session<Self>) -> bool {
        false
    }

    /// Returns whether answers are not queued yet, although no request waits for the store.
    fn owes_answers(&self) -> bool;

    /// Returns whether the protocol itself can take another request. `max_requests` is the limit for the number of
    /// waiting requests.
    fn has_room(&self, _max_requests: usize) -> bool {
        true
    }
}

pub(super) struct Session<P: ClientProtocol> {
    pub(super) shared: Arc<Shared>,
    pub(super) stream: BufferedStream,
    phase: watch::Receiver<Phase>,
    /// Whether this session has told its peer that the sidecar drains. From then on it refuses adds.
    pub(super) is_draining: bool,
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
    pub(super) pending: PendingRequests<P::Completed>,
    /// Adds (AddNewMsg) and dels (DelMsg) that the store completed after the call that submitted them. Empty once they
    /// are answered.
    pub(super) completed: RequestBatch,
    /// Bytes read since the session last yielded to other tasks of its thread.
    pub(super) read_since_yield: usize,
    /// The state of the protocol.
    pub(super) protocol: P,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Serving,
    /// The session no longer reads. It still answers the requests that wait for the store.
    Ended,
    /// The session writes all queued bytes, then closes the connection.
    Closing,
}

impl<P: ClientProtocol> Session<P> {
    /// Creates the session of an admitted client. `stream` may contain requests that followed the greeting.
    pub(super) fn new(
        mut stream: BufferedStream,
        grant: Grant,
        shared: Arc<Shared>,
        phase: watch::Receiver<Phase>,
        keep_alive: KeepAlive,
        protocol: P,
    ) -> Session<P> {
        Session {
            barrier: stream.join(&shared.read_barrier),
            stream,
            phase,
            is_draining: false,
            state: State::Serving,
            grant,
            keep_alive,
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            requester: shared.rings.requester(),
            pending: PendingRequests::default(),
            completed: RequestBatch::default(),
            read_since_yield: 0,
            protocol,
            shared,
        }
    }

    /// Serves the peer until the connection ends. Holds `unanswered` until all queued bytes are written. While it is
    /// held, the shutdown knows that this connection still owes answers.
    pub(super) async fn run(mut self, unanswered: TaskTrackerToken) {
        self.change_phase();
        // The client may have sent requests together with its greeting.
        P::read_requests(&mut self);
        while !self.is_over() {
            self.step().await;
        }
        // Batches that are not acknowledged go back, and requests that wait for another one do not begin.
        drop(self.protocol);
        // The session no longer reads, so the read barrier must not wait for it.
        drop(self.barrier);
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
                    || !self.pending.is_waiting() && !self.protocol.owes_answers() && self.stream.is_flushed()
            }
            State::Serving => false,
        }
    }

    pub(super) fn is_listening(&self) -> bool {
        self.state == State::Serving
    }

    pub(super) fn may_read(&self) -> bool {
        self.is_listening() && self.has_room(MAX_REQUESTS) && self.stream.has_room()
    }

    /// Returns whether another request may be read. `max_requests` is the limit for the number of waiting requests.
    pub(super) fn has_room(&self, max_requests: usize) -> bool {
        self.pending.has_room(max_requests, || self.shared.store.is_up()) && self.protocol.has_room(max_requests)
    }

    /// Reads and writes while the socket is ready. Then waits for the next event and handles it.
    async fn step(&mut self) {
        if !self.pending.is_waiting() && !self.is_listening() && P::send_last_answer(self) {
            return;
        }
        if !self.read_and_write().await {
            return;
        }
        P::resume(self);
        self.charge();
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
            Some(completed) = self.pending.next() => P::answer(self, completed),
            Some(event) = self.protocol.next_event(), if room_for_batches => P::handle_event(self, event),
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

    /// Charges what the connection holds beside its buffers.
    pub(super) fn charge(&mut self) {
        self.stream.also_charged = self.pending.bytes() + self.protocol.bytes();
    }

    /// Sets the timer again if it would fire too late. A timer that fires too early has no effect, and costs less than
    /// setting the timer after every frame.
    fn set_timer(&mut self) {
        let next_check = self.keep_alive.next_check(self.stream.is_flushed());
        let mut wait = next_check.saturating_duration_since(self.shared.clock.stall_aware_now());
        if !self.has_room(MAX_REQUESTS) {
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
            Action::Ping => P::ping(self),
            Action::Close(refusal) => P::refuse_connection(self, &refusal),
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
            P::refuse_connection(self, &refusal);
        } else {
            info!(%refusal, "connection closed");
            self.shared.metrics.refusals.of(refusal.reason).inc();
            self.stream.write_failed = true;
        }
        self.state = State::Closing;
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
            Phase::Serving if self.grant.is_current() => {}
            Phase::Serving => {
                let text = "the token or the certificate name of this connection was withdrawn, or its rights changed: \
                            connect again";
                P::refuse_connection(self, &Refusal::new(Reason::AccessChanged, text));
            }
            Phase::Draining => {
                self.is_draining = true;
                P::announce_drain(self);
            }
            // The server closed while it accepted this connection.
            Phase::Closed => self.state = State::Ended,
        }
    }

    /// Tells the peer that the sidecar drains before anything is refused because of it.
    #[cold]
    pub(super) fn announce_drain(&mut self) {
        let is_new = self.phase.has_changed().unwrap_or(false);
        if is_new && *self.phase.borrow() == Phase::Draining {
            self.change_phase();
        }
    }

    /// Stops reading and taking batches. The session still answers the requests that wait.
    pub(super) fn end(&mut self) {
        self.state = State::Ended;
        self.protocol.stop_delivery();
    }
}
