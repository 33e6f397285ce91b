//! Carries out each request other than AddNewMsg and DelMsg, which are submitted together.

use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, info, warn};

use super::pending::Load;
use super::session::{Done, Session, State};
use crate::core::batch::BatchId;
use crate::core::outbox::Start;
use crate::core::refusal::{Reason, Refusal};
use crate::delivery::{SubscribeRequest, Subscription};
use crate::protocol::frame::{self, Body, Frame, FrameType, Hello, Subscribe, Subscribed, VERSIONS, Welcome};

impl Session {
    /// Deals with one frame of the peer.
    pub(super) fn request(&mut self, frame: Frame) {
        let Frame { correlation, body } = frame;
        if self.state == State::Greeting {
            return match body {
                Body::Hello(hello) => self.hello(correlation, &hello),
                other => self.refuse(correlation, &hello_expected(other.frame_type())),
            };
        }
        match body {
            Body::Ping(payload) => self.send(&Frame::new(correlation, Body::Pong(payload))),
            // A sign of life: that it came is all it says.
            Body::Pong(_) => {}
            Body::GoAway(_) => self.end(),
            Body::Subscribe(request) => self.subscribe(correlation, &request),
            Body::BatchAck(batches) => self.batch_ack(correlation, batches),
            Body::BatchNack(request) => self.batch_nack(correlation, &request),
            Body::GroupDelete(name) => self.group_delete(correlation, &name),
            other => {
                let kind = other.frame_type().as_str();
                let text = format!("{kind} is not a request that a client can make here");
                self.refuse(correlation, &Refusal::new(Reason::MalformedRequest, text));
            }
        }
    }

    /// Refuses a request, and ends the connection if the refusal says so.
    pub(super) fn refuse(&mut self, correlation: u32, refusal: &Refusal) {
        if refusal.reason == Reason::Unauthorized {
            warn!("a client showed another token than --token-file has, or none: give both the same");
        } else if refusal.reason == Reason::UnsupportedVersion {
            warn!(%refusal, "a client that this server does not understand is turned away");
        } else if refusal.reason.closes() && self.state != State::Greeting {
            info!(%refusal, "connection refused further service");
        } else {
            debug!(%refusal, "refused");
        }
        self.will_write();
        self.shared.metrics.count_refusal(refusal.reason);
        self.shared.metrics.count_frame(FrameType::Error);
        self.wire.send_refusal(correlation, refusal);
        if refusal.reason.closes() || self.state == State::Greeting {
            self.state = State::Closing;
        }
    }

    /// What was read is no frame. What came before it is answered first: its outcome is not that of the wrong frame.
    pub(super) fn broken(&mut self, correlation: u32, refusal: Refusal) {
        if self.pending.is_waiting() {
            self.end();
            self.last_word = Some((correlation, refusal));
        } else {
            self.refuse(correlation, &refusal);
        }
    }

    fn hello(&mut self, correlation: u32, hello: &Hello) {
        let shared = self.shared.clone();
        let (ours, theirs) = (VERSIONS, hello.lowest_version..=hello.highest_version);
        let version = (*ours.start()).max(*theirs.start());
        if !ours.contains(&version) || !theirs.contains(&version) {
            let text = format!(
                "this server speaks versions {} to {} of the protocol, and the client {} to {}: update the older one",
                ours.start(),
                ours.end(),
                theirs.start(),
                theirs.end()
            );
            return self.refuse(correlation, &Refusal::new(Reason::UnsupportedVersion, text));
        }
        if !shared.token.admits(&hello.token) {
            let text = if hello.token.is_empty() {
                "this server asks for a token: send the one in its --token-file"
            } else {
                "the token is not the one in the server's --token-file"
            };
            return self.refuse(correlation, &Refusal::new(Reason::Unauthorized, text));
        }
        let wheel = shared.rings.wheel();
        let (options, milliseconds) = (&shared.options, |time: Duration| u32::try_from(time.as_millis()));
        let welcome = Welcome {
            version: (*ours.end()).min(*theirs.end()),
            slots: wheel.slots(),
            tick_ms: wheel.tick_ms(),
            max_frame_length: options.max_frame_length,
            max_messages: u32::try_from(frame::MAX_MESSAGES).unwrap_or(u32::MAX),
            max_credit: options.max_credit,
            ping_interval_ms: milliseconds(options.ping_interval).unwrap_or(u32::MAX),
            store: String::from(shared.store.kind()),
            server_name: String::from(concat!("ackwheel/", env!("CARGO_PKG_VERSION"))),
        };
        self.greeted(&hello.client_name);
        self.send(&Frame::new(correlation, Body::Welcome(welcome)));
    }

    fn subscribe(&mut self, correlation: u32, request: &Subscribe) {
        let max_credit = self.shared.options.max_credit;
        if self.subscription.is_some() || self.subscribing {
            let text = "this connection has its subscription: open another connection for another one";
            return self.refuse(correlation, &Refusal::new(Reason::AlreadySubscribed, text));
        }
        if !(1..=max_credit).contains(&request.credit) {
            let text = format!("a credit of {} is not possible: ask for 1 to {max_credit}", request.credit);
            return self.refuse(correlation, &Refusal::new(Reason::BadCredit, text));
        }
        let group = match request.group.as_str() {
            "" if request.ephemeral => None,
            name => match name.parse() {
                Ok(group) => Some(group),
                Err(error) => {
                    let text = format!("{error}; only an ephemeral group may go without a name");
                    return self.refuse(correlation, &Refusal::new(Reason::BadGroupName, text));
                }
            },
        };
        let start = if request.from_end { Start::End } else { Start::Beginning };
        let request =
            SubscribeRequest { group, credit: u64::from(request.credit), ephemeral: request.ephemeral, start };
        let delivery = self.shared.delivery.clone();
        self.subscribing = true;
        self.pending.push(Load::Other(0), async move {
            Done::Subscribed { correlation, outcome: delivery.subscribe(request).await }
        });
    }

    pub(super) fn subscribed(&mut self, correlation: u32, outcome: Result<Subscription, Refusal>) {
        self.subscribing = false;
        match outcome {
            Ok(subscription) => {
                let answer = Subscribed { group: subscription.group.to_string(), created: subscription.created };
                self.send(&Frame::new(correlation, Body::Subscribed(answer)));
                if self.state == State::Serving && !self.wire.is_deaf() {
                    self.subscription = Some((correlation, subscription));
                }
            }
            Err(refusal) => self.refuse(correlation, &refusal),
        }
    }

    fn batch_ack(&mut self, correlation: u32, batches: Vec<BatchId>) {
        let Some((_, subscription)) = &self.subscription else {
            return self.refuse(correlation, &not_subscribed());
        };
        let (load, settled) = (Load::Other(batches.len()), subscription.ack(batches));
        self.pending.push(load, async move {
            let body = outcome(settled.await, |settled| Body::BatchAckAnswer {
                settled: u32::try_from(settled).unwrap_or(u32::MAX),
            });
            Done::Answer(Frame::new(correlation, body))
        });
    }

    fn batch_nack(&mut self, correlation: u32, request: &frame::BatchNack) {
        let Some((_, subscription)) = &self.subscription else {
            return self.refuse(correlation, &not_subscribed());
        };
        let held = subscription.nack(request.batch, Duration::from_millis(u64::from(request.delay_ms)));
        self.pending.push(Load::Other(0), async move {
            Done::Answer(Frame::new(correlation, Body::BatchNackAnswer { held: held.await }))
        });
    }

    fn group_delete(&mut self, correlation: u32, name: &str) {
        let group = match name.parse() {
            Ok(group) => group,
            Err(error) => {
                let error: crate::core::group::GroupNameError = error;
                return self.refuse(correlation, &Refusal::new(Reason::BadGroupName, error.to_string()));
            }
        };
        let (delivery, deleting) = (self.shared.delivery.clone(), Arc::clone(&self.deleting));
        self.pending.push(Load::Other(0), async move {
            let Ok(_turn) = deleting.acquire().await else { return Done::Forgone };
            let body = outcome(delivery.delete_group(&group).await, |()| Body::GroupDeleteAnswer);
            Done::Answer(Frame::new(correlation, body))
        });
    }
}

fn outcome<T>(outcome: Result<T, Refusal>, body: impl FnOnce(T) -> Body) -> Body {
    match outcome {
        Ok(answer) => body(answer),
        Err(refusal) => Body::Error(frame::Error::from(&refusal)),
    }
}

fn not_subscribed() -> Refusal {
    Refusal::new(Reason::NotSubscribed, "this connection has no subscription: send Subscribe first")
}

/// What a first frame is refused with that cannot be read.
pub(super) fn not_hello(refusal: Refusal) -> Refusal {
    if refusal.reason.closes() {
        return refusal;
    }
    let text = format!("the first frame of a connection is hello, and this is none: {}", refusal.text);
    Refusal::new(Reason::HelloExpected, text)
}

fn hello_expected(found: FrameType) -> Refusal {
    let text = format!("the first frame of a connection is hello, and this one is {}", found.as_str());
    Refusal::new(Reason::HelloExpected, text)
}
