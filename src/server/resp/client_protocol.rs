//! RESP as the protocol of a session: what a session does with its requests, answers and events.

use std::time::Duration;

use tracing::info;

use super::{Completed, CompletedCommand, Read, Resp, SILENCE, encode_answer, reply};
use crate::core::{Message, Promise, Refusal, RequestBatch};
use crate::server::pending_requests::MAX_REQUESTS;
use crate::server::session::{ClientProtocol, Session, State};

/// How long an Ack waits for a store that is unreachable before it is answered with `held`.
const HOLD_AFTER: Duration = Duration::from_secs(1);

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
        // Replies that are due come first; those that wait for the store do not come. A client takes the refusal for the
        // first of them, whose command may be applied.
        let is_owed = session.protocol.owes_answers();
        let promise = if is_owed { Promise::OutcomeUnknown } else { refusal.reason.promise() };
        session.before_write();
        session.stream.write(|_, out| reply::refusal_with(out, refusal, promise));
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
            session.protocol.deliveries.stop();
            session.send_due();
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
