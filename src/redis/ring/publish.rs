//! Publishes the messages of expired ticks in batches, one batch for each call. After the timeout of a message, DelMsg
//! answers `late` for one revolution of the ring (one tick for each slot). Then this module deletes the message.

use std::time::Duration;

use crate::core::{PublishStep, Published, Refusal, Tick, TickCounts};
use crate::redis::connection::link::{Link, Session};
use crate::redis::leader::term::Term;
use crate::redis::ring::RedisRing;
use crate::redis::scripts::{Answer, SCRIPTS};

/// Maximum number of messages that one script publishes. The script also appends these messages to the Redis list
/// `late`, as one element. Such an element is called a chunk.
const MAX_PUBLISHED: usize = 1_000;

impl RedisRing {
    /// Publishes the next messages of the oldest expired tick. If all expired ticks are published, does one step of a
    /// repair or of the deletion of old messages: see `forget`.
    pub(super) async fn publish_next(&self) -> Result<PublishStep, Refusal> {
        let link @ Link { identity, term: current, .. } = &*self.link;
        let deposed = PublishStep { deposed: true, ..PublishStep::default() };
        let session = link.session()?;
        let Some(term) = current.in_session(session.number) else { return Ok(deposed) };
        if term.frozen == term.pointer {
            return self.forget(&session, term).await;
        }
        link.confirmed(&session)?;
        let keys = &link.keys;
        let keys = [&keys.lease, &keys.ticks, keys.list(term.frozen.0), &keys.outbox, &keys.late, &keys.news];
        let arguments = (&identity.token, term.epoch, term.frozen.0, term.seq, MAX_PUBLISHED);
        let (word, mut answer) = self.link.write_in(&session, &SCRIPTS.expire, &keys, arguments).await?;
        match word.as_str() {
            "published" => self.published(term, &mut answer),
            "expected" => {
                let (tick, seq, is_frozen) = (Tick(answer.count()?), answer.count()?, answer.count()? > 0);
                if (tick, seq) < (term.frozen, term.seq) {
                    self.report_lost_moves("batches that were published", tick);
                    return Ok(deposed);
                }
                current.update(term.epoch, |term| (term.frozen, term.seq) = (tick, seq));
                // The answer may contain the counts of the last tick that this sidecar has published completely. If
                // that tick is `term.frozen`, the answer to its last step was lost, so this call returns its counts.
                let counted =
                    if answer.is_empty() { None } else { Some((Tick(answer.count()?), counts(&mut answer)?)) };
                let counted = counted.filter(|(finished, _)| *finished == term.frozen);
                if is_frozen || counted.is_some() {
                    Ok(PublishStep { counted, more: true, ..PublishStep::default() })
                } else {
                    self.forget(&session, term).await
                }
            }
            "deposed" => {
                current.end();
                Ok(deposed)
            }
            word => Err(answer.strange(word).into()),
        }
    }

    fn published(&self, term: Term, answer: &mut Answer) -> Result<PublishStep, Refusal> {
        let (messages, is_last) = (answer.count()?, answer.count()? > 0);
        let lateness = Duration::from_millis(answer.count()?);
        let counts = counts(answer)?;
        self.report_lost(answer.count()?);
        self.link.term.update(term.epoch, |now| {
            (now.frozen, now.seq) = if is_last { (term.frozen.plus(1), 0) } else { (term.frozen, term.seq + 1) };
        });
        Ok(PublishStep {
            counted: is_last.then_some((term.frozen, counts)),
            published: (messages > 0).then_some(Published { messages, lateness: Some(lateness) }),
            more: true,
            ..PublishStep::default()
        })
    }

    /// Does one step of the current scan for missing messages. If there is no scan, deletes one chunk of messages for
    /// which DelMsg no longer answers `late`.
    async fn forget(&self, session: &Session, term: Term) -> Result<PublishStep, Refusal> {
        let repairing = PublishStep { more: true, reclaimed: true, ..PublishStep::default() };
        if self.repair(term.epoch).scan.is_some() {
            self.scan(session, term.epoch).await?;
            return Ok(repairing);
        }
        let link @ Link { options, .. } = &*self.link;
        let keys = &link.keys;
        let (word, answer) = link
            .write_in(session, &SCRIPTS.forget_late_messages, &[&keys.messages, &keys.late], MAX_PUBLISHED)
            .await?;
        match word.as_str() {
            "forgot" => Ok(PublishStep { more: true, ..PublishStep::default() }),
            "left over" if self.repair(term.epoch).may_tidy(term.pointer, options.wheel) => {
                self.repair(term.epoch).begin(false, term.pointer, term.session);
                Ok(repairing)
            }
            "idle" | "left over" => Ok(PublishStep::default()),
            word => Err(answer.strange(word).into()),
        }
    }
}

/// Reads the counts of a tick from an answer.
fn counts(answer: &mut Answer) -> Result<TickCounts, Refusal> {
    let (timed_out, acked, storm) = (answer.count()?, answer.count()?, answer.count()? > 0);
    Ok(TickCounts { added: timed_out + acked, acked, storm, drained: false })
}
