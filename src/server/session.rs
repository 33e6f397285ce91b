//! One connection: its life, its timers, its end. What its requests do stands in [`super::requests`].
//!
//! ```text
//!  accept ──▶ greeting ── Hello ──▶ serving ── GoAway, Error that closes, end of stream ──▶ closing
//!                │                     ▲  │
//!                └─ 5 s, no Hello ─▶   └──┘ requests, batches, pings
//! ```
//!
//! Silence and slowness are judged by the time that this process was alive, and only after the socket was
//! looked into: a stall on our side is not the peer's silence.

use std::future::poll_fn;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::{Semaphore, watch};
use tokio::time::Sleep;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::{Span, debug};

use super::pending::Pending;
use super::request_batches;
use super::stream::Stream;
use super::watching::first_patience;
use super::wire::{Event, READ_SIZE, Wire};
use super::{DRAIN_GRACE, Phase, Shared};
use crate::core::batch::Delivery as Delivered;
use crate::core::refusal::{Reason, Refusal};
use crate::core::request_batch::RequestBatch;
use crate::core::requester::Requester;
use crate::delivery::Subscription;
use crate::process::panics::contained;
use crate::protocol::Codec;
use crate::protocol::frame::{Body, Frame, FrameType, GoAway, GoAwayReason, MAX_GREETING_LENGTH};
use crate::ticker::read_barrier::Member;
use crate::ticker::stall_aware_timeout;

/// A connection that is not read because too much waits for the store looks this often whether the store has gone:
/// nothing else may happen to it for as long as that is away.
const DEAF_CHECK: Duration = Duration::from_millis(100);

/// Reads and writes that follow each other without a look at anything else.
const WIRE_ROUNDS: usize = 8;

/// Bytes after which a connection that has always more to say lets others have their turn: 4,000 ids, about half a
/// millisecond.
const FAIR_SHARE: usize = READ_SIZE;

/// How long the last words to a peer may take.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// The end of a request that had to wait.
pub(super) enum Done {
    Answer(Frame),
    Subscribed {
        correlation: u32,
        outcome: Result<Subscription, Refusal>,
    },
    /// It was not begun, and nobody is left to be told.
    Forgone,
}

impl Done {
    /// Why the request was refused, if it was.
    pub(super) fn refused(&self) -> Option<Reason> {
        match self {
            Done::Answer(Frame { body: Body::Error(error), .. }) => error.reason(),
            Done::Subscribed { outcome: Err(refusal), .. } => Some(refusal.reason),
            Done::Answer(_) | Done::Subscribed { .. } | Done::Forgone => None,
        }
    }
}

pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) wire: Wire,
    phase: watch::Receiver<Phase>,
    pub(super) read_barrier: Member,
    pub(super) state: State,
    /// Why the connection ends, once all that came before is answered.
    pub(super) last_word: Option<(u32, Refusal)>,
    /// Its way to the rings.
    pub(super) requester: Requester,
    pub(super) pending: Pending<Done>,
    /// Requests that were completed later; empty again once they are answered.
    pub(super) completed: RequestBatch,
    pub(super) subscription: Option<(u32, Subscription)>,
    /// Whether a Subscribe waits for the store.
    pub(super) subscribing: bool,
    /// Groups are deleted one after the other, for others wait meanwhile; closed at the end of the connection.
    pub(super) deleting: Arc<Semaphore>,
    /// When it was accepted, in time alive.
    pub(super) opened_at: Instant,
    /// When something was heard of the peer, in time alive.
    pub(super) heard_at: Instant,
    /// How long it may be silent before it is asked for a sign of life.
    pub(super) patience: Duration,
    /// Whether it was asked for one since something was heard.
    pub(super) pinged: bool,
    /// When it last took something, in time alive.
    pub(super) written_at: Instant,
    /// Bytes read since others had their turn.
    read: usize,
    /// Comes at the latest when the peer must be looked after.
    pub(super) timer: Pin<Box<Sleep>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Hello is awaited.
    Greeting,
    Serving,
    /// The peer sends no more; what is outstanding is answered.
    Ended,
    /// The last words are said.
    Closing,
}

impl Session {
    pub(super) fn new(stream: Stream, shared: Arc<Shared>, phase: watch::Receiver<Phase>) -> Session {
        let codec = Codec::new(MAX_GREETING_LENGTH);
        let now = shared.clock.alive();
        let read_barrier = shared.read_barrier.join(Some(stream.as_fd()));
        Session {
            wire: Wire::new(stream, read_barrier.taking(), codec, shared.options.max_queued_bytes),
            read_barrier,
            phase,
            state: State::Greeting,
            last_word: None,
            requester: shared.rings.requester(),
            pending: Pending::new(),
            completed: RequestBatch::default(),
            subscription: None,
            subscribing: false,
            deleting: Arc::new(Semaphore::new(1)),
            opened_at: now,
            heard_at: now,
            patience: first_patience(shared.options.ping_interval),
            pinged: false,
            written_at: now,
            read: 0,
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            shared,
        }
    }

    /// Serves the peer. Where it has all that was said to it, `unanswered` is dropped.
    pub(super) async fn run(mut self, unanswered: TaskTrackerToken) {
        if *self.phase.borrow_and_update() != Phase::Serving {
            self.phase_changed();
        }
        while !self.is_over() {
            self.step().await;
        }
        drop(self.subscription.take());
        // Nothing is read from here on, so the ticker need not wait for the good-bye.
        drop(self.read_barrier);
        self.deleting.close();
        if self.pending.is_waiting() {
            let outlive = request_batches::outlive(self.pending, self.requester, Arc::clone(&self.shared.metrics));
            tokio::spawn(contained(outlive));
        }
        // Whoever does not take the last words in time does not get them.
        let _ = stall_aware_timeout(CLOSE_PATIENCE, self.wire.close(unanswered)).await;
    }

    fn is_over(&self) -> bool {
        match self.state {
            State::Closing => true,
            // What it has asked for is done all the same.
            State::Ended => {
                self.wire.is_deaf()
                    || !self.pending.is_waiting() && self.last_word.is_none() && self.wire.is_flushed()
            }
            State::Greeting | State::Serving => false,
        }
    }

    pub(super) fn is_listening(&self) -> bool {
        matches!(self.state, State::Greeting | State::Serving)
    }

    /// Waits for the next thing to happen, and deals with it.
    async fn step(&mut self) {
        if !self.pending.is_waiting()
            && let Some((correlation, refusal)) = self.last_word.take()
        {
            return self.refuse(correlation, &refusal);
        }
        // Mostly the wire can go on at once: then it does, a few times, before anything else is asked.
        for _ in 0..WIRE_ROUNDS {
            if self.read >= FAIR_SHARE {
                // Others on this thread have waited for as long as that took; so has whatever else is to be done here.
                self.read = 0;
                tokio::task::yield_now().await;
                break;
            }
            let reading = self.is_listening() && self.has_room() && self.wire.has_room();
            let Some(event) = self.wire.progress(reading).now_or_never() else { break };
            self.wire_moved(event);
            if self.is_over() {
                return;
            }
        }
        let has_room = self.has_room();
        let reading = self.is_listening() && has_room && self.wire.has_room();
        if !reading {
            // Whoever is not listened to cannot be judged silent: also who has said that nothing more comes, and waits.
            self.heard();
        }
        let wait = self.next_check().saturating_duration_since(self.shared.clock.alive());
        self.wake_after(if has_room { wait } else { wait.min(DEAF_CHECK) });
        let room_for_batches = self.wire.has_room_for_batches();
        tokio::select! {
            event = self.wire.progress(reading) => self.wire_moved(event),
            () = poll_fn(|context| self.requester.poll(context, &mut self.completed)) => self.send_completed(),
            Some(done) = self.pending.next(), if !self.pending.is_empty() => self.finish(done),
            Some((correlation, delivery)) = next_batch(&mut self.subscription), if room_for_batches => {
                self.send_batch(correlation, &delivery);
            }
            () = self.read_barrier.asked() => self.read_waiting().await,
            changed = self.phase.changed(), if self.is_listening() => match changed {
                Ok(()) if *self.phase.borrow() != Phase::Closed => self.phase_changed(),
                _ => self.closed().await,
            },
            () = self.timer.as_mut() => self.check(),
        }
    }

    fn has_room(&self) -> bool {
        self.pending.has_room(|| self.shared.store.is_up())
    }

    pub(super) fn wire_moved(&mut self, event: std::io::Result<Event>) {
        match event {
            Ok(Event::Read(count)) => {
                self.read += count;
                self.heard();
                self.read_frames();
            }
            Ok(Event::Wrote) => self.written_at = self.shared.clock.alive(),
            // What it is handed reaches nobody: others are to have it.
            Ok(Event::Deaf) => self.subscription = None,
            Ok(Event::Ended) => self.end(),
            Err(error) => {
                debug!(%error, "connection lost");
                self.state = State::Closing;
            }
        }
    }

    /// Sends a frame.
    pub(super) fn send(&mut self, frame: &Frame) {
        self.will_write();
        self.shared.metrics.count_frame(frame.body.frame_type());
        self.wire.send(frame);
    }

    /// Something is about to be queued.
    pub(super) fn will_write(&mut self) {
        if self.wire.is_flushed() {
            self.written_at = self.shared.clock.alive();
        }
    }

    /// The peer is known: frames may be as long as the server accepts, batches may go out.
    pub(super) fn greeted(&mut self, client_name: &str) {
        Span::current().record("client", client_name);
        self.wire.accept_frames_of(self.shared.options.max_frame_length);
        self.state = State::Serving;
    }

    fn finish(&mut self, done: Done) {
        match done {
            Done::Answer(Frame { correlation, body: Body::Error(error) }) => {
                if let Some(reason) = error.reason() {
                    self.refuse(correlation, &Refusal::new(reason, error.text));
                }
            }
            Done::Answer(frame) => self.send(&frame),
            Done::Subscribed { correlation, outcome } => self.subscribed(correlation, outcome),
            Done::Forgone => {}
        }
    }

    fn send_batch(&mut self, correlation: u32, delivery: &Delivered) {
        self.will_write();
        self.shared.metrics.count_frame(FrameType::TimeoutBatch);
        self.wire.send_delivery(correlation, delivery);
    }

    fn phase_changed(&mut self) {
        let phase = *self.phase.borrow_and_update();
        match phase {
            Phase::Serving => {}
            Phase::Draining => {
                let grace_ms = u32::try_from(DRAIN_GRACE.as_millis()).unwrap_or(u32::MAX);
                let go_away = GoAway { reason: GoAwayReason::Draining, grace_ms };
                self.send(&Frame::new(0, Body::GoAway(go_away)));
            }
            // It came in the very moment; nothing was said yet.
            Phase::Closed => self.state = State::Ended,
        }
    }

    /// Nothing more is read and no batch handed out; what is outstanding is answered.
    pub(super) fn end(&mut self) {
        self.state = State::Ended;
        self.subscription = None;
    }
}

/// The next batch for a subscriber, `None` where it gets no more; never where there is no subscription.
async fn next_batch(subscription: &mut Option<(u32, Subscription)>) -> Option<(u32, Delivered)> {
    let Some((correlation, subscription)) = subscription else { return std::future::pending().await };
    let delivery = subscription.next().await?;
    Some((*correlation, delivery))
}
