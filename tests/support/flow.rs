//! A load through one sidecar while things happen to others or to Redis, and what must be true of it at the end.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::frames::{self, ACKED, Frame, LATE, UNKNOWN};
use super::raw::{Batch, Raw};
use super::{PATIENCE, sleep_until};

/// Added last with the same ack timeout: once it is in a batch, every other tick was decided before.
const SENTINEL: u64 = u64::MAX;

/// A DelMsg answered within this time was not under way while the store went.
const AT_ONCE: Duration = Duration::from_millis(300);

/// The messages added and acknowledged, round after round.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub tick: Duration,
    pub ack_timeout_ticks: u16,
    /// Messages added in a round.
    pub added: u64,
    /// How many of them are acknowledged: each round's some rounds later, a few of them too late.
    pub acked: u64,
    /// From one round to the next.
    pub pause: Duration,
}

impl Plan {
    /// 50 added and 25 acknowledged ten times a second.
    pub fn ten_times_a_second(tick: Duration, ack_timeout_ticks: u16) -> Plan {
        Plan { tick, ack_timeout_ticks, added: 50, acked: 25, pause: Duration::from_millis(100) }
    }

    fn ack_timeout(&self) -> Duration {
        self.tick * u32::from(self.ack_timeout_ticks)
    }

    /// How many rounds later this one is acknowledged: from the next to two ticks after the ack timeout, in no
    /// order.
    fn acked_after(&self, round: u64) -> u64 {
        let longest = (self.ack_timeout() + self.tick * 2).as_millis() / self.pause.as_millis();
        let longest = u64::try_from(longest).expect("a revolution is short").max(1);
        1 + round * 7_919 % longest
    }
}

/// How an AddNewMsg ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Added {
    Accepted,
    Refused,
    /// Its outcome is unknown.
    Unclear,
}

/// The answer to the DelMsg of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Asked {
    Never,
    Acked,
    Late,
    Unknown,
    /// There was an Error, or it was under way while the store went.
    Unclear,
}

/// The state of a message.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub asked: Instant,
    pub answered: Instant,
    pub added: Added,
    pub deleted: Asked,
}

/// The load's side of the connection.
struct Loader {
    plan: Plan,
    connection: Raw,
    messages: BTreeMap<u64, Message>,
    errors: BTreeMap<u16, usize>,
}

impl Loader {
    fn run(mut self, stop: &AtomicBool) -> Loader {
        let mut due: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        let mut next = Instant::now();
        for round in 0.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let first = 1 + round * self.plan.added;
            let ids: Vec<u64> = (first..first + self.plan.added).collect();
            self.add(&ids);
            let acked = ids.into_iter().take(usize::try_from(self.plan.acked).expect("few"));
            due.entry(round + self.plan.acked_after(round)).or_default().extend(acked);
            while due.first_key_value().is_some_and(|(due, _)| *due <= round) {
                let (_, ids) = due.pop_first().expect("it was there");
                self.del(&ids);
            }
            next = (next + self.plan.pause).max(Instant::now());
            sleep_until(next);
        }
        self
    }

    fn add(&mut self, ids: &[u64]) {
        let asked = Instant::now();
        let answer = self.connection.ask(&frames::add(ids, self.plan.ack_timeout_ticks, 1));
        let answered = Instant::now();
        let added = match self.error(&answer) {
            None => {
                assert!(answer.added().1.iter().all(|rearmed| !rearmed), "every id is new: {answer:?}");
                Added::Accepted
            }
            Some(frames::OUTCOME_UNKNOWN) => Added::Unclear,
            Some(_) => Added::Refused,
        };
        let message = Message { asked, answered, added, deleted: Asked::Never };
        self.messages.extend(ids.iter().map(|id| (*id, message)));
    }

    /// Adds the sentinel as soon as something can be added.
    fn add_sentinel(&mut self, deadline: Instant) {
        let asked = Instant::now();
        loop {
            let answer = self.connection.ask(&frames::add(&[SENTINEL], self.plan.ack_timeout_ticks, 1));
            if answer.kind != frames::ERROR {
                let answered = Instant::now();
                let message = Message { asked, answered, added: Added::Accepted, deleted: Asked::Never };
                self.messages.insert(SENTINEL, message);
                return;
            }
            assert!(Instant::now() < deadline, "nothing can be added any more: {answer:?}");
            sleep_until(Instant::now() + self.plan.pause);
        }
    }

    fn del(&mut self, ids: &[u64]) {
        let asked = Instant::now();
        let answer = self.connection.ask(&frames::del(ids));
        let at_once = asked.elapsed() < AT_ONCE;
        let outcomes = match self.error(&answer) {
            None => answer.outcomes().to_vec(),
            Some(frames::OUTCOME_UNKNOWN) => Vec::new(),
            // Refused: as if nobody had asked.
            Some(_) => return,
        };
        let mut outcomes: VecDeque<u8> = outcomes.into();
        for id in ids {
            let message = self.messages.get_mut(id).expect("it was added");
            message.deleted = match outcomes.pop_front() {
                Some(ACKED) => Asked::Acked,
                Some(LATE) => Asked::Late,
                Some(UNKNOWN) if at_once => Asked::Unknown,
                _ => Asked::Unclear,
            };
        }
    }

    /// The promise of an Error, which must be one that says: try again.
    fn error(&mut self, answer: &Frame) -> Option<u8> {
        if answer.kind != frames::ERROR {
            return None;
        }
        assert_eq!(answer.flags & frames::RETRYABLE, frames::RETRYABLE, "{answer:?}");
        *self.errors.entry(answer.status).or_default() += 1;
        Some(answer.flags & frames::OUTCOME_UNKNOWN)
    }
}

/// A load and a subscriber, each in a thread.
pub struct Flow {
    stop: Arc<AtomicBool>,
    loader: JoinHandle<Loader>,
    batches: Arc<Mutex<Vec<Batch>>>,
    subscriber: TcpStream,
    taker: JoinHandle<()>,
}

impl Flow {
    /// Adds and acknowledges through one sidecar, and subscribes to group default at another, or the same.
    pub fn start(plan: Plan, adds_at: SocketAddr, subscribes_at: SocketAddr) -> Flow {
        let connection = TcpStream::connect(subscribes_at).expect("the sidecar accepts");
        let subscriber = connection.try_clone().expect("a connection can be closed from elsewhere");
        let batches = Arc::new(Mutex::new(Vec::new()));
        let taker = take_batches(Raw::over_tcp(connection).greet().subscribed("default"), &batches);
        let (messages, errors) = (BTreeMap::new(), BTreeMap::new());
        let loader = Loader { plan, connection: Raw::greeted(adds_at), messages, errors };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Flow { stop, loader: thread::spawn(move || loader.run(&stopped)), batches, subscriber, taker }
    }

    /// Ends the load; returns what was seen once everything that must come has come, or has not for long.
    pub fn finish(self) -> Evidence {
        self.stop.store(true, Ordering::Relaxed);
        let mut loader = self.loader.join().expect("the load was answered as it must be");
        let deadline = Instant::now() + PATIENCE * 2;
        loader.add_sentinel(deadline);
        let Loader { plan, messages, errors, .. } = loader;
        let mut evidence = Evidence { plan, messages, errors, batches: Vec::new() };
        loop {
            evidence.batches.clone_from(&self.batches.lock().expect("the subscriber lives"));
            if evidence.is_complete() || Instant::now() >= deadline {
                break;
            }
            sleep_until(Instant::now() + Duration::from_millis(100));
        }
        self.subscriber.shutdown(Shutdown::Both).expect("the connection is there");
        self.taker.join().expect("the subscriber saw nothing wrong");
        evidence
    }
}

/// Takes and acknowledges batches as long as the connection lives.
fn take_batches(mut connection: Raw, batches: &Arc<Mutex<Vec<Batch>>>) -> JoinHandle<()> {
    let taken = Arc::clone(batches);
    thread::spawn(move || {
        while let Some(frame) = connection.receive_any() {
            match frame.kind {
                frames::PING => connection.pong(&frame),
                frames::TIMEOUT_BATCH => {
                    let batch = Batch::of(&frame);
                    connection.request(&frames::batch_ack(&[batch.id]));
                    taken.lock().expect("no holder panics").push(batch);
                }
                _ => {}
            }
        }
    })
}

/// The observations of clients.
#[derive(Debug)]
pub struct Evidence {
    pub plan: Plan,
    pub messages: BTreeMap<u64, Message>,
    pub batches: Vec<Batch>,
    /// Errors, by code.
    pub errors: BTreeMap<u16, usize>,
}

impl Evidence {
    /// Whether all that must be in a batch is in one.
    fn is_complete(&self) -> bool {
        let mut batches: Vec<u64> = self.batches.iter().flat_map(Batch::ids).collect();
        batches.sort_unstable();
        self.messages
            .iter()
            .all(|(id, message)| *copies(message).start() == 0 || batches.binary_search(id).is_ok())
    }

    /// Asserts that nothing was lost, nothing came twice, early or later than `late_at_most` after its tick, and
    /// nothing that was acknowledged timed out; returns how late the latest was.
    #[track_caller]
    pub fn assert_kept(&self, late_at_most: Duration) -> Duration {
        let mut wrong = Vec::new();
        let mut arrivals = self.arrivals(&mut wrong);
        let mut latest = Duration::ZERO;
        for (id, message) in &self.messages {
            let arrivals = arrivals.remove(id).unwrap_or_default();
            if message.deleted == Asked::Unknown && message.added == Added::Accepted {
                wrong.push(format!("{id} was added, and is unknown: {message:?}"));
            } else if !copies(message).contains(&arrivals.len()) {
                wrong.push(format!("{id} is in {} batches: {message:?}", arrivals.len()));
            }
            for arrived in arrivals {
                let earliest = message.asked + self.plan.ack_timeout();
                if arrived < earliest {
                    wrong.push(format!("{id} came {:?} early", earliest - arrived));
                }
                let late =
                    arrived.saturating_duration_since(message.answered + self.plan.ack_timeout() + self.plan.tick);
                if late > late_at_most {
                    wrong.push(format!("{id} came {late:?} after its tick"));
                }
                latest = latest.max(late);
            }
        }
        wrong.extend(arrivals.into_keys().map(|id| format!("{id} is in a batch and was never added")));
        let (count, first) = (wrong.len(), wrong.iter().take(10).collect::<Vec<_>>());
        assert!(wrong.is_empty(), "{count} of {} are wrong: {first:#?}", self.messages.len());
        latest
    }

    /// When each message came, in each of its batches; a redelivery of the same batch does not count.
    fn arrivals(&self, wrong: &mut Vec<String>) -> BTreeMap<u64, Vec<Instant>> {
        let mut arrivals: BTreeMap<u64, Vec<Instant>> = BTreeMap::new();
        let mut last_of: HashMap<[u8; 24], &Batch> = HashMap::new();
        for batch in &self.batches {
            match last_of.insert(batch.id, batch) {
                None => {
                    for (id, _) in &batch.messages {
                        arrivals.entry(*id).or_default().push(batch.arrived);
                    }
                }
                Some(before) => {
                    if batch.delivery <= before.delivery || batch.ids() != before.ids() {
                        wrong.push(format!("no redelivery of {before:?}: {batch:?}"));
                    }
                }
            }
        }
        arrivals
    }

    /// How many were acknowledged, and how many answered `late`.
    pub fn acked_and_late(&self) -> (usize, usize) {
        let count = |asked| self.messages.values().filter(|message| message.deleted == asked).count();
        (count(Asked::Acked), count(Asked::Late))
    }
}

/// In how many batches a message may be.
fn copies(message: &Message) -> RangeInclusive<usize> {
    match (message.added, message.deleted) {
        (Added::Refused, _) | (_, Asked::Acked) => 0..=0,
        (Added::Unclear, Asked::Never | Asked::Unclear | Asked::Unknown)
        | (_, Asked::Unclear | Asked::Unknown) => 0..=1,
        (_, Asked::Late) | (Added::Accepted, Asked::Never) => 1..=1,
    }
}
