//! The native protocol: handles every frame other than AddNewMsg and DelMsg, and sends refusals.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tracing::{debug, info};

use super::native::{Completed, Native};
use super::pending_requests::Weight;
use super::session::{Session, State};
use super::tokens::Right;
use crate::core::{BatchId, GroupNameError, GroupOptions, MAX_CREDIT, Message, Reason, Refusal};
use crate::protocol::frame::{Body, Frame, FrameType, Subscribe};

impl Session<Native> {
    pub(super) fn handle_frame(&mut self, frame: Frame) {
        let Frame { correlation, body } = frame;
        let accepted = match body {
            Body::Ping(payload) => return self.send(&Frame::new(correlation, Body::Pong(payload))),
            // A Pong needs no answer. It only shows that the peer is alive, which the read has already recorded.
            Body::Pong(_) => return,
            Body::GoAway { .. } => return self.end(),
            Body::GetMsg(messages) => return self.get_msg(correlation, messages),
            Body::Subscribe(request) => self.subscribe(correlation, &request),
            Body::BatchAck(batches) => self.batch_ack(correlation, batches),
            Body::BatchNack { batch, delay_ms } => self.batch_nack(correlation, batch, delay_ms),
            Body::GroupDelete(name) => self.group_delete(correlation, &name),
            other => {
                let text = format!("{} is not a request that a client can make here", other.frame_type().as_str());
                Err(Refusal::new(Reason::MalformedRequest, text))
            }
        };
        if let Err(refusal) = accepted {
            self.refuse(correlation, &refusal);
        }
    }

    /// Answers a request that the store has completed.
    pub(super) fn answer(&mut self, completed: Completed) {
        if matches!(completed, Completed::Subscribe(..)) {
            self.protocol.is_subscribing = false;
        }
        match completed {
            Completed::Answer(correlation, Ok(body)) => self.send(&Frame::new(correlation, body)),
            Completed::Subscribe(correlation, Ok(subscription)) => {
                let (group, created) = (subscription.group.to_string(), subscription.created);
                self.send(&Frame::new(correlation, Body::Subscribed { group, created }));
                if self.state == State::Serving && !self.stream.write_failed {
                    self.protocol.subscription = Some((correlation, subscription));
                }
            }
            Completed::Answer(correlation, Err(refusal)) | Completed::Subscribe(correlation, Err(refusal)) => {
                self.refuse(correlation, &refusal);
            }
            Completed::NotBegun => {}
        }
    }

    /// Refuses a request. Ends the connection if the reason requires this.
    pub(super) fn refuse(&mut self, correlation: u32, refusal: &Refusal) {
        if refusal.reason == Reason::Draining {
            self.announce_drain();
        }
        if refusal.reason.closes() {
            info!(%refusal, "connection refused further service");
            self.state = State::Closing;
        } else {
            debug!(%refusal, "refused");
        }
        self.before_write();
        self.shared.metrics.refusals.of(refusal.reason).inc();
        self.shared.metrics.count_frame(FrameType::Error);
        self.stream.write(|codec, out| codec.encode_refusal(correlation, refusal, out));
    }

    /// Refuses bytes that are not a frame. If earlier requests still wait for the store, stops reading, and sends the
    /// refusal after their answers.
    pub(super) fn refuse_broken_frame(&mut self, correlation: u32, refusal: Refusal) {
        if self.pending.is_waiting() {
            self.end();
            self.protocol.final_error = Some((correlation, refusal));
        } else {
            self.refuse(correlation, &refusal);
        }
    }

    /// Answers with the state of messages. Any token may ask.
    fn get_msg(&mut self, correlation: u32, messages: Vec<Message>) {
        let (rings, now, count) = (self.shared.rings.clone(), self.shared.clock.now(), messages.len());
        let mut get = Box::pin(async move {
            Completed::Answer(correlation, rings.get(messages, now).await.map(Body::GetMsgAnswer))
        });
        // A store in memory answers at once, before the next request changes something.
        match (&mut get).now_or_never() {
            Some(completed) => self.answer(completed),
            None => self.pending.push(Weight::Other(count), get),
        }
    }

    fn subscribe(&mut self, correlation: u32, request: &Subscribe) -> Result<(), Refusal> {
        self.grant.check(Right::Consume)?;
        if self.protocol.subscription.is_some() || self.protocol.is_subscribing {
            let text = "this connection already has a subscription: open another connection for a second one";
            return Err(Refusal::new(Reason::AlreadySubscribed, text));
        }
        if !(1..=MAX_CREDIT).contains(&request.credit) {
            let text = format!("a credit of {} is not possible: ask for 1 to {MAX_CREDIT}", request.credit);
            return Err(Refusal::new(Reason::BadCredit, text));
        }
        let group = match request.group.as_str() {
            "" if request.ephemeral => None,
            name => Some(name.parse().map_err(|error: GroupNameError| {
                let text = format!("{error}; only an ephemeral group may go without a name");
                Refusal::new(Reason::BadGroupName, text)
            })?),
        };
        let (credit, ephemeral) = (u64::from(request.credit), request.ephemeral);
        let options = GroupOptions { from_end: request.from_end || ephemeral, ephemeral };
        let delivery = Arc::clone(&self.shared.delivery);
        self.protocol.is_subscribing = true;
        self.pending.push(Weight::Other(0), async move {
            Completed::Subscribe(correlation, delivery.subscribe(group, credit, options).await)
        });
        Ok(())
    }

    fn batch_ack(&mut self, correlation: u32, batches: Vec<BatchId>) -> Result<(), Refusal> {
        self.grant.check(Right::Consume)?;
        let (_, subscription) = self.protocol.subscription.as_ref().ok_or_else(not_subscribed)?;
        let (count, settled) = (batches.len(), subscription.ack(batches));
        self.pending.push(Weight::Other(count), async move {
            let settled = settled.await.map(|settled| u32::try_from(settled).unwrap_or(u32::MAX));
            Completed::Answer(correlation, settled.map(|settled| Body::BatchAckAnswer { settled }))
        });
        Ok(())
    }

    fn batch_nack(&mut self, correlation: u32, batch: BatchId, delay_ms: u32) -> Result<(), Refusal> {
        self.grant.check(Right::Consume)?;
        let (_, subscription) = self.protocol.subscription.as_ref().ok_or_else(not_subscribed)?;
        let held = subscription.nack(batch, Duration::from_millis(u64::from(delay_ms)));
        self.pending.push(Weight::Other(0), async move {
            Completed::Answer(correlation, Ok(Body::BatchNackAnswer { held: held.await }))
        });
        Ok(())
    }

    fn group_delete(&mut self, correlation: u32, name: &str) -> Result<(), Refusal> {
        self.grant.check(Right::Admin)?;
        let bad_name = |error: GroupNameError| Refusal::new(Reason::BadGroupName, error.to_string());
        let group = name.parse().map_err(bad_name)?;
        let (delivery, deletions) =
            (Arc::clone(&self.shared.delivery), Arc::clone(&self.protocol.group_deletions));
        self.pending.push(Weight::Other(0), async move {
            let Ok(_turn) = deletions.acquire().await else { return Completed::NotBegun };
            Completed::Answer(correlation, delivery.delete_group(&group).await.map(|()| Body::GroupDeleteAnswer))
        });
        Ok(())
    }
}

fn not_subscribed() -> Refusal {
    Refusal::new(Reason::NotSubscribed, "this connection has no subscription: send Subscribe first")
}
