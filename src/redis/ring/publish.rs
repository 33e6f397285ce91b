//! Publishing the ticks that are decided, a part at a time, and forgetting what was late.

use std::time::Duration;

use crate::core::batch::TickCounts;
use crate::core::refusal::Refusal;
use crate::core::ring::{PublishStep, Published};
use crate::core::tick::Tick;
use crate::redis::connection::link::Session;
use crate::redis::leader::term::Term;
use crate::redis::ring::Inner;
use crate::redis::scripts::{Answer, SCRIPTS};

/// The most messages that one script publishes, as a chunk of what is late.
const MAX_PUBLISHED: usize = 1_000;

impl Inner {
    pub(super) async fn publish_expired(&self) -> Result<PublishStep, Refusal> {
        let session = self.link.session()?;
        let Some(term) = self.office.term_in(session.number) else {
            return Ok(PublishStep { deposed: true, ..PublishStep::default() });
        };
        if term.frozen == term.pointer {
            return self.forget(&session, term).await;
        }
        let keys = self.link.keys();
        let names =
            [keys.lease.as_str(), &keys.ticks, keys.list(term.frozen.0), &keys.outbox, &keys.late, &keys.news];
        self.link.confirmed(&session)?;
        let asked = self.link.write_in(&session, &SCRIPTS.expire, &names, |call| {
            self.term_arguments(call, term);
            call.arg(term.frozen.0).arg(term.seq).arg(MAX_PUBLISHED);
        });
        let mut answer = asked.await?;
        match answer.text()?.as_str() {
            "published" => self.published(term, &mut answer),
            "expected" => {
                let (tick, seq, is_frozen) = (Tick(answer.count()?), answer.count()?, answer.count()? > 0);
                if (tick, seq) < (term.frozen, term.seq) {
                    self.report_lost_moves("batches that were published", tick);
                    return Ok(PublishStep { deposed: true, ..PublishStep::default() });
                }
                self.office.note(term.epoch, |term| {
                    (term.frozen, term.seq) = (tick, seq);
                });
                // The tick that was asked about is finished: the answer that told was lost.
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
                self.office.leave();
                Ok(PublishStep { deposed: true, ..PublishStep::default() })
            }
            word => Err(answer.strange(word).into()),
        }
    }

    fn published(&self, term: Term, answer: &mut Answer) -> Result<PublishStep, Refusal> {
        let (messages, is_last) = (answer.count()?, answer.count()? > 0);
        let lateness = Duration::from_millis(answer.count()?);
        let counts = counts(answer)?;
        self.tell_lost(answer.count()?);
        self.office.note(term.epoch, |now| {
            (now.frozen, now.seq) = if is_last { (term.frozen.plus(1), 0) } else { (term.frozen, term.seq + 1) };
        });
        Ok(PublishStep {
            counted: is_last.then_some((term.frozen, counts)),
            published: (messages > 0).then_some(Published { messages, lateness: Some(lateness) }),
            more: true,
            ..PublishStep::default()
        })
    }

    async fn forget(&self, session: &Session, term: Term) -> Result<PublishStep, Refusal> {
        if term.mends.on_its_way.is_some() {
            self.mend(session, term).await?;
            return Ok(PublishStep { more: true, reclaimed: true, ..PublishStep::default() });
        }
        let keys = self.link.keys();
        let mut answer = self
            .link
            .write_in(session, &SCRIPTS.forget, &[&keys.messages, &keys.late], |call| {
                call.arg(MAX_PUBLISHED);
            })
            .await?;
        match answer.text()?.as_str() {
            "forgot" => Ok(PublishStep { more: true, ..PublishStep::default() }),
            "left over" if term.mends.may_tidy(term.pointer, self.options.wheel) => {
                self.office.note(term.epoch, |now| now.mends.begin(false, term.pointer, term.session));
                Ok(PublishStep { more: true, reclaimed: true, ..PublishStep::default() })
            }
            "idle" | "left over" => Ok(PublishStep::default()),
            word => Err(answer.strange(word).into()),
        }
    }
}

/// What a tick counted, as an answer tells it.
fn counts(answer: &mut Answer) -> Result<TickCounts, Refusal> {
    let (timed_out, acked, storm) = (answer.count()?, answer.count()?, answer.count()? > 0);
    Ok(TickCounts { added: timed_out + acked, acked, storm, drained: false })
}
