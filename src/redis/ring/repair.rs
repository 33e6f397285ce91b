//! Repairs tick sets that Redis has lost. A tick set is the Redis set of the messages with one deadline. A scan reads
//! all messages in the hash `messages`. If a message in flight is missing in its tick set, the scan puts it back.
//!
//! The entry of a message in `messages` contains its deadline, so the scan does not need the tick sets. The pointer,
//! which is the tick that expires next, does not move during the repair, so no tick expires before its messages are
//! back. A message is lost for good if its entry is lost too, or if its tick set is lost between expiry and publication:
//! the scan puts back only messages whose deadline has not expired.
//!
//! The Redis list `late` names timed-out messages whose entries must be deleted from `messages` later. If Redis loses a
//! part of `late`, the scan finds those entries by their old deadlines and deletes them.

use parking_lot::MutexGuard;
use tracing::{error, info, warn};

use crate::core::{Refusal, Tick};
use crate::redis::connection::link::Session;
use crate::redis::ring::RedisRing;
use crate::redis::ring::repair_state::{Repair, Scan};
use crate::redis::scripts::SCRIPTS;

/// Approximate number of messages that one script scans. Such a script takes Redis about as long as a script with adds
/// and dels.
const SCANNED: usize = 1_000;

impl RedisRing {
    /// Returns the state of the repair in the leadership term with this epoch. Discards the state of an earlier term.
    pub(super) fn repair(&self, epoch: u64) -> MutexGuard<'_, Repair> {
        let mut repair = self.repair.lock();
        if repair.epoch != epoch {
            *repair = Repair { epoch, ..Repair::default() };
        }
        repair
    }

    /// Does one step of the scan, if a scan is in progress.
    pub(super) async fn scan(&self, session: &Session, epoch: u64) -> Result<(), Refusal> {
        let (link, ring) = (&self.link, self.link.ring);
        let Some(mut scan) = self.repair(epoch).scan else { return Ok(()) };
        if scan.session != session.number {
            // A new session may be with another Redis server, where the cursor of the scan is invalid. So the scan
            // begins again.
            (scan.session, scan.cursor) = (session.number, 0);
        }
        let keys = link.keys.and_lists(&[&link.keys.messages]);
        let (word, mut answer) =
            self.link.write_in(session, &SCRIPTS.repair_messages, &keys, (scan.cursor, SCANNED)).await?;
        match word.as_str() {
            "looked" => {
                scan.cursor = answer.count()?;
                scan.put_back += answer.count()?;
                scan.deleted += answer.count()?;
                if scan.cursor > 0 {
                    self.repair(epoch).scan = Some(scan);
                } else {
                    self.repair(epoch).end(scan);
                    let Scan { put_back, deleted, .. } = scan;
                    info!(ring, put_back, deleted, "the scan of all messages has finished");
                }
                Ok(())
            }
            "denied" => {
                *self.repair(epoch) = Repair { epoch, is_denied: true, ..Repair::default() };
                warn!(
                    ring,
                    why = answer.text()?,
                    "messages are missing in their tick sets and cannot be put back: allow the Redis user of this \
                     sidecar the commands that docs/REDIS.md lists"
                );
                Ok(())
            }
            word => Err(answer.strange(word).into()),
        }
    }

    /// Logs that Redis has lost moves of the pointer or published batches, although the connection did not end. `lost`
    /// is the text that names the loss; `tick` is the first lost tick. Ends the leadership term. The ticks expire again
    /// after the next election, whose epoch distinguishes the new batches from the lost ones.
    pub(super) fn report_lost_moves(&self, lost: &str, tick: Tick) {
        self.link.count_loss();
        error!(
            ring = self.link.ring,
            %tick,
            "Redis has lost {lost} from this tick on: batches are published again under a new epoch, and some messages \
             may be reported twice; find out why Redis has older data (a restored snapshot, a failover behind a proxy)"
        );
        self.link.term.end();
    }

    /// Logs the number of messages in flight that are in no tick set.
    pub(super) fn report_missing(&self, messages: u64) {
        self.link.count_loss();
        error!(
            ring = self.link.ring,
            messages,
            "the lists of the ticks lack some messages in flight: Redis has lost keys (set maxmemory-policy \
             noeviction), or has stopped a script halfway. No tick expires while ackwheel scans all messages and puts \
             the missing ones back"
        );
    }

    /// Logs the number of messages that are lost for good. Logs nothing if `messages` is 0.
    pub(super) fn report_lost(&self, messages: u64) {
        if messages > 0 {
            self.link.count_loss();
            error!(
                ring = self.link.ring,
                messages,
                "messages are lost with the list of their tick: no batch will report them. Logic nodes must add \
                 those messages again that still need an Ack"
            );
        }
    }
}
