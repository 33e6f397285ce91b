//! The hot path: all requests of a read, done together by a store that never waits.

use std::cell::RefCell;
use std::time::Instant;

use super::requests::bad_ack_timeout;
use super::session::{Session, State};
use crate::core::burst::{Asks, Burst};
use crate::protocol::frame::FrameType;

/// Messages done together at most: as many as share a lock and a wait for memory well. A frame that has more is
/// done by itself.
const MOST_MESSAGES: usize = 4_096;

thread_local! {
    /// Used again by every read of a thread, so that an idle connection has none.
    static BURST: RefCell<Burst> = RefCell::default();
}

impl Session {
    /// Deals with the frames at the front of what was read for as long as they are of the kinds that come most.
    pub(super) fn read_bursts(&mut self, now: Instant) {
        if self.state != State::Serving || self.shared.rings.at_once().is_none() {
            return;
        }
        self.will_write();
        BURST.with_borrow_mut(|burst| {
            loop {
                let pings = self.wire.echo_pings();
                if pings > 0 {
                    self.shared.metrics.count_frames(FrameType::Ping, pings);
                    self.shared.metrics.count_frames(FrameType::Pong, pings);
                }
                self.wire.take_requests(burst, MOST_MESSAGES);
                if !burst.is_empty() {
                    self.answer(burst, now);
                    burst.clear(MOST_MESSAGES);
                } else if pings == 0 {
                    break;
                }
            }
        });
    }

    fn answer(&mut self, burst: &mut Burst, now: Instant) {
        let shared = self.shared.clone();
        let slots = shared.rings.wheel().slots();
        let (mut adds, mut refused) = (0, 0);
        for request in &mut burst.requests {
            if let Asks::Add { ack_timeout_ticks, .. } = &mut request.asks {
                adds += 1;
                if *ack_timeout_ticks == 0 {
                    *ack_timeout_ticks = slots;
                } else if *ack_timeout_ticks > slots {
                    request.refusal = Some(Box::new(bad_ack_timeout(*ack_timeout_ticks, slots)));
                }
            }
        }
        let dels = burst.requests.len() as u64 - adds;
        shared.metrics.count_frames(FrameType::AddNewMsg, adds);
        shared.metrics.count_frames(FrameType::DelMsg, dels);
        if let Some(ring) = shared.rings.at_once() {
            ring.do_all(burst, now);
        }
        shared.metrics.count_burst(burst);
        for request in &burst.requests {
            match &request.refusal {
                None => self.wire.answer(request, &burst.outcomes()[request.range()]),
                Some(refusal) => {
                    refused += u64::from(matches!(request.asks, Asks::Add { .. }));
                    self.refuse(request.correlation, refusal);
                }
            }
        }
        shared.metrics.count_frames(FrameType::AddNewMsgAnswer, adds - refused);
        shared.metrics.count_frames(FrameType::DelMsgAnswer, dels);
    }
}
