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
use tracing::info;

use self::connection::Connection;
use self::deliveries::{Deliveries, DeliveryReply, Outcome as DeliveryOutcome, QueuedCommand};
use self::greeting::{Greeted, Greeting, refuse_bytes};
use self::replies::Replies;
use super::access::{Client, Grant};
use super::admission::Admission;
use super::buffered_stream::BufferedStream;
use super::keep_alive::KeepAlive;
use super::pending_requests::{Completion, MAX_REQUESTS, Weight};
use super::session::{ClientProtocol, Session, State};
use super::shared::{Phase, Shared};
use crate::core::{DelOutcome, Message, MessageState, Outcome, Reason, Refusal, Request, RequestBatch};
use crate::protocol::Codec;
use crate::protocol::frame::MAX_GREETING_LENGTH;
use crate::protocol::resp::parser::{Limits, Parser, ProtocolError};

/// How long an Ack waits for a store that is unreachable before it is answered with `held`.
const HOLD_AFTER: Duration = Duration::from_secs(1);

/// A refused transaction ends once no byte has arrived for so long.
const SILENCE: Duration = Duration::from_secs(1);

/// How long a peer may leave replies unread.
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

    /// Queues an AW.TAKE, AW.ACK, AW.NACK or RESET. [`ClientProtocol::resume`] begins it.
    fn push_delivery(&mut self, command: QueuedCommand) {
        let number = self.protocol.replies.wait();
        self.pending.begin(Weight::Queued(command.batches()));
        self.protocol.deliveries.push(number, command);
    }

    /// Begins the next AW.TAKE, AW.ACK or AW.NACK, if none runs and there is room for its reply.
    fn begin_delivery(&mut self) {
        let (_, bytes) = self.protocol.replies.waiting();
        if !self.stream.has_room_for_batches() || bytes > self.shared.options.max_queued_bytes / 2 {
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

impl ClientProtocol for Resp {
    type Completed = Completed;
    /// The first Acks have waited for the store for [`HOLD_AFTER`], or a refused transaction ends.
    type Event = ();

    fn read_requests(session: &mut Session<Resp>) {
        session.read_commands();
    }

    fn send_answers(session: &mut Session<Resp>, batch: &RequestBatch) {
        session.shared.metrics.count_requests(batch);
        session.protocol.in_store -= batch.requests.len();
        for request in &batch.requests {
            request.refusal.iter().for_each(|refusal| session.shared.metrics.refusals.of(refusal.reason).inc());
            session.protocol.replies.complete(request.id, |out| encode_answer(out, batch, request));
        }
        session.send_due();
    }

    fn answer(session: &mut Session<Resp>, completed: Completed) {
        match completed.result {
            CompletedCommand::Delivery(reply) => session.end_delivery(completed.number, reply),
            CompletedCommand::Status(Ok(json)) => {
                session.complete(completed.number, |out| reply::bulk(out, &json));
            }
            CompletedCommand::Get(states) => {
                session.complete_get(completed.number, states);
                session.send_due();
            }
            CompletedCommand::Status(Err(refusal)) => {
                session.shared.metrics.refusals.of(refusal.reason).inc();
                session.complete(completed.number, |out| reply::refusal(out, &refusal));
            }
        }
    }

    async fn next_event(&mut self) -> Option<()> {
        let hold = self.replies.first_acks().map(|(since, _)| (since + HOLD_AFTER).max(self.next_hold));
        let end = self.connection.refuses_transaction.then_some(self.transaction_ends);
        let Some(due) = hold.into_iter().chain(end).min() else { return std::future::pending().await };
        tokio::time::sleep_until(due.into()).await;
        Some(())
    }

    fn handle_event(session: &mut Session<Resp>, (): ()) {
        let now = session.shared.clock.now();
        // While the store only answers slowly, look again from time to time.
        session.protocol.next_hold = now + HOLD_AFTER / 10;
        while let Some((since, messages)) = session.protocol.replies.first_acks()
            && now.saturating_duration_since(since) >= HOLD_AFTER
            && !session.shared.store.is_up()
        {
            session.protocol.replies.hold_first(|out| {
                reply::array(out, messages);
                (0..messages).for_each(|_| reply::bulk(out, b"held"));
            });
        }
        session.send_due();
        if now >= session.protocol.transaction_ends {
            // Bytes that have arrived and are not parsed yet may belong to the transaction.
            let may_follow = session.protocol.is_paused || !session.may_read() || session.stream.has_unread();
            session.protocol.connection.refuses_transaction &= may_follow;
            session.protocol.transaction_ends = now + SILENCE;
        }
    }

    fn refuse_connection(session: &mut Session<Resp>, refusal: &Refusal) {
        info!(%refusal, "connection refused further service");
        session.state = State::Closing;
        session.shared.metrics.refusals.of(refusal.reason).inc();
        // Replies that are due come first; those that wait for the store do not come.
        session.before_write();
        session.stream.write(|_, out| reply::refusal(out, refusal));
    }

    fn stop_delivery(&mut self) {
        self.deliveries.stop();
    }

    fn written(session: &mut Session<Resp>) {
        session.protocol.deliveries.keep_written(session.stream.written());
        if session.state != State::Serving {
            session.protocol.deliveries.stop();
        }
        session.send_due();
    }

    fn resume(session: &mut Session<Resp>) {
        if session.stream.write_failed {
            session.protocol.deliveries.keep_nothing();
        }
        if session.protocol.is_paused && session.has_room_for_replies() {
            session.read_commands();
            if session.stream.has_ended() {
                Resp::ended(session);
            }
        }
        session.begin_delivery();
    }

    fn ended(session: &mut Session<Resp>) {
        if session.is_listening() && !session.protocol.is_paused {
            session.end();
        }
    }

    fn bytes(&self) -> usize {
        self.parser.bytes()
            + self.messages.capacity() * size_of::<Message>()
            + self.reads.capacity() * size_of::<(u64, Read)>()
            + self.replies.bytes()
            + self.deliveries.bytes()
    }

    fn owes_answers(&self) -> bool {
        !self.replies.is_empty()
    }

    fn has_room(&self, max_requests: usize) -> bool {
        let (replies, bytes) = self.replies.waiting();
        replies < max_requests.min(MAX_REQUESTS * 16) && bytes < self.admission.options.max_queued_bytes
    }
}
