//! A Redis as this process sees it: all links to it share whether it answers.
//!
//! Redis serves connections in turns. If it has much to do, an answer takes long, and yet others come all the time. So
//! Redis is unreachable only if *nothing* is heard of it for [`RESPONSE_TIMEOUT`] while something was asked. While an
//! answer is late, a probe on a connection of its own asks too: it waits for one turn, however much a link has in flight.
//!
//! An answer can also be lost alone: its connection has died unnoticed. Then probes that were sent later are answered
//! again and again, and the connection is of no use any more.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult};
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::clock::Clock;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::stall_detector::{StallDetector, Unanswered};
use crate::redis::options::{CONNECT_TIMEOUT, RESPONSE_TIMEOUT};
use crate::redis::topology::nodes::Found;
use crate::ticker::stall_aware_timeout;

/// [`RESPONSE_TIMEOUT`] is waited for in so many parts: a pause of this process takes away one of them.
const PARTS: u32 = 4;

/// After so many parts an answer may be lost, 1.5 s: a lease of 3 s is renewed in time by the next connection.
const PARTS_UNTIL_LOST: u32 = 12;

/// It is lost if so many probes that were sent later are answered: Redis reads a long script in several turns.
const PROBES_UNTIL_LOST: u64 = 8;

/// How long a probe may take before its connection is made anew.
const PROBE_PATIENCE: Duration = Duration::from_secs(2);

/// The Redis that links of this process speak to, by address.
#[derive(Default)]
pub(crate) struct Peers(Mutex<HashMap<String, Weak<Peer>>>);

impl Peers {
    pub(crate) fn of(&self, found: &Found, clock: &Arc<Clock>) -> Arc<Peer> {
        let mut peers = self.0.lock();
        peers.retain(|_, peer| peer.strong_count() > 0);
        let address = found.to_string();
        if let Some(peer) = peers.get(&address).and_then(Weak::upgrade) {
            return peer;
        }
        let peer = Arc::new(Peer::new(found.clone(), Arc::clone(clock)));
        peers.insert(address, Arc::downgrade(&peer));
        peer
    }
}

/// One Redis.
pub(crate) struct Peer {
    pub(crate) silence: Arc<StallDetector>,
    clock: Arc<Clock>,
    /// Told when an answer is late.
    late: Arc<Notify>,
    _probing: AbortOnDropHandle<()>,
}

impl Peer {
    fn new(found: Found, clock: Arc<Clock>) -> Peer {
        let (silence, late) = (Arc::new(StallDetector::default()), Arc::new(Notify::new()));
        let prober = Prober { found, silence: Arc::clone(&silence), clock: Arc::clone(&clock) };
        let wanted = Arc::clone(&late);
        let probing = tokio::spawn(async move { prober.run(&wanted).await });
        Peer { silence, clock, late, _probing: AbortOnDropHandle::new(probing) }
    }

    /// Waits for the answer to what is asked of this Redis.
    pub(crate) async fn exchange<T>(&self, asked: impl Future<Output = RedisResult<T>>) -> Result<T, Fault> {
        let unanswered = self.silence.asked(self.clock.now());
        let answered = self.answer(&unanswered, asked).await;
        let answered = answered.and_then(|answered| answered.map_err(Fault::from));
        let now = self.clock.now();
        match &answered {
            Err(Fault { kind: FaultKind::Timeout | FaultKind::Disconnected, .. }) => unanswered.given_up(now),
            _ => unanswered.answered(now),
        }
        answered
    }

    async fn answer<T>(&self, unanswered: &Unanswered<'_>, asked: impl Future<Output = T>) -> Result<T, Fault> {
        let mut asked = pin!(asked);
        let mut wait = Wait::begin(unanswered.answers);
        loop {
            if let Ok(answered) = timeout(RESPONSE_TIMEOUT / PARTS, &mut asked).await {
                return Ok(answered);
            }
            self.late.notify_one();
            wait.part_is_over(self.silence.answers(), unanswered.later_probes())?;
        }
    }
}

/// The wait for one answer.
#[derive(Debug)]
struct Wait {
    parts: u32,
    /// Parts since something was heard.
    silent: u32,
    /// Answers to anybody, when the last part ended.
    answers: u64,
}

impl Wait {
    fn begin(answers: u64) -> Wait {
        Wait { parts: 0, silent: 0, answers }
    }

    /// Another part has passed, and so many answers have come to anybody, and to later probes.
    fn part_is_over(&mut self, answers: u64, later_probes: u64) -> Result<(), Fault> {
        self.parts += 1;
        self.silent = if answers == self.answers { self.silent + 1 } else { 0 };
        self.answers = answers;
        if self.silent == PARTS {
            return Err(Fault::silent(RESPONSE_TIMEOUT));
        }
        if self.parts >= PARTS_UNTIL_LOST && later_probes >= PROBES_UNTIL_LOST {
            return Err(Fault::lost_answer(RESPONSE_TIMEOUT / PARTS * self.parts));
        }
        Ok(())
    }
}

/// Asks this Redis on a connection of its own, when it is told that an answer is late.
struct Prober {
    found: Found,
    silence: Arc<StallDetector>,
    clock: Arc<Clock>,
}

impl Prober {
    async fn run(&self, wanted: &Notify) {
        // It is there before it is needed: a busy Redis takes its time for a new one.
        let mut connection = self.connect().await;
        loop {
            wanted.notified().await;
            match &mut connection {
                Some(known) => {
                    if !self.is_answered(known).await {
                        connection = None;
                    }
                }
                None => connection = self.connect().await,
            }
        }
    }

    async fn connect(&self) -> Option<MultiplexedConnection> {
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(None);
        self.found.connect(&config, "probes").await.ok()
    }

    /// Whether a script that does nothing is answered, be it with an error. A Redis that takes no writes for a moment would
    /// answer a PING.
    async fn is_answered(&self, connection: &mut MultiplexedConnection) -> bool {
        let unanswered = self.silence.probed(self.clock.now());
        let mut script = redis::cmd("EVAL");
        script.arg("return 1").arg(0);
        let answered = stall_aware_timeout(PROBE_PATIENCE, script.query_async::<()>(connection)).await;
        let is_answered = answered.is_some_and(|answered| {
            answered.map_err(Fault::from).err().is_none_or(|fault| fault.kind != FaultKind::Disconnected)
        });
        if is_answered {
            unanswered.answered(self.clock.now());
            self.silence.probe_answered();
        } else {
            unanswered.given_up(self.clock.now());
        }
        is_answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which part of a wait ends it, and how, if after each part so many answers and later probes have come.
    fn ends(told: impl Fn(u32) -> (u64, u64)) -> Option<(u32, FaultKind)> {
        let mut wait = Wait::begin(7);
        (1..=1_000).find_map(|part| {
            let (answers, probes) = told(part);
            wait.part_is_over(7 + answers, probes).err().map(|fault| (part, fault.kind))
        })
    }

    #[test]
    fn a_redis_of_which_nothing_is_heard_is_unreachable() {
        assert_eq!(ends(|_| (0, 0)), Some((4, FaultKind::Timeout)));
        let heard_until_third = |part: u32| (u64::from(part.min(3)), 0);
        assert_eq!(ends(heard_until_third), Some((7, FaultKind::Timeout)));
    }

    #[test]
    fn a_redis_that_answers_others_is_slow_for_as_long_as_it_takes() {
        assert_eq!(ends(|part| (u64::from(part / 3), 0)), None);
        assert_eq!(ends(|part| (u64::from(part), 7)), None, "it has not had enough turns");
    }

    #[test]
    fn an_answer_is_lost_if_what_was_asked_much_later_is_answered() {
        assert_eq!(ends(|part| (u64::from(part), u64::from(part))), Some((12, FaultKind::Disconnected)));
        assert_eq!(ends(|part| (u64::from(part / 3), u64::from(part / 3))), Some((24, FaultKind::Disconnected)));
    }
}
