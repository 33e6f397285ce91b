//! Handles every frame other than AddNewMsg and DelMsg, and sends refusals.

use std::sync::Arc;
use std::time::Duration;

use tracing::{Span, debug, info, warn};

use super::access::Peer;
use super::pending_requests::{Completed, Weight};
use super::session::{Session, State};
use super::shared::MAX_CREDIT;
use super::tokens::Right;
use crate::core::{BatchId, GroupNameError, GroupOptions, Reason, Refusal};
use crate::protocol::Codec;
use crate::protocol::frame::{Body, Frame, FrameType, Hello, MAX_MESSAGES, Subscribe, VERSIONS, Welcome};

impl Session {
    pub(super) fn handle_frame(&mut self, frame: Frame) {
        let Frame { correlation, body } = frame;
        let accepted = match body {
            Body::Hello(hello) if self.state == State::Greeting => self.hello(correlation, &hello),
            other if self.state == State::Greeting => {
                let found = other.frame_type().as_str();
                let text = format!("the first frame of a connection must be hello, but this one is {found}");
                Err(Refusal::new(Reason::HelloExpected, text))
            }
            Body::Ping(payload) => return self.send(&Frame::new(correlation, Body::Pong(payload))),
            // A Pong needs no answer. It only shows that the peer is alive, which the read has already recorded.
            Body::Pong(_) => return,
            Body::GoAway { .. } => return self.end(),
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

    /// Checks that the connection has the right that a request needs.
    pub(super) fn check_right(&self, right: Right) -> Result<(), Refusal> {
        self.admission.as_ref().map_or(Ok(()), |admission| admission.check(right))
    }

    /// Answers a request that the store has completed.
    pub(super) fn answer(&mut self, completed: Completed) {
        if matches!(completed, Completed::Subscribe(..)) {
            self.is_subscribing = false;
        }
        match completed {
            Completed::Answer(correlation, Ok(body)) => self.send(&Frame::new(correlation, body)),
            Completed::Subscribe(correlation, Ok(subscription)) => {
                let (group, created) = (subscription.group.to_string(), subscription.created);
                self.send(&Frame::new(correlation, Body::Subscribed { group, created }));
                if self.state == State::Serving && !self.stream.write_failed {
                    self.subscription = Some((correlation, subscription));
                }
            }
            Completed::Answer(correlation, Err(refusal)) | Completed::Subscribe(correlation, Err(refusal)) => {
                self.refuse(correlation, &refusal);
            }
            Completed::NotBegun => {}
        }
    }

    /// Refuses a request. Ends the connection if the reason requires this, or if no Hello has been accepted yet.
    pub(super) fn refuse(&mut self, correlation: u32, refusal: &Refusal) {
        if refusal.reason == Reason::Unauthorized {
            warn!("a client sent no token, or none of those in --token-file: give the client one of them");
        } else if let (Reason::TooManyAttempts, Peer::Tcp(address)) = (refusal.reason, self.peer) {
            warn!(%address, "too many wrong tokens from this address: find the client that sends them");
        } else if refusal.reason == Reason::UnsupportedVersion {
            warn!(%refusal, "a client that has no protocol version in common with this server is turned away");
        } else if refusal.reason.closes() && self.state != State::Greeting {
            info!(%refusal, "connection refused further service");
        } else {
            debug!(%refusal, "refused");
        }
        self.before_write();
        self.shared.metrics.refusals.of(refusal.reason).inc();
        self.shared.metrics.count_frame(FrameType::Error);
        self.stream.write(|codec, out| codec.encode_refusal(correlation, refusal, out));
        if refusal.reason.closes() || self.state == State::Greeting {
            self.state = State::Closing;
        }
    }

    /// Refuses bytes that are not a frame. If earlier requests still wait for the store, stops reading, and sends the
    /// refusal after their answers.
    pub(super) fn refuse_broken_frame(&mut self, correlation: u32, refusal: Refusal) {
        if self.pending.is_waiting() {
            self.end();
            self.final_error = Some((correlation, refusal));
        } else {
            self.refuse(correlation, &refusal);
        }
    }

    fn hello(&mut self, correlation: u32, hello: &Hello) -> Result<(), Refusal> {
        let shared = Arc::clone(&self.shared);
        let (first, last) = VERSIONS.into_inner();
        let Hello { lowest_version: lowest, highest_version: highest, .. } = *hello;
        if last.min(highest) < first.max(lowest) {
            let text = format!(
                "this server speaks versions {first} to {last} of the protocol, and the client {lowest} to {highest}: \
                 update the older one"
            );
            return Err(Refusal::new(Reason::UnsupportedVersion, text));
        }
        let (peer, certificate_name) = (self.peer, self.certificate_name.as_deref());
        let admission = shared.access.admit(&hello.token.0, peer, certificate_name, shared.clock.now())?;
        let (wheel, options) = (shared.rings.wheel(), &shared.options);
        let welcome = Welcome {
            version: last.min(highest),
            slots: wheel.slots(),
            tick_ms: wheel.tick_ms(),
            max_frame_length: options.max_frame_length,
            max_messages: u32::try_from(MAX_MESSAGES).unwrap_or(u32::MAX),
            max_credit: MAX_CREDIT,
            ping_interval_ms: u32::try_from(options.ping_interval.as_millis()).unwrap_or(u32::MAX),
            store: String::from(shared.store.kind()),
            server_name: String::from(concat!("ackwheel/", env!("CARGO_PKG_VERSION"))),
        };
        Span::current().record("client", &hello.client_name).record("name", admission.name.as_deref());
        self.admission = Some(admission);
        self.stream.codec = Codec::new(options.max_frame_length);
        self.state = State::Serving;
        self.keep_alive.greeted(shared.clock.stall_aware_now());
        self.send(&Frame::new(correlation, Body::Welcome(welcome)));
        Ok(())
    }

    fn subscribe(&mut self, correlation: u32, request: &Subscribe) -> Result<(), Refusal> {
        self.check_right(Right::Consume)?;
        if self.subscription.is_some() || self.is_subscribing {
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
        self.is_subscribing = true;
        self.pending.push(Weight::Other(0), async move {
            Completed::Subscribe(correlation, delivery.subscribe(group, credit, options).await)
        });
        Ok(())
    }

    fn batch_ack(&mut self, correlation: u32, batches: Vec<BatchId>) -> Result<(), Refusal> {
        self.check_right(Right::Consume)?;
        let (_, subscription) = self.subscription.as_ref().ok_or_else(not_subscribed)?;
        let (count, settled) = (batches.len(), subscription.ack(batches));
        self.pending.push(Weight::Other(count), async move {
            let settled = settled.await.map(|settled| u32::try_from(settled).unwrap_or(u32::MAX));
            Completed::Answer(correlation, settled.map(|settled| Body::BatchAckAnswer { settled }))
        });
        Ok(())
    }

    fn batch_nack(&mut self, correlation: u32, batch: BatchId, delay_ms: u32) -> Result<(), Refusal> {
        self.check_right(Right::Consume)?;
        let (_, subscription) = self.subscription.as_ref().ok_or_else(not_subscribed)?;
        let held = subscription.nack(batch, Duration::from_millis(u64::from(delay_ms)));
        self.pending.push(Weight::Other(0), async move {
            Completed::Answer(correlation, Ok(Body::BatchNackAnswer { held: held.await }))
        });
        Ok(())
    }

    fn group_delete(&mut self, correlation: u32, name: &str) -> Result<(), Refusal> {
        self.check_right(Right::Admin)?;
        let bad_name = |error: GroupNameError| Refusal::new(Reason::BadGroupName, error.to_string());
        let group = name.parse().map_err(bad_name)?;
        let (delivery, deletions) = (Arc::clone(&self.shared.delivery), Arc::clone(&self.group_deletions));
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

/// Returns the refusal to send for a first frame that cannot be decoded. Returns `refusal`, which is the refusal of the
/// decoder, if its reason closes the connection. Otherwise returns `HelloExpected`, because the first frame must be a
/// Hello.
pub(super) fn not_hello(refusal: Refusal) -> Refusal {
    if refusal.reason.closes() {
        return refusal;
    }
    let text = format!("the first frame of a connection must be hello, but this one is not: {}", refusal.text);
    Refusal::new(Reason::HelloExpected, text)
}
