//! The hot path of the RESP protocol: parses commands, collects adds and Acks into request batches, and runs the others.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Buf, BytesMut};
use futures_util::FutureExt;

use super::connection::{Action, Figures, unknown_command};
use super::deliveries::QueuedCommand;
use super::greeting::{Greeted, HTTP_REFUSED, is_http};
use super::replies::free_if_empty;
use super::{Completed, CompletedCommand, Read, Resp, SILENCE, encode_answer, reply};
use crate::core::{Message, Operation, Refusal, RequestBatch, Submitted};
use crate::protocol::resp::command::{Arguments, Command, Usage};
use crate::server::pending_requests::Weight;
use crate::server::requests::{BATCH, MAX_KEPT_BY_A_THREAD, MAX_MESSAGES};
use crate::server::session::{ClientProtocol, Session};
use crate::server::tokens::Right;

/// The largest memory, in messages, that a connection keeps for its next command.
const MAX_KEPT: usize = 256;

impl Session<Resp> {
    /// Handles the complete commands in the input. All adds and Acks that follow each other make one request batch.
    pub(super) fn read_commands(&mut self) {
        let now = self.shared.clock.now();
        let mut batch = BATCH.take().unwrap_or_default();
        let mut input = mem::take(self.stream.input());
        let mut begin = 0;
        self.protocol.transaction_ends = now + SILENCE;
        while self.is_listening() && self.has_room_for_replies() {
            match self.protocol.parser.parse(&input[begin..]) {
                Ok(None) => break,
                Ok(Some(length)) => {
                    self.read_command(&input[begin..begin + length], &mut batch, now);
                    begin += length;
                }
                Err(error) => {
                    self.submit_batch(&mut batch, now);
                    self.refuse_protocol(&error);
                }
            }
            if batch.messages().len() >= MAX_MESSAGES {
                self.submit_batch(&mut batch, now);
            }
        }
        self.submit_batch(&mut batch, now);
        BATCH.set(Some(batch));
        input.advance(begin);
        self.protocol.is_paused = !input.is_empty() && !self.has_room_for_replies();
        self.keep_alive.expect_rest(self.is_listening() && !input.is_empty() && !self.protocol.is_paused);
        self.stream.return_input(input);
    }

    /// Handles one command. If it is an add or an Ack, puts it into `batch`; otherwise submits `batch` first.
    fn read_command(&mut self, command: &[u8], batch: &mut RequestBatch, now: Instant) {
        let ranges = self.protocol.parser.take_arguments();
        let arguments = Arguments { bytes: command, ranges: &ranges };
        if let Some(name) = arguments.get(0) {
            self.protocol.deliveries.interrupt();
            if let Some(usage) = Usage::find(name).filter(|_| !self.protocol.connection.refuses_transaction) {
                self.parse(usage, arguments, batch, now);
            } else {
                self.submit_batch(batch, now);
                self.run_connection_command(arguments, now);
            }
        }
        self.protocol.parser.return_arguments(ranges);
    }

    fn parse(&mut self, usage: &Usage, arguments: Arguments<'_>, batch: &mut RequestBatch, now: Instant) {
        let mut messages = mem::take(&mut self.protocol.messages);
        match usage.parse(arguments, &mut messages) {
            Ok(Command::Requests(operation)) => self.push(operation, &messages, batch),
            Ok(command) => {
                self.submit_batch(batch, now);
                self.shared.metrics.resp_commands.of(usage.name).inc();
                if command == Command::Get {
                    self.begin_get(mem::take(&mut messages));
                } else if let Err(refusal) = self.begin_command(command) {
                    self.refuse(&refusal);
                }
            }
            Err(refusal) => {
                self.submit_batch(batch, now);
                self.shared.metrics.resp_commands.of(usage.name).inc();
                self.refuse(&refusal);
            }
        }
        if messages.capacity() <= MAX_KEPT {
            messages.clear();
            self.protocol.messages = messages;
        }
    }

    fn push(&mut self, operation: Operation, messages: &[Message], batch: &mut RequestBatch) {
        let operation = operation.with_default_timeout(self.shared.rings.wheel().slots());
        let number = self.protocol.replies.next() + batch.requests.len() as u64;
        match messages {
            [message] => batch.push_single(number, operation, *message),
            messages => batch.push(number, operation, messages.iter().copied()),
        }
    }

    fn submit_batch(&mut self, batch: &mut RequestBatch, now: Instant) {
        if batch.is_empty() {
            return;
        }
        self.before_write();
        let (submitted, adds) = self.submit(batch, now);
        let metrics = &self.shared.metrics;
        metrics.resp_commands.of("AW.ADD").inc_by(adds);
        metrics.resp_commands.of("AW.DEL").inc_by(batch.requests.len() as u64 - adds);
        if submitted == Submitted::Completed && self.protocol.replies.is_empty() {
            metrics.count_requests(batch);
            for request in &batch.requests {
                request.refusal.iter().for_each(|refusal| metrics.refusals.of(refusal.reason).inc());
                self.stream.write(|_, out| encode_answer(out, batch, request));
            }
        } else {
            self.protocol.in_store += batch.requests.len();
            for request in &batch.requests {
                let number = match request.operation {
                    Operation::Add { .. } => self.protocol.replies.wait(),
                    Operation::Del { .. } => self.protocol.replies.wait_for_acks(request.range().len(), now),
                };
                debug_assert_eq!(number, request.id, "the batch has the next numbers");
            }
            if submitted == Submitted::Completed {
                Resp::send_answers(self, batch);
            }
        }
        batch.clear(MAX_KEPT_BY_A_THREAD);
    }

    /// Begins an AW.GET once the store has answered all adds and Acks before it, so that it sees what they did.
    fn begin_get(&mut self, mut messages: Vec<Message>) {
        if self.protocol.in_store > 0 {
            messages.shrink_to_fit();
            return self.push_read(Read::Get(messages));
        }
        let number = self.protocol.replies.wait();
        self.read_states(number, messages);
        self.send_due();
    }

    /// Queues a command until its reply is the next one. So one connection has at most one status in memory.
    fn push_read(&mut self, read: Read) {
        let number = self.protocol.replies.wait();
        self.pending.begin(Weight::Queued(read.messages()));
        self.protocol.reads.push_back((number, read));
        self.send_due();
    }

    /// Begins the AW.GET or AW.STATUS whose reply is the next one, if there is one and the output has room. Returns
    /// whether it is complete.
    pub(super) fn begin_next_read(&mut self) -> bool {
        let first = self.protocol.replies.first();
        let is_next = self.protocol.reads.front().is_some_and(|(number, _)| *number == first);
        if !is_next || !self.stream.has_room() {
            return false;
        }
        let Some((number, read)) = self.protocol.reads.pop_front() else { return false };
        free_if_empty(&mut self.protocol.reads);
        self.pending.end(Weight::Queued(read.messages()));
        match read {
            Read::Get(messages) => self.read_states(number, messages),
            Read::Status => {
                let admission = Arc::clone(&self.protocol.admission);
                self.pending.push(Weight::Other(0), async move {
                    Completed { number, result: CompletedCommand::Status(admission.status().await) }
                });
                false
            }
        }
    }

    /// Reads the state of messages for the reply with this number. Returns whether the store has answered already.
    fn read_states(&mut self, number: u64, messages: Vec<Message>) -> bool {
        let (rings, now, count) = (self.shared.rings.clone(), self.shared.clock.now(), messages.len());
        let mut get = Box::pin(async move { rings.get(messages, now).await });
        // A store in memory answers at once, before the next command changes something.
        match (&mut get).now_or_never() {
            Some(states) => self.complete_get(number, states),
            None => self.pending.push(Weight::Other(count), async move {
                Completed { number, result: CompletedCommand::Get(get.await) }
            }),
        }
        self.protocol.replies.first() > number
    }

    fn begin_command(&mut self, command: Command) -> Result<(), Refusal> {
        let command = match command {
            Command::Requests(_) | Command::Get => unreachable!("they are begun elsewhere"),
            Command::Status => {
                self.push_read(Read::Status);
                return Ok(());
            }
            Command::Delivery(command) => QueuedCommand::Delivery(command),
        };
        self.grant.check(Right::Consume)?;
        self.push_delivery(command);
        Ok(())
    }

    fn run_connection_command(&mut self, arguments: Arguments<'_>, now: Instant) {
        self.shared.metrics.resp_commands.of("other").inc();
        if is_http(arguments) {
            tracing::warn!("{HTTP_REFUSED}");
            return self.end();
        }
        let mut out = BytesMut::new();
        let admission = Arc::clone(&self.protocol.admission);
        let mut ends = false;
        match self.protocol.connection.run(arguments, || Figures::of(&admission), &mut out) {
            Action::Replied => {}
            Action::Quit => ends = true,
            Action::Login(login) => {
                let Resp { client, connection, .. } = &mut self.protocol;
                match admission.access.admit(login.token, client, now) {
                    Ok(grant) => {
                        self.grant = grant;
                        connection.logged_in(login, &mut out);
                    }
                    Err(refusal) => {
                        self.shared.metrics.refusals.of(refusal.reason).inc();
                        ends = matches!(connection.refuse_login(&mut out, &refusal), Greeted::Closed(_));
                    }
                }
            }
            Action::Reset => {
                self.protocol.connection.reset();
                return self.push_delivery(QueuedCommand::Leave);
            }
            Action::Unknown => {
                reply::error(&mut out, &unknown_command(arguments));
                ends = self.protocol.parser.is_inline();
            }
        }
        self.reply(|to| to.extend_from_slice(&out));
        if ends {
            self.end();
        }
    }
}
