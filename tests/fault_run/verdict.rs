//! Judges every message of a run and counts what was found, over all and by kind of fault.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::deliveries::{Deliveries, ring_and_tick};
use super::faults::Kind;
use super::history::{Breach, Deleted, History, Outcome, Request, Timeout, Wheel};
use super::ledger::{Answer, Ledger};
use super::timeline::{Acked, Timeline};

/// How long a batch may be on its way after one of a later tick: it is redelivered, and the sidecar may be paused meanwhile.
const ON_ITS_WAY: Duration = Duration::from_secs(10);

/// Longer than any run.
const A_DAY: Duration = Duration::from_secs(86_400);

/// How many broken promises are shown in full.
const SHOWN: usize = 3;

/// Counts over some messages.
#[derive(Clone, Debug)]
pub struct Counts {
    pub messages: u64,
    /// By the index of [`Breach::ALL`]: against the contract, and allowed by it.
    pub broken: [u64; 6],
    pub allowed: [u64; 6],
    pub late_ms: Histogram<u32>,
}

impl Default for Counts {
    fn default() -> Counts {
        let late_ms = Histogram::new(3).expect("three digits are possible");
        Counts { messages: 0, broken: [0; 6], allowed: [0; 6], late_ms }
    }
}

impl Counts {
    fn merge(&mut self, other: &Counts) {
        self.messages += other.messages;
        for breach in Breach::ALL {
            self.broken[breach as usize] += other.broken[breach as usize];
            self.allowed[breach as usize] += other.allowed[breach as usize];
        }
        self.late_ms.add(&other.late_ms).expect("both grow as they must");
    }
}

/// The verdict on a run.
#[derive(Debug, Default)]
pub struct Verdict {
    pub all: Counts,
    /// Timeouts with no fault from the AddNewMsg to the batch.
    pub steady: Counts,
    pub by_kind: HashMap<Kind, Counts>,
    /// The first broken promises, in words.
    pub shown: Vec<String>,
}

impl Verdict {
    pub fn merge(&mut self, other: Verdict) {
        self.all.merge(&other.all);
        self.steady.merge(&other.steady);
        for (kind, row) in &other.by_kind {
            self.by_kind.entry(*kind).or_default().merge(row);
        }
        self.shown.extend(other.shown);
        self.shown.truncate(SHOWN);
    }
}

/// When each batch arrived, and the batches of each message.
pub struct Timeouts {
    /// Each with whether that was as soon as it was published.
    arrived: Vec<(Instant, bool)>,
    by_id: HashMap<u64, Vec<(u32, u8)>>,
    /// For each ring: when its batches arrived, and of which tick they were, in the order of arrival.
    ticks: BTreeMap<u16, Vec<(Instant, u64)>>,
}

impl Timeouts {
    pub fn of(deliveries: &Deliveries) -> Timeouts {
        let mut timeouts = Timeouts { arrived: Vec::new(), by_id: HashMap::new(), ticks: BTreeMap::new() };
        for (key, batch) in &deliveries.batches {
            let (ring, tick) = ring_and_tick(key);
            timeouts.ticks.entry(ring).or_default().push((batch.arrived, tick));
        }
        timeouts.ticks.values_mut().for_each(|ticks| ticks.sort_unstable());
        for (number, batch) in (0..).zip(deliveries.batches.values()) {
            timeouts.arrived.push((batch.arrived, batch.is_prompt));
            for (id, attempt) in &batch.messages {
                timeouts.by_id.entry(*id).or_default().push((number, *attempt));
            }
        }
        timeouts
    }

    pub fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.by_id.keys().copied()
    }

    /// When a batch of a later tick than this one first arrived after a moment, in every ring. None if none arrived in one.
    /// After a restore a wheel may begin at an earlier tick than before.
    fn passed(&self, deadline: u64, after: Instant) -> Option<Instant> {
        let later = |ticks: &Vec<(Instant, u64)>| {
            let begin = ticks.partition_point(|(arrived, _)| *arrived < after);
            ticks[begin..].iter().find(|(_, tick)| *tick > deadline).map(|(arrived, _)| *arrived)
        };
        self.ticks.values().map(later).collect::<Option<Vec<Instant>>>()?.into_iter().max()
    }

    fn of_message(&self, id: u64, found: &mut Vec<Timeout>) {
        found.clear();
        let timeouts = self.by_id.get(&id).into_iter().flatten();
        found.extend(timeouts.map(|(batch, attempt)| {
            let (arrived, is_prompt) = self.arrived[*batch as usize];
            Timeout { attempt: *attempt, arrived, is_prompt }
        }));
    }
}

/// Judges the messages of one ledger.
pub struct Judge<'a> {
    pub wheel: Wheel,
    pub timeline: &'a Timeline,
    pub ledger: &'a Ledger,
    pub timeouts: &'a Timeouts,
}

impl Judge<'_> {
    pub fn judge(&self) -> Verdict {
        let mut verdict = Verdict::default();
        let mut kinds = Kinds::default();
        let mut timeouts = Vec::new();
        for index in self.ledger.indices() {
            self.timeouts.of_message(self.ledger.id(index), &mut timeouts);
            let requests = || self.ledger.requests(index);
            let from = requests().next().expect("a message was added").begun;
            let broken = if self.is_plainly_right(index, &timeouts) { None } else { self.check(index, &timeouts) };
            let is_lost = matches!(broken, Some((Breach::Lost, _)));
            let to = self.end(requests(), &timeouts, is_lost);
            let mut rows = AllCounts { verdict: &mut verdict, kinds: kinds.of(self.timeline, from, to) };
            rows.for_each(|row| row.messages += 1);
            if let Some((breach, why)) = broken {
                let latest = if breach == Breach::Lost { self.latest(index, to) } else { to };
                let allowed = self.timeline.allows(breach, from, latest, acked(requests(), &timeouts));
                rows.for_each(|row| {
                    let counts = if allowed { &mut row.allowed } else { &mut row.broken };
                    counts[breach as usize] += 1;
                });
                if !allowed && verdict.shown.len() < SHOWN {
                    let requests: Vec<Request> = requests().collect();
                    let id = self.ledger.id(index);
                    verdict.shown.push(format!("{id}: {breach:?}: {why}: {requests:#?} {timeouts:#?}"));
                }
            }
            self.record_lateness(requests(), &timeouts, &mut verdict, &mut kinds);
        }
        verdict
    }

    /// The latest moment at which a message that was lost may have been in flight, or in a batch on its way. Outages shift
    /// deadlines: a batch of a later tick shows that the tick of the message was published.
    fn latest(&self, index: u32, due: Instant) -> Instant {
        let added = self.ledger.requests(index).filter(|request| request.ack_timeout_ticks().is_some()).last();
        match (added, self.ledger.deadline(index)) {
            (Some(added), Some(deadline)) => {
                let passed = self.timeouts.passed(deadline, added.ended);
                passed.map_or(due + A_DAY, |passed| due.max(passed) + ON_ITS_WAY)
            }
            _ => due,
        }
    }

    /// The two commonest histories, without the search through all states.
    fn is_plainly_right(&self, index: u32, timeouts: &[Timeout]) -> bool {
        let mut answers = self.ledger.of(index);
        match (answers.next(), answers.next(), answers.next(), timeouts) {
            (Some((_, Answer::Added)), Some((_, Answer::Done)), None, []) => true,
            (Some((add, Answer::Added)), None, None, [Timeout { attempt: 1, arrived, .. }]) => {
                *arrived >= add.begun + self.wheel.ticks(add.ack_timeout_ticks.expect("it was added"))
            }
            _ => false,
        }
    }

    fn check(&self, index: u32, timeouts: &[Timeout]) -> Option<(Breach, String)> {
        let requests: Vec<Request> = self.ledger.requests(index).collect();
        let heard = |request: &Request| self.timeline.heard(request);
        History { wheel: self.wheel, requests: &requests, timeouts, heard: &heard }.check().err()
    }

    /// The end of a message's life: the last answer or batch, or the deadline of one that was lost.
    fn end(&self, requests: impl Iterator<Item = Request>, timeouts: &[Timeout], is_lost: bool) -> Instant {
        let ends = requests.map(|request| match request.ack_timeout_ticks() {
            Some(ticks) if is_lost => request.ended + self.wheel.ticks(ticks + 1),
            _ => request.ended,
        });
        ends.chain(timeouts.iter().map(|timeout| timeout.arrived)).max().expect("a message was added")
    }

    fn record_lateness(
        &self,
        requests: impl Iterator<Item = Request>,
        timeouts: &[Timeout],
        verdict: &mut Verdict,
        kinds: &mut Kinds,
    ) {
        if timeouts.is_empty() {
            return;
        }
        let adds: Vec<(Request, u16)> =
            requests.filter_map(|request| Some((request, request.ack_timeout_ticks()?))).collect();
        for timeout in timeouts {
            let Some((add, ticks)) = adds.get(usize::from(timeout.attempt).wrapping_sub(1)) else { continue };
            let due = add.ended + self.wheel.ticks(ticks + 1);
            let late = timeout.arrived.saturating_duration_since(due);
            let late_ms = u64::try_from(late.as_millis()).expect("a run is short");
            let kinds = kinds.of(self.timeline, add.begun, timeout.arrived);
            AllCounts { verdict, kinds }.for_each(|row| row.late_ms.record(late_ms).expect("the histogram grows"));
            if self.timeline.is_steady(add.begun, timeout.arrived) {
                verdict.steady.messages += 1;
                verdict.steady.late_ms.record(late_ms).expect("the histogram grows");
            }
        }
    }
}

/// The last Ack of a message that is in a batch which came as soon as it was published.
fn acked(requests: impl Iterator<Item = Request>, timeouts: &[Timeout]) -> Option<Acked> {
    let reported = timeouts.iter().filter(|timeout| timeout.is_prompt).map(|timeout| timeout.arrived).max()?;
    let acks = requests.filter(|request| matches!(request.outcome, Outcome::Del(Deleted::Done)));
    acks.last().map(|ack| Acked { place: ack.place, begun: ack.begun, reported })
}

/// The rows that a message counts in.
struct AllCounts<'a> {
    verdict: &'a mut Verdict,
    kinds: u32,
}

impl AllCounts<'_> {
    fn for_each(&mut self, mut count: impl FnMut(&mut Counts)) {
        count(&mut self.verdict.all);
        for kind in Kind::ALL.into_iter().filter(|kind| self.kinds & kind.bit() != 0) {
            count(self.verdict.by_kind.entry(kind).or_default());
        }
    }
}

/// Remembers the kinds of faults of the latest period: messages of one frame share it.
#[derive(Default)]
struct Kinds {
    latest: Option<(Instant, Instant, u32)>,
}

impl Kinds {
    fn of(&mut self, timeline: &Timeline, from: Instant, to: Instant) -> u32 {
        match self.latest {
            Some((begun, ended, kinds)) if (begun, ended) == (from, to) => kinds,
            _ => {
                let kinds = timeline.kinds(from, to);
                self.latest = Some((from, to, kinds));
                kinds
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault_run::faults::Topology;
    use crate::fault_run::ledger::Exchange;
    use crate::fault_run::timeline::Fault;

    const WHEEL: Wheel = Wheel { tick: Duration::from_secs(1), slots: 5 };

    /// The verdict on a message that is acknowledged in second 2 at place 1, and reported in second 7.
    fn judge(topology: Topology, fault: Option<(Kind, u64, u64)>, is_prompt: bool) -> Counts {
        let begun = Instant::now();
        let at = |second| begun + Duration::from_secs(second);
        let mut ledger = Ledger::new(7);
        for (second, ack_timeout_ticks, answer) in [(0, Some(5), Answer::Added), (2, None, Answer::Done)] {
            let exchange =
                Exchange { begun: at(second), ended: at(second), place: 1, ack_timeout_ticks, deadline: None };
            let exchange = ledger.exchange(exchange);
            ledger.record(0, exchange, answer);
        }
        let by_id = HashMap::from([(7, vec![(0, 1)])]);
        let timeouts = Timeouts { arrived: vec![(at(7), is_prompt)], by_id, ticks: BTreeMap::new() };
        let faults = fault.map(|(kind, from, to)| Fault {
            kind,
            place: Some(0),
            from: at(from),
            to: at(to),
            loses_until: Some(at(to)),
        });
        let timeline = Timeline { topology, faults: faults.into_iter().collect() };
        Judge { wheel: WHEEL, timeline: &timeline, ledger: &ledger, timeouts: &timeouts }.judge().all
    }

    /// Lost messages that lost writes from second 40 to 41 allow, where a batch of a later tick first arrived at this second.
    fn lost_and_allowed(later_tick: Option<u64>) -> u64 {
        let begun = Instant::now();
        let at = |second| begun + Duration::from_secs(second);
        let mut ledger = Ledger::new(7);
        let exchange =
            Exchange { begun: at(0), ended: at(1), place: 0, ack_timeout_ticks: Some(5), deadline: Some(105) };
        let exchange = ledger.exchange(exchange);
        ledger.record(0, exchange, Answer::Added);
        // A tick of a wheel before this one.
        let before = (begun, 900);
        let ticks = [before].into_iter().chain(later_tick.map(|second| (at(second), 106))).collect();
        let ticks = BTreeMap::from([(0, ticks)]);
        let timeouts = Timeouts { arrived: Vec::new(), by_id: HashMap::new(), ticks };
        let lost =
            Fault { kind: Kind::WritesLost, place: Some(0), from: at(40), to: at(41), loses_until: Some(at(41)) };
        let timeline = Timeline { topology: Topology::Redis, faults: vec![lost] };
        let row = Judge { wheel: WHEEL, timeline: &timeline, ledger: &ledger, timeouts: &timeouts }.judge().all;
        assert_eq!(row.broken[Breach::Lost as usize] + row.allowed[Breach::Lost as usize], 1);
        row.allowed[Breach::Lost as usize]
    }

    #[test]
    fn lost_writes_lose_no_message_whose_tick_had_passed_before() {
        assert_eq!([Some(29), Some(31), Some(50), None].map(lost_and_allowed), [0, 1, 1, 1]);
    }

    #[test]
    fn a_breach_is_allowed_only_by_a_fault_that_may_cause_it_while_the_message_lives() {
        let breach = Breach::AckedAndReported as usize;
        for (topology, fault, is_allowed) in [
            (Topology::Redis, None, false),
            (Topology::Redis, Some((Kind::WritesLost, 1, 3)), true),
            (Topology::Redis, Some((Kind::RedisKilled, 1, 3)), false),
            (Topology::Redis, Some((Kind::SidecarKilled, 1, 3)), false),
            (Topology::Memory, Some((Kind::SidecarKilled, 1, 3)), false),
            (Topology::Sentinel, Some((Kind::PrimaryKilled, 1, 3)), true),
            (Topology::Sentinel, Some((Kind::FailoverRequested, 1, 3)), true),
            (Topology::Cluster, Some((Kind::FailoverRequested, 1, 3)), false),
            // Acknowledged before the primary was cut off, which it may not have passed on.
            (Topology::Sentinel, Some((Kind::PrimaryPartitioned, 3, 6)), true),
            // Acknowledged at the new primary, and reported by the old one.
            (Topology::Sentinel, Some((Kind::PrimaryPartitioned, 1, 6)), false),
        ] {
            let row = judge(topology, fault, true);
            let counts = (row.messages, row.broken[breach], row.allowed[breach]);
            assert_eq!(counts, (1, u64::from(!is_allowed), u64::from(is_allowed)), "{topology:?} {fault:?}");
        }
        let redelivered = judge(Topology::Sentinel, Some((Kind::PrimaryPartitioned, 1, 6)), false);
        assert_eq!(redelivered.allowed[breach], 1, "it may have been published before the primary was cut off");
    }
}
