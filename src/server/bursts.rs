//! The hot path: all requests of a read, done together by a store that never waits, or taken over by one that
//! answers later, and all answers that come at the same time.

use std::cell::Cell;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Instant;

use super::pending::{Load, Pending};
use super::requests::bad_ack_timeout;
use super::session::{Done, Session, State};
use crate::core::answers::Answers;
use crate::core::burst::{Asks, Burst, Request};
use crate::metrics::Metrics;
use crate::panics;
use crate::protocol::frame::FrameType;

/// With so many messages a burst is done: as many as share a lock and a wait for memory well. A frame is not cut, so
/// the last one may bring more.
const MOST_MESSAGES: usize = 4_096;

/// Room for so many messages is kept from one burst of a thread to the next.
const MOST_KEPT_A_THREAD: usize = 4 * MOST_MESSAGES;

/// Room for so many messages is kept for the answers that come later: a connection has that for itself.
const MOST_KEPT: usize = 256;

thread_local! {
    /// Used again by every read of a thread, so that an idle connection has none. A read takes it out and puts it back
    /// empty: what a connection that panicked had in it goes with that connection.
    static BURST: Cell<Option<Box<Burst>>> = const { Cell::new(None) };
}

impl Session {
    /// Deals with the frames at the front of what was read for as long as they are of the kinds that come most.
    pub(super) fn read_bursts(&mut self, now: Instant) {
        let rings = &self.shared.rings;
        if self.state != State::Serving || rings.at_once().is_none() && rings.later().is_none() {
            return;
        }
        let slots = rings.wheel().slots();
        self.will_write();
        let mut burst = BURST.take().unwrap_or_default();
        loop {
            let echoed = self.wire.echo_pings();
            self.shared.metrics.count_frames(FrameType::Ping, echoed.pings);
            self.shared.metrics.count_frames(FrameType::Pong, echoed.pings + echoed.pongs);
            self.wire.take_requests(&mut burst, MOST_MESSAGES, slots);
            if !burst.is_empty() {
                self.answer(&mut burst, now);
                burst.clear(MOST_KEPT_A_THREAD);
            } else if echoed.bytes == 0 {
                break;
            }
        }
        BURST.set(Some(burst));
    }

    fn answer(&mut self, burst: &mut Burst, now: Instant) {
        let shared = self.shared.clone();
        let slots = shared.rings.wheel().slots();
        let mut adds = 0;
        for request in &mut burst.requests {
            adds += u64::from(request.asks.is_add());
            let ack_timeout_ticks = request.asks.ack_timeout_ticks();
            if ack_timeout_ticks > slots {
                request.refusal = Some(Arc::new(bad_ack_timeout(ack_timeout_ticks, slots)));
            }
        }
        shared.metrics.count_frames(FrameType::AddNewMsg, adds);
        shared.metrics.count_frames(FrameType::DelMsg, burst.requests.len() as u64 - adds);
        if let Some(ring) = shared.rings.at_once() {
            {
                let _shared = panics::shared();
                ring.do_all(burst, now);
            }
            self.send_answers(burst);
        } else if let Some(ring) = shared.rings.later() {
            for request in &burst.requests {
                self.pending.begin(load(request));
            }
            let _shared = panics::shared();
            ring.take_over(burst, self.asker, &self.answers);
        }
    }

    /// Sends the answers that came later.
    pub(super) fn send_answered(&mut self) {
        let mut answered = std::mem::take(&mut self.answered);
        for request in &answered.requests {
            self.pending.end(load(request));
        }
        self.will_write();
        self.send_answers(&answered);
        answered.clear(MOST_KEPT);
        self.answered = answered;
    }

    fn send_answers(&mut self, burst: &Burst) {
        self.shared.metrics.count_burst(burst);
        let (mut adds, mut dels) = (0, 0);
        for request in &burst.requests {
            match &request.refusal {
                None => {
                    adds += u64::from(request.asks.is_add());
                    dels += u64::from(!request.asks.is_add());
                    self.wire.answer(request, &burst.outcomes()[request.range()]);
                }
                Some(refusal) => self.refuse(request.correlation, refusal),
            }
        }
        self.shared.metrics.count_frames(FrameType::AddNewMsgAnswer, adds);
        self.shared.metrics.count_frames(FrameType::DelMsgAnswer, dels);
    }
}

/// Sees to the end what a connection that is gone has asked for: it is done all the same, and counts.
pub(super) async fn outlive(mut pending: Pending<Done>, answers: Arc<Answers>, metrics: Arc<Metrics>) {
    let mut answered = Burst::default();
    while pending.is_waiting() {
        tokio::select! {
            () = poll_fn(|context| answers.poll(context, &mut answered)) => {
                for request in &answered.requests {
                    pending.end(load(request));
                    request.refusal.iter().for_each(|refusal| metrics.count_refusal(refusal.reason));
                }
                metrics.count_burst(&answered);
                answered.clear(0);
            }
            Some(done) = pending.next(), if !pending.is_empty() => {
                done.refused().into_iter().for_each(|reason| metrics.count_refusal(reason));
            }
        }
    }
}

/// What a request counts for while it waits.
fn load(request: &Request) -> Load {
    let messages = request.range().len();
    match request.asks {
        Asks::Add { .. } => Load::Other(messages),
        Asks::Del { .. } => Load::Acks(messages),
    }
}
