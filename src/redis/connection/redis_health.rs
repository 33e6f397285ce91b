//! Sends the commands of all links to one Redis, and detects from the answers whether Redis is reachable.
//!
//! A *link* connects this sidecar to the Redis of one ring. Redis serves its connections in turns. If Redis is busy,
//! one answer may take long, while others arrive all the time. So Redis counts as unreachable only if it answers
//! *nothing* for [`RESPONSE_TIMEOUT`] while requests wait. While an answer is late, this module sends *probes*, small
//! scripts on a separate connection. A probe is answered after one turn, even if the links have many requests in
//! flight.
//!
//! A connection can also die unnoticed, so that its answers never arrive. Then Redis still answers probes. If Redis has
//! answered several probes that were sent after a request, the connection of that request counts as lost.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use redis::RedisResult;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::clock::Clock;
use crate::clock::stall_aware_timeout;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::stall_detector::{StallDetector, Unanswered};
use crate::redis::options::RESPONSE_TIMEOUT;
use crate::redis::topology::nodes::Found;

/// Number of parts into which [`RESPONSE_TIMEOUT`] is divided. If this process pauses, only the current part ends, and
/// answers that arrived in the pause are read in the next part.
const PARTS: u32 = 4;

/// Minimum number of parts (1.5 s) after which an answer may count as lost. After 1.5 s, the next connection can still
/// renew a lease of 3 s in time.
const PARTS_UNTIL_LOST: u32 = 12;

/// If at least this many probes that were sent after a request are answered, the answer to the request may count as
/// lost. One probe does not suffice, because Redis may need several turns to read a long script.
const PROBES_UNTIL_LOST: u64 = 8;

/// Maximum time for the answer to a probe. If it takes longer, the next probe uses a new connection.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// The Redis servers that the links of this process use, by address.
#[derive(Default)]
pub(crate) struct RedisServers(Mutex<HashMap<String, Weak<RedisServer>>>);

impl RedisServers {
    /// Returns the server at the address of `found`. If no link uses it yet, starts the task that sends its probes.
    pub(crate) fn of(&self, found: &Found, clock: &Arc<Clock>) -> Arc<RedisServer> {
        let mut servers = self.0.lock();
        servers.retain(|_, server| server.strong_count() > 0);
        let address = found.to_string();
        if let Some(server) = servers.get(&address).and_then(Weak::upgrade) {
            return server;
        }
        let (stall_detector, late) = (Arc::<StallDetector>::default(), Arc::<Notify>::default());
        let probing = probe(found.clone(), Arc::clone(&stall_detector), Arc::clone(clock), Arc::clone(&late));
        let probing = AbortOnDropHandle::new(tokio::spawn(probing));
        let server = Arc::new(RedisServer { stall_detector, clock: Arc::clone(clock), late, _probing: probing });
        servers.insert(address, Arc::downgrade(&server));
        server
    }
}

/// One Redis server, shared by all links to the same address. A task sends its probes.
pub(crate) struct RedisServer {
    pub(crate) stall_detector: Arc<StallDetector>,
    clock: Arc<Clock>,
    /// Notified when an answer is late, so that the task sends a probe.
    late: Arc<Notify>,
    _probing: AbortOnDropHandle<()>,
}

impl RedisServer {
    /// Sends a request to this Redis and waits for its answer.
    pub(crate) async fn exchange<T>(&self, request: impl Future<Output = RedisResult<T>>) -> Result<T, Fault> {
        let unanswered = self.stall_detector.request_sent(self.clock.now());
        let answered = self.wait(&unanswered, request).await;
        let answered = answered.and_then(|answered| answered.map_err(Fault::from));
        let now = self.clock.now();
        match &answered {
            Err(Fault { kind: FaultKind::Timeout | FaultKind::Disconnected, .. }) => unanswered.given_up(now),
            _ => unanswered.answered(now),
        }
        answered
    }

    /// Waits for the answer to a request. Returns a fault if Redis is unreachable or the answer is lost.
    async fn wait<T>(&self, unanswered: &Unanswered<'_>, request: impl Future<Output = T>) -> Result<T, Fault> {
        let mut request = pin!(request);
        let mut wait = Wait { parts: 0, silent: 0, answers: unanswered.answers };
        loop {
            if let Ok(answered) = timeout(RESPONSE_TIMEOUT / PARTS, &mut request).await {
                return Ok(answered);
            }
            self.late.notify_one();
            wait.end_part(self.stall_detector.answers(), unanswered.later_probes())?;
        }
    }
}

/// The wait for the answer to one request, in parts.
#[derive(Debug)]
struct Wait {
    parts: u32,
    /// Number of parts in a row in which Redis answered no request.
    silent: u32,
    /// Number of answers of this Redis to any request, as counted at the end of the last part.
    answers: u64,
}

impl Wait {
    /// Ends a part of the wait. Returns a fault if the wait should end. `answers` is the number of answers of this
    /// Redis to any request. `later_probes` is the number of answered probes that were sent after the request.
    fn end_part(&mut self, answers: u64, later_probes: u64) -> Result<(), Fault> {
        self.parts += 1;
        self.silent = if answers == self.answers { self.silent + 1 } else { 0 };
        self.answers = answers;
        if self.silent == PARTS {
            return Err(Fault::new(FaultKind::Timeout, format!("no answer within {RESPONSE_TIMEOUT:?}")));
        }
        if self.parts >= PARTS_UNTIL_LOST && later_probes >= PROBES_UNTIL_LOST {
            let waited = RESPONSE_TIMEOUT / PARTS * self.parts;
            return Err(Fault::new(
                FaultKind::Disconnected,
                format!("the connection lost an answer: none within {waited:?}, while Redis answers others"),
            ));
        }
        Ok(())
    }
}

/// Sends a probe on a separate connection whenever `late` is notified. Never ends.
async fn probe(found: Found, stall_detector: Arc<StallDetector>, clock: Arc<Clock>, late: Arc<Notify>) {
    // This connection is opened before the first probe, because a busy Redis accepts new connections slowly.
    let mut connection = found.connect("probes", None).await.ok();
    // The probe is a script, because Redis answers a PING even while it pauses writes.
    let mut script = redis::cmd("EVAL");
    script.arg("return 1").arg(0);
    loop {
        late.notified().await;
        let Some(present) = &mut connection else {
            connection = found.connect("probes", None).await.ok();
            continue;
        };
        let unanswered = stall_detector.probe_sent(clock.now());
        let answered = stall_aware_timeout(PROBE_TIMEOUT, script.query_async::<()>(present)).await;
        // An error that Redis returns is an answer too. A lost connection or a timeout is none.
        let is_lost = |error| Fault::from(error).kind == FaultKind::Disconnected;
        if answered.is_some_and(|answered| !answered.is_err_and(is_lost)) {
            unanswered.answered(clock.now());
            stall_detector.probe_answered();
        } else {
            unanswered.given_up(clock.now());
            connection = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of the part that ends a wait, and the kind of the fault. `after` returns the numbers of
    /// answers and of later probes at the end of a part.
    fn ends(after: impl Fn(u32) -> (u64, u64)) -> Option<(u32, FaultKind)> {
        let mut wait = Wait { parts: 0, silent: 0, answers: 7 };
        (1..=1_000).find_map(|part| {
            let (answers, probes) = after(part);
            wait.end_part(7 + answers, probes).err().map(|fault| (part, fault.kind))
        })
    }

    #[test]
    fn a_redis_that_answers_nothing_is_unreachable() {
        assert_eq!(ends(|_| (0, 0)), Some((4, FaultKind::Timeout)));
        let answers_until_third = |part: u32| (u64::from(part.min(3)), 0);
        assert_eq!(ends(answers_until_third), Some((7, FaultKind::Timeout)));
    }

    #[test]
    fn a_redis_that_answers_others_is_slow_for_as_long_as_it_takes() {
        assert_eq!(ends(|part| (u64::from(part / 3), 0)), None);
        assert_eq!(ends(|part| (u64::from(part), 7)), None, "only seven probes are answered");
    }

    #[test]
    fn an_answer_is_lost_if_much_later_probes_are_answered() {
        assert_eq!(ends(|part| (u64::from(part), u64::from(part))), Some((12, FaultKind::Disconnected)));
        assert_eq!(ends(|part| (u64::from(part / 3), u64::from(part / 3))), Some((24, FaultKind::Disconnected)));
    }
}
