//! Looking through all messages, where Redis has lost what says where some of them are: the list of a tick, or `late`.
//!
//! Each message has its deadline in its own entry too. So it goes back into the list of its tick before that is decided,
//! and none is early: the pointer waits meanwhile. Lost is what is in no list although all were looked at, and what was
//! decided and not yet published.

use std::time::Duration;

use tracing::{error, info, warn};

use crate::core::refusal::Refusal;
use crate::core::tick::Tick;
use crate::redis::connection::link::Session;
use crate::redis::leader::term::Term;
use crate::redis::ring::Inner;
use crate::redis::ring::repair_progress::Mending;
use crate::redis::scripts::SCRIPTS;

/// About so many messages are looked at in one script, which takes Redis about as long as a script of requests.
const LOOKED_AT: usize = 1_000;

/// While the pointer waits they are looked at for so long at a time, before the lease has its turn.
const AT_A_TIME: Duration = Duration::from_millis(50);

impl Inner {
    /// Looks at messages for a while.
    pub(super) async fn mend_for_a_while(&self, session: &Session, mut term: Term) -> Result<(), Refusal> {
        let clock = self.link.clock();
        let begun = clock.now();
        while term.mends.on_its_way.is_some() && clock.now().saturating_duration_since(begun) < AT_A_TIME {
            self.mend(session, term).await?;
            let Some(now) = self.office.term() else { break };
            term = now;
        }
        Ok(())
    }

    /// Looks at some more messages, if that is on its way.
    pub(super) async fn mend(&self, session: &Session, term: Term) -> Result<(), Refusal> {
        let Some(mut mending) = term.mends.on_its_way else { return Ok(()) };
        if mending.session != session.number {
            // Another server may be there, to which the cursor says nothing.
            (mending.session, mending.cursor) = (session.number, 0);
        }
        let keys = self.link.keys();
        let names: Vec<&str> = [&keys.messages].into_iter().chain(keys.lists()).map(String::as_str).collect();
        let asked = self.link.write_in(session, &SCRIPTS.mend, &names, |call| {
            call.arg(mending.cursor).arg(LOOKED_AT);
        });
        let mut answer = asked.await?;
        match answer.text()?.as_str() {
            "looked" => {
                mending.cursor = answer.count()?;
                mending.put_back += answer.count()?;
                mending.deleted += answer.count()?;
                self.office.note(term.epoch, |term| term.mends.on_its_way = Some(mending));
                if mending.cursor == 0 {
                    self.office.note(term.epoch, |term| term.mends.done(mending));
                    let Mending { put_back, deleted, .. } = mending;
                    info!(ring = self.options.ring, put_back, deleted, "all messages were looked through");
                }
                Ok(())
            }
            "denied" => {
                self.office.note(term.epoch, |term| {
                    (term.mends.on_its_way, term.mends.is_denied) = (None, true);
                });
                warn!(
                    ring = self.options.ring,
                    why = answer.text()?,
                    "messages whose list Redis has lost cannot be put back: give its user the commands that \
                     docs/REDIS.md lists"
                );
                Ok(())
            }
            word => Err(answer.strange(word).into()),
        }
    }

    /// Redis has lost what this leader did, without a rebuilt connection that would show it: the term ends, and what comes
    /// again has another epoch.
    pub(super) fn report_lost_moves(&self, what: &str, tick: Tick) {
        self.link.count_loss();
        error!(
            ring = self.options.ring,
            %tick,
            "Redis has lost {what} from this tick on: they come again under a new epoch, and some messages may be reported \
             twice; find out why Redis went back (a restored snapshot, a failover behind a proxy)"
        );
        self.office.leave();
    }

    /// Tells that so many messages are in the list of no tick.
    pub(super) fn tell_missing(&self, messages: u64) {
        self.link.count_loss();
        error!(
            ring = self.options.ring,
            messages,
            "messages in flight are in the list of no tick: Redis has lost its key (set maxmemory-policy noeviction), or \
             refused a script halfway. The wheel waits while all messages are looked through, and what is missing is \
             put back"
        );
    }

    /// Tells that so many messages are lost for good, if there are any.
    pub(super) fn tell_lost(&self, messages: u64) {
        if messages > 0 {
            self.link.count_loss();
            error!(
                ring = self.options.ring,
                messages,
                "messages are lost with the list of their tick: they come in no batch. Logic nodes add again what they \
                 still wait for"
            );
        }
    }
}
