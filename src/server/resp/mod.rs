//! The RESP protocol: with it, every client library for Redis is a client of this sidecar.
//!
//! ```text
//!   bytes ── parser ──▶ command ──▶ AW.ADD, AW.DEL ──▶ request batch ──▶ rings ──▶ replies, in order ──▶ bytes
//!                          ├──▶ AW.TAKE, AW.ACK, AW.NACK ──▶ deliveries ──▶ group ──▶ ─┤
//!                          └──▶ PING, HELLO, … ─────────────────────────────────────────▶┘
//! ```
//!
//! Replies come in the order of the commands. Adds and Acks are submitted as they arrive, also while an earlier AW.TAKE
//! waits.

mod accept;
mod client_protocol;
mod command_info;
mod connection;
mod deliveries;
mod greeting;
mod replies;
mod reply;
mod requests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use bytes::BytesMut;
use tokio::sync::watch;

use self::connection::Connection;
use self::deliveries::{Deliveries, DeliveryReply, Outcome as DeliveryOutcome, QueuedCommand};
use self::greeting::{Greeted, Greeting, refuse_bytes};
use self::replies::Replies;
use super::access::{Client, Grant};
use super::admission::Admission;
use super::buffered_stream::BufferedStream;
use super::keep_alive::KeepAlive;
use super::pending_requests::{Completion, Weight};
use super::session::{Session, State};
use super::shared::{Phase, Shared};
use crate::core::{DelOutcome, Message, MessageState, Outcome, Reason, Refusal, Request, RequestBatch};
use crate::protocol::Codec;
use crate::protocol::frame::MAX_GREETING_LENGTH;
use crate::protocol::resp::parser::{Limits, Parser, ProtocolError};

/// A refused transaction ends once no byte has arrived for so long.
const SILENCE: Duration = Duration::from_secs(1);

/// How long a peer may leave replies unread, or half a command without its rest.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

// A connection that is not admitted reads no more than this.
const _: () = assert!(MAX_GREETING_LENGTH as usize == Limits::GREETING.command);

/// The state of the RESP protocol.
pub(super) struct Resp {
    admission: Arc<Admission>,
    client: Client,
    connection: Connection,
    parser: Parser,
    replies: Replies,
    deliveries: Deliveries,
    /// The number of adds and Acks that the store has not answered.
    in_store: usize,
    /// The AW.GET and AW.STATUS that wait for the replies before them, with the numbers of their own replies.
    reads: VecDeque<(u64, Read)>,
    /// When to look again whether Acks wait for a store that is unreachable.
    next_hold: Instant,
    /// When a refused transaction ends, unless bytes arrive before.
    transaction_ends: Instant,
    /// The messages of the command that is being parsed.
    messages: Vec<Message>,
    /// Whether the input has bytes that were not parsed, because too many bytes of replies wait.
    is_paused: bool,
}

/// A command that reads, and waits until its reply is the next one.
enum Read {
    Get(Vec<Message>),
    Status,
}

impl Read {
    fn messages(&self) -> usize {
        match self {
            Read::Get(messages) => messages.len(),
            Read::Status => 0,
        }
    }
}

/// The result of a command that waited.
pub(super) struct Completed {
    /// The number of its reply.
    number: u64,
    result: CompletedCommand,
}

enum CompletedCommand {
    Delivery(DeliveryReply),
    Get(Result<Vec<MessageState>, Refusal>),
    Status(Result<Bytes, Refusal>),
}

impl Completion for Completed {
    fn refusal(&self) -> Option<&Refusal> {
        match &self.result {
            CompletedCommand::Delivery(reply) => reply.refusal(),
            CompletedCommand::Get(states) => states.as_ref().err(),
            CompletedCommand::Status(status) => status.as_ref().err(),
        }
    }
}

impl Session<Resp> {
    /// Creates the session of an admitted client. `stream` may have its first commands.
    pub(super) fn resp(
        mut stream: BufferedStream,
        greeting: Greeting,
        client: Client,
        grant: Grant,
        shared: Arc<Shared>,
        phase: watch::Receiver<Phase>,
        admission: Arc<Admission>,
    ) -> Session<Resp> {
        // The codec limits only how much is read at a time.
        stream.codec = Codec::new(shared.options.max_frame_length);
        let keep_alive = KeepAlive::without_pings(shared.clock.stall_aware_now(), READ_TIMEOUT);
        let mut parser = greeting.parser;
        parser.set_limits(Limits::ADMITTED);
        let resp = Resp {
            admission,
            client,
            connection: greeting.connection,
            parser,
            replies: Replies::default(),
            deliveries: Deliveries::default(),
            in_store: 0,
            reads: VecDeque::new(),
            is_paused: false,
            transaction_ends: shared.clock.now() + SILENCE,
            messages: Vec::new(),
            next_hold: shared.clock.now(),
        };
        Session::new(stream, grant, shared, phase, keep_alive, resp)
    }

    /// Adds a reply behind all others.
    fn reply(&mut self, encode: impl FnOnce(&mut BytesMut)) {
        self.before_write();
        if self.protocol.replies.is_empty() {
            return self.stream.write(|_, out| encode(out));
        }
        let number = self.protocol.replies.wait();
        self.complete(number, encode);
    }

    /// Completes the reply with this number.
    fn complete(&mut self, number: u64, encode: impl FnOnce(&mut BytesMut)) {
        self.protocol.replies.complete(number, encode);
        self.send_due();
    }

    /// Queues the replies whose turn has come.
    fn send_due(&mut self) {
        loop {
            let due = self.protocol.replies.take_due();
            if !due.is_empty() {
                self.before_write();
                self.stream.write(|_, out| out.extend_from_slice(&due));
                let first = self.protocol.replies.first();
                self.protocol.deliveries.queued(first, self.stream.end_of_output());
            }
            if !self.begin_next_read() {
                break;
            }
        }
    }

    /// Returns whether the replies of further commands may be queued.
    fn has_room_for_replies(&self) -> bool {
        self.stream.has_room() && self.protocol.replies.waiting().1 < self.shared.options.max_queued_bytes
    }

    /// Ends the connection, because its bytes are not commands. The error follows all other replies.
    fn refuse_protocol(&mut self, error: &ProtocolError) {
        self.shared.metrics.refusals.of(Reason::MalformedFrame).inc();
        self.reply(|out| refuse_bytes(out, error));
        self.end();
    }

    /// Completes the reply of an AW.GET.
    fn complete_get(&mut self, number: u64, states: Result<Vec<MessageState>, Refusal>) {
        if let Err(refusal) = &states {
            self.shared.metrics.refusals.of(refusal.reason).inc();
        }
        self.protocol.replies.complete(number, |out| match states {
            Ok(states) => {
                reply::array(out, states.len());
                for state in states {
                    reply::state(out, state);
                }
            }
            Err(refusal) => reply::refusal(out, &refusal),
        });
    }

    /// Adds the reply of a refusal.
    fn refuse(&mut self, refusal: &Refusal) {
        self.shared.metrics.refusals.of(refusal.reason).inc();
        self.reply(|out| reply::refusal(out, refusal));
    }

    /// Queues an AW.TAKE, AW.ACK, AW.NACK or RESET. `ClientProtocol::resume` begins it.
    fn push_delivery(&mut self, command: QueuedCommand) {
        let number = self.protocol.replies.wait();
        self.pending.begin(Weight::Queued(command.batches()));
        self.protocol.deliveries.push(number, command);
    }

    /// Begins the next AW.TAKE, AW.ACK or AW.NACK, if none runs and there is room for its reply. The replies behind it
    /// wait for it, however many they are.
    fn begin_delivery(&mut self) {
        let Resp { replies, deliveries, .. } = &self.protocol;
        let has_room = deliveries.next() == Some(replies.first())
            || replies.waiting().1 < self.shared.options.max_queued_bytes / 2;
        if !has_room || !self.stream.has_room_for_batches() {
            return;
        }
        if let Some((number, batches, delivery)) = self.protocol.deliveries.begin(&self.shared.delivery) {
            self.pending.end(Weight::Queued(batches));
            self.pending.push(Weight::Other(batches), async move {
                Completed { number, result: CompletedCommand::Delivery(delivery.await) }
            });
        }
    }

    fn end_delivery(&mut self, number: u64, reply: DeliveryReply) {
        match self.protocol.deliveries.end(number, reply) {
            Ok(DeliveryOutcome::Taken(taken)) => self.complete(number, |out| {
                reply::array(out, taken.len());
                for delivery in &taken {
                    reply::delivery(out, delivery);
                }
            }),
            Ok(DeliveryOutcome::Count(count)) => self.complete(number, |out| reply::integer(out, count)),
            Ok(DeliveryOutcome::Left) => self.complete(number, |out| reply::simple(out, "RESET")),
            Err(refusal) => {
                self.shared.metrics.refusals.of(refusal.reason).inc();
                self.complete(number, |out| reply::refusal(out, &refusal));
            }
        }
        if self.state != State::Serving || self.stream.write_failed {
            self.protocol.deliveries.stop();
        }
    }
}

/// Writes the reply of a completed AW.ADD or AW.DEL.
fn encode_answer(out: &mut BytesMut, batch: &RequestBatch, request: &Request) {
    if let Some(refusal) = &request.refusal {
        return reply::refusal(out, refusal);
    }
    let outcomes = &batch.outcomes()[request.range()];
    if request.operation.is_add() {
        let rearmed = outcomes.iter().filter(|outcome| **outcome == Outcome::Rearmed).count();
        reply::array(out, 3);
        reply::integer(out, (outcomes.len() - rearmed) as u64);
        reply::integer(out, rearmed as u64);
        return reply::integer(out, request.deadline.0);
    }
    reply::array(out, outcomes.len());
    for outcome in outcomes {
        reply::bulk(out, DelOutcome::as_str(outcome.of_del()).as_bytes());
    }
}
