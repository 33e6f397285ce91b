//! One turn of a ticker. A turn maintains the lease, waits until connections have read Acks, moves the pointer, or
//! publishes expired messages.

use std::mem;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tracing::{debug, info, warn};

use super::{Role, Ticker};
use crate::core::{Advance, CLOCK_BEAT, Leadership, PublishStep, Refusal};

/// The pause after a refusal of the store.
const RETRY: Duration = Duration::from_millis(100);

/// The maximum time that a move or a drain waits for the connections to read, or half a tick if that is less. The
/// limit is below a tick, because a move that is late by a whole tick counts as a stall. A second wait for the same
/// move takes at most an eighth of this time.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// How long before a move the connections are asked to read, or an eighth of a tick if that is less.
const READ_AHEAD: Duration = Duration::from_millis(3);

/// How long before the read barrier the ring begins to list the messages of the tick that expires next. Listing a
/// million messages takes up to 1 ms, and the pauses take four times as long. So there is time for twenty million
/// messages.
const PRELIST_AHEAD: Duration = Duration::from_millis(100);

/// How long the ticker reclaims memory, or lists messages before a move, without a pause. A single step may take
/// longer.
const RECLAIM_BURST: Duration = Duration::from_micros(100);

/// The length of the pause after [`RECLAIM_BURST`], as a multiple of the time that was used. Without pauses, on a
/// machine with busy processors, a batch might be sent only after all memory is reclaimed.
const RECLAIM_PAUSES: u32 = 4;

impl Ticker {
    /// Does a step, and returns how long to wait before the next one. Logs when the store begins to refuse, and when
    /// it recovers.
    pub(super) async fn turn(&mut self) -> Duration {
        let now = self.clock.now();
        if now < self.resume_at {
            return self.resume_at - now;
        }
        let step = self.step().await;
        let now = self.clock.now();
        match step {
            Ok(wait) => {
                let tick_length = self.parts.ring.wheel().tick_length();
                if self.role != Role::Unknown && self.reports.is_recovery(tick_length, now) {
                    if self.role.is_leading() {
                        info!("the store answers again, and the pointer moves");
                    } else if self.role == Role::Follower {
                        info!("the store answers again; another sidecar may lead the ring");
                    }
                }
                wait
            }
            Err(refusal) => {
                self.reports.refusal(&refusal, RETRY, now);
                self.resume_at = now + RETRY;
                RETRY
            }
        }
    }

    /// Does the next step. Returns how long to wait before the step after that.
    async fn step(&mut self) -> Result<Duration, Refusal> {
        let now = self.clock.now();
        if self.role == Role::Resigned {
            return Ok(CLOCK_BEAT);
        }
        if let Some(wait) = self.maintain_lease(now).await? {
            return Ok(wait);
        }
        // The lease may have taken a while to answer.
        let now = self.clock.now();
        if now >= self.next_advance {
            self.advance().await?;
            return Ok(Duration::ZERO);
        }
        let wait = self.next_advance.saturating_duration_since(now);
        let before_reading = wait.saturating_sub(self.read_ahead());
        if before_reading.is_zero() && !self.has_read(now) {
            self.wait_until_read().await;
            return Ok(Duration::ZERO);
        }
        let wait = if before_reading.is_zero() { wait } else { before_reading };
        if self.expiring {
            let step = self.publish_expired().await?;
            self.expiring = step.more || step.deposed;
            if !step.reclaimed {
                return Ok(Duration::ZERO);
            }
            let took = self.clock.now().saturating_duration_since(now);
            return Ok(pause_after(took, &mut self.reclaim_time).min(wait.saturating_sub(took)));
        }
        Ok(if before_reading.is_zero() { wait } else { self.prelist(wait) })
    }

    /// Maintains the lease if it is time to do so. Returns `None` if this sidecar leads, otherwise the time to wait.
    async fn maintain_lease(&mut self, now: Instant) -> Result<Option<Duration>, Refusal> {
        let wait = self.next_lease_call.map(|at| at.saturating_duration_since(now));
        if wait != Some(Duration::ZERO) {
            return Ok(wait.filter(|_| !self.role.is_leading()));
        }
        match self.with_heartbeat(self.parts.lease.maintain(now)).await? {
            Leadership::Leads { epoch, renew_at } => {
                if self.last_epoch.replace(epoch) != Some(epoch) {
                    self.reports.metrics.leader_changes.inc();
                    self.expiring = true;
                    self.next_advance = now;
                    self.candidate_again_at = renew_at;
                } else if self.role == Role::Follower {
                    // The ring says that this sidecar does not lead, but the lease says that it does. The lease is
                    // maintained again after a pause.
                    self.role = Role::Unknown;
                    self.next_lease_call = Some(now + RETRY);
                    return Ok(Some(RETRY));
                }
                self.role = if renew_at.is_none() { Role::SoleLeader } else { Role::Leader };
                self.next_lease_call = renew_at;
                Ok(None)
            }
            Leadership::Follows { retry_after } => {
                if self.role.is_leading() {
                    // A notice that the lease may be free is outdated if it came while this sidecar led.
                    let _ = self.vacancy.notified().now_or_never();
                }
                self.role = Role::Follower;
                self.next_lease_call = Some(now + retry_after);
                Ok(Some(retry_after))
            }
        }
    }

    /// Becomes a follower because the ring says that this sidecar does not lead. The next step maintains the lease, at
    /// once unless the lease was lost soon after the election.
    fn follow(&mut self) {
        self.role = Role::Follower;
        let now = self.clock.now();
        self.next_lease_call = Some(self.candidate_again_at.map_or(now, |at| at.max(now)));
    }

    async fn advance(&mut self) -> Result<(), Refusal> {
        // Waits even if the move is not late. A stall may end just when the move is due, and then Acks wait unread
        // too.
        if !self.has_read(self.clock.now()) {
            self.wait_until_read().await;
        }
        match self.with_heartbeat(self.parts.ring.advance(self.clock.now())).await? {
            Advance::Waiting(until) => self.next_advance = until,
            Advance::Moved { expired, lateness, shifted, next } => {
                debug!(tick = %expired, ?lateness, "expired");
                self.next_advance = next;
                (self.expiring, self.prelisted) = (true, false);
                self.reports.shift(shifted);
            }
            Advance::Deposed => self.follow(),
        }
        Ok(())
    }

    /// Does a step of expiry, and records it.
    pub(super) async fn publish_expired(&mut self) -> Result<PublishStep, Refusal> {
        let step = self.with_heartbeat(self.parts.ring.publish_expired(self.clock.now())).await?;
        if let Some((tick, counts)) = step.counted {
            self.handle.record_tick(tick, counts);
        }
        self.reports.expiry_step(&step, &*self.parts.ring, self.clock.now());
        if step.deposed {
            self.follow();
        }
        Ok(step)
    }

    /// Lists messages of the tick that expires next, if it is time to do so. The next move or read barrier is due
    /// after `wait`. Returns how long to wait before the next step.
    fn prelist(&mut self, wait: Duration) -> Duration {
        if self.prelisted {
            return wait;
        }
        let early = wait.saturating_sub(PRELIST_AHEAD);
        if !early.is_zero() {
            return early;
        }
        let begun = self.clock.now();
        self.prelisted = !self.parts.ring.prelist();
        let took = self.clock.now().saturating_duration_since(begun);
        pause_after(took, &mut self.reclaim_time).min(wait.saturating_sub(took))
    }

    /// Returns how long before a move the connections are asked to read, so that the move is not late.
    fn read_ahead(&self) -> Duration {
        READ_AHEAD.min(self.parts.ring.wheel().tick_length() / 8)
    }

    /// Returns whether the connections have read recently enough for a move at `now`. This is so if the last read
    /// barrier ended less than twice [`Ticker::read_ahead`] ago.
    fn has_read(&self, now: Instant) -> bool {
        self.read_at.is_some_and(|read_at| now.saturating_duration_since(read_at) < self.read_ahead() * 2)
    }

    /// Waits until all connections have read the bytes in their sockets, or until the timeout.
    pub(super) async fn wait_until_read(&mut self) {
        let tick_length = self.parts.ring.wheel().tick_length();
        let begun = self.clock.now();
        // If the last wait for this move ended by its timeout, slow connections have used their time. The other
        // connections need only a moment.
        let is_recent = |read_at| begun.saturating_duration_since(read_at) < tick_length / 4;
        let is_again = self.read_timed_out && self.read_at.is_some_and(is_recent);
        let mut timeout = READ_TIMEOUT.min(tick_length / 2) / if is_again { 8 } else { 1 };
        let mut all_read = self.with_heartbeat(self.read_barrier.wait_until_read(timeout)).await;
        if all_read && self.clock.now().saturating_duration_since(begun) >= self.read_ahead() * 2 {
            // The round took long, as after a stall. In this time bytes may have arrived for connections that were
            // not asked.
            timeout /= 8;
            all_read = self.with_heartbeat(self.read_barrier.wait_until_read(timeout)).await;
        }
        self.read_timed_out = !all_read;
        if !all_read {
            warn!(
                "some connections were not read within {timeout:?} before a tick expired; if this repeats, the process \
                 is short of CPU: give it more, or raise --threads"
            );
        }
        // The time is recorded even after a timeout. Otherwise the move would wait, and be delayed, a second time.
        self.read_at = Some(self.clock.now());
    }
}

/// Adds `took`, the duration of a step, to `reclaim_time`, which is the duration of all steps since the last pause.
/// Returns the pause that is now necessary: zero if `reclaim_time` is below [`RECLAIM_BURST`].
fn pause_after(took: Duration, reclaim_time: &mut Duration) -> Duration {
    *reclaim_time += took;
    if *reclaim_time < RECLAIM_BURST { Duration::ZERO } else { mem::take(reclaim_time) * RECLAIM_PAUSES }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_steps_share_a_pause_and_a_long_one_has_its_own() {
        let mut reclaim_time = Duration::ZERO;
        let us = Duration::from_micros;
        let pauses = [1, 60, 38, 1, 99, 1, 250].map(|took| pause_after(us(took), &mut reclaim_time));
        assert_eq!(pauses, [0, 0, 0, 400, 0, 400, 1_000].map(us));
    }
}
