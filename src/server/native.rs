//! The native protocol: its part of a session, from Welcome on.

use std::sync::Arc;

use tokio::sync::{Semaphore, watch};

use super::access::Grant;
use super::buffered_stream::BufferedStream;
use super::keep_alive::KeepAlive;
use super::pending_requests::Completion;
use super::session::{ClientProtocol, Session};
use super::shared::{DRAIN_GRACE, Phase, Shared};
use crate::core::{Delivery as Delivered, MAX_CREDIT, Refusal, RequestBatch};
use crate::delivery::{MEMBER_BYTES, Subscription};
use crate::protocol::Codec;
use crate::protocol::frame::{Body, Frame, FrameType, GoAwayReason, MAX_MESSAGES, Welcome};

/// The state of the native protocol.
pub(super) struct Native {
    /// The subscription, with the correlation id of its Subscribe.
    pub(super) subscription: Option<(u32, Subscription)>,
    /// Whether a Subscribe waits for the store.
    pub(super) is_subscribing: bool,
    /// Limits this connection to one group deletion at a time, because a deletion holds a lock that other connections
    /// may need. Closed when the connection ends, so that waiting deletions do not begin.
    pub(super) group_deletions: Arc<Semaphore>,
    /// The Error that ends the connection. It is sent after the answers to all earlier requests.
    pub(super) final_error: Option<(u32, Refusal)>,
}

/// The part of an accepted Hello that the Welcome answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Greeting {
    pub(super) correlation: u32,
    /// The version of the protocol that the connection uses.
    pub(super) version: u8,
}

/// The result of a request that waited for the store.
pub(super) enum Completed {
    Answer(u32, Result<Body, Refusal>),
    Subscribe(u32, Result<Subscription, Refusal>),
    /// The connection ended before the request was begun.
    NotBegun,
}

impl Completion for Completed {
    fn refusal(&self) -> Option<&Refusal> {
        match self {
            Completed::Answer(_, Err(refusal)) | Completed::Subscribe(_, Err(refusal)) => Some(refusal),
            _ => None,
        }
    }
}

impl Session<Native> {
    /// Creates the session of an admitted client and queues its Welcome.
    pub(super) fn welcome(
        mut stream: BufferedStream,
        greeting: Greeting,
        grant: Grant,
        shared: Arc<Shared>,
        phase: watch::Receiver<Phase>,
    ) -> Session<Native> {
        stream.codec = Codec::new(shared.options.max_frame_length);
        let keep_alive = KeepAlive::new(shared.clock.stall_aware_now(), shared.options.ping_interval);
        let welcome = Body::Welcome(welcome(&shared, greeting.version));
        let native = Native {
            subscription: None,
            is_subscribing: false,
            group_deletions: Arc::new(Semaphore::new(1)),
            final_error: None,
        };
        let mut session = Session::new(stream, grant, shared, phase, keep_alive, native);
        session.send(&Frame::new(greeting.correlation, welcome));
        session
    }

    /// Queues a frame.
    pub(super) fn send(&mut self, frame: &Frame) {
        self.before_write();
        self.shared.metrics.count_frame(frame.body.frame_type());
        self.stream.write(|codec, out| codec.encode_frame(frame, out));
    }
}

impl ClientProtocol for Native {
    type Completed = Completed;
    /// A batch of the subscription, with the correlation id of its Subscribe.
    type Event = (u32, Delivered);

    fn read_requests(session: &mut Session<Native>) {
        session.read_frames();
    }

    fn send_answers(session: &mut Session<Native>, batch: &RequestBatch) {
        session.send_answers(batch);
    }

    fn answer(session: &mut Session<Native>, completed: Completed) {
        session.answer(completed);
    }

    async fn next_event(&mut self) -> Option<(u32, Delivered)> {
        let Some((correlation, subscription)) = &mut self.subscription else {
            return std::future::pending().await;
        };
        let delivery = subscription.next().await?;
        Some((*correlation, delivery))
    }

    fn handle_event(session: &mut Session<Native>, (correlation, delivery): (u32, Delivered)) {
        session.before_write();
        session.shared.metrics.count_frame(FrameType::TimeoutBatch);
        session.stream.write(|codec, out| codec.encode_delivery(correlation, &delivery, out));
    }

    fn refuse_connection(session: &mut Session<Native>, refusal: &Refusal) {
        session.refuse(0, refusal);
    }

    fn stop_delivery(&mut self) {
        self.subscription = None;
    }

    fn bytes(&self) -> usize {
        usize::from(self.subscription.is_some()) * MEMBER_BYTES
    }

    fn ping(session: &mut Session<Native>) {
        session.send(&Frame::new(0, Body::Ping(Vec::new())));
    }

    fn announce_drain(session: &mut Session<Native>) {
        let grace_ms = u32::try_from(DRAIN_GRACE.as_millis()).unwrap_or(u32::MAX);
        session.send(&Frame::new(0, Body::GoAway { reason: GoAwayReason::Draining, grace_ms }));
    }

    fn send_last_answer(session: &mut Session<Native>) -> bool {
        let Some((correlation, refusal)) = session.protocol.final_error.take() else { return false };
        session.refuse(correlation, &refusal);
        true
    }

    fn owes_answers(&self) -> bool {
        self.final_error.is_some()
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        self.group_deletions.close();
    }
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
