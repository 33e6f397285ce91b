//! How a connection is read: all that waits in its socket, before a decision and at the end, and frame by frame.

use std::sync::Arc;
use std::time::Duration;

use super::requests::not_hello;
use super::session::{Session, State};
use super::wire::READ_SIZE;
use crate::core::stall_aware_clock::{STALL, WAKING};
use crate::protocol::{DecodeError, Decoded};

/// How soon a socket that was emptied may have been filled again by a peer that had more to say.
const REFILL: Duration = Duration::from_millis(2);

impl Session {
    /// Reads all that waits in the socket, for the ticker; what a tireless sender adds meanwhile can wait. But where the
    /// process stood still, the peer may have sent more than the socket holds: that is read for as long as it comes, but
    /// no longer than a stall counts. (Once the ticker has ended nobody beats, and every moment is one after a stall.)
    pub(super) async fn read_waiting(&mut self) {
        let clock = Arc::clone(&self.shared.clock);
        let (mut spent, mut last) = (Duration::ZERO, clock.now());
        while self.read_socket().await >= READ_SIZE && clock.is_waking() && spent < WAKING {
            // A stall meanwhile is not time that the peer had.
            let now = clock.now();
            spent += now.saturating_duration_since(last).min(STALL);
            last = now;
            // The peer's system hears of the room that there is now.
            tokio::time::sleep(REFILL).await;
        }
        self.read_barrier.passed();
    }

    /// Reads as much as the socket can hold, if so much waits; returns how much it was.
    async fn read_socket(&mut self) -> usize {
        let all = self.wire.most_waiting();
        let mut most = all;
        while self.is_listening() && most > 0 && self.pending.has_room_for_messages(|| self.shared.store.is_up()) {
            match self.wire.read_waiting().await {
                Ok(None) => break,
                Ok(Some(event)) => {
                    most -= most.min(event.bytes_read());
                    self.wire_moved(Ok(event));
                }
                Err(error) => self.wire_moved(Err(error)),
            }
        }
        all - most
    }

    pub(super) fn read_frames(&mut self) {
        let now = self.shared.clock.now();
        while self.is_listening() {
            self.submit_requests(now);
            match self.wire.decode() {
                Ok(None) => break,
                Ok(Some(Decoded::Frame(frame))) => {
                    self.shared.metrics.count_frame(frame.body.frame_type());
                    self.request(frame);
                }
                Ok(Some(Decoded::Refused { correlation, refusal })) => {
                    let is_first = self.state == State::Greeting;
                    self.refuse(correlation, &if is_first { not_hello(refusal) } else { refusal });
                }
                Err(DecodeError::Broken { correlation, refusal }) => self.broken(correlation, refusal),
                Err(DecodeError::Io(error)) => return self.wire_moved(Err(error)),
            }
        }
    }

    /// The server closes: what has arrived is still answered.
    pub(super) async fn closed(&mut self) {
        self.read_waiting().await;
        if self.is_listening() {
            self.end();
        }
    }
}
