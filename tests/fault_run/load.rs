//! Logic nodes: they add, acknowledge, re-arm and withdraw through whichever sidecar they reach, and write down what
//! they were told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::history::{Added, Asked, Deleted, Did, Wheel};
use super::peer::Peer;
use super::shared::{Phase, Shared};
use crate::support::frames::{self, ACKED, Frame, LATE, OUTCOME_UNKNOWN, RETRYABLE, Request, UNKNOWN, WITHDRAWN};
use crate::support::sleep_until;

/// From one frame of new messages to the next.
const PAUSE: Duration = Duration::from_millis(60);

/// An answer that takes longer is given up, and the connection with it.
const GIVES_UP: Duration = Duration::from_secs(12);

/// A message is added at most so often.
const MOST_ADDS: usize = 4;

/// What is to be done for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Errand {
    Ack,
    Withdraw,
    AddAgain,
}

/// What was asked for each message, in order.
pub type Ledger = BTreeMap<u64, Vec<Asked>>;

pub struct Loader {
    wheel: Wheel,
    shared: Arc<Shared>,
    random: SmallRng,
    connection: Option<(usize, Peer)>,
    next_id: u64,
    errands: BTreeSet<(Instant, u64, Errand)>,
    ledger: Ledger,
}

impl Loader {
    /// Starts one, whose messages are those from `first_id` on; it ends when the load is to stop.
    pub fn start(wheel: Wheel, shared: &Arc<Shared>, seed: u64, first_id: u64) -> JoinHandle<Ledger> {
        let loader = Loader {
            wheel,
            shared: Arc::clone(shared),
            random: SmallRng::seed_from_u64(seed),
            connection: None,
            next_id: first_id,
            errands: BTreeSet::new(),
            ledger: Ledger::new(),
        };
        thread::spawn(move || loader.run())
    }

    fn run(mut self) -> Ledger {
        let mut next = Instant::now();
        while !self.shared.is(Phase::Unloaded) {
            self.do_errands();
            if Instant::now() >= next {
                self.add_new();
                next = Instant::now() + PAUSE;
            }
            let first = self.errands.first().map_or(next, |(due, ..)| *due);
            sleep_until(first.min(next));
        }
        self.ledger
    }

    fn add_new(&mut self) {
        let count = self.random.random_range(1..=20);
        let ids: Vec<u64> = (self.next_id..self.next_id + count).collect();
        self.next_id += count;
        self.add(&ids, 1);
    }

    /// Asks for what is due, a frame for what may share one.
    fn do_errands(&mut self) {
        let now = Instant::now();
        let mut due: BTreeMap<(Errand, usize), Vec<u64>> = BTreeMap::new();
        while self.errands.first().is_some_and(|(moment, ..)| *moment <= now) {
            let (_, id, errand) = self.errands.pop_first().expect("it was there");
            // A frame has one attempt for all.
            let adds = if errand == Errand::AddAgain { self.adds_of(id) } else { 0 };
            due.entry((errand, adds)).or_default().push(id);
        }
        for ((errand, adds), ids) in due {
            match errand {
                Errand::Ack | Errand::Withdraw => self.del(&ids, errand),
                Errand::AddAgain => self.add(&ids, u8::try_from(adds + 1).expect("few")),
            }
        }
    }

    fn adds_of(&self, id: u64) -> usize {
        let all = self.ledger.get(&id).into_iter().flatten();
        all.filter(|asked| matches!(asked.did, Did::Add { .. })).count()
    }

    fn add(&mut self, ids: &[u64], attempt: u8) {
        let ack_timeout_ticks = self.random.random_range(1..=self.wheel.slots);
        let request = frames::add(ids, ack_timeout_ticks, attempt);
        let asked = self.ask(&request, ids, |answer, index| {
            let added = match answer {
                Answer::Unclear => Added::Unclear,
                Answer::Refused => Added::Refused,
                Answer::Frame(frame) => Added::Accepted { rearmed: frame.added().1[index] },
            };
            Did::Add { ack_timeout_ticks, added }
        });
        if asked {
            for id in ids {
                self.plan(*id, ack_timeout_ticks);
            }
        }
    }

    /// What a phone and a logic node may do next: something around the ack timeout, or nothing.
    fn plan(&mut self, id: u64, ack_timeout_ticks: u16) {
        let errand = match self.random.random_range(0..100) {
            0..60 => Errand::Ack,
            60..65 => Errand::Withdraw,
            65..75 if self.adds_of(id) < MOST_ADDS => Errand::AddAgain,
            _ => return,
        };
        let longest = self.wheel.ticks(ack_timeout_ticks + 3);
        let due = Instant::now() + longest.mul_f64(self.random.random_range(0.0..1.0));
        self.errands.insert((due, id, errand));
    }

    fn del(&mut self, ids: &[u64], errand: Errand) {
        let withdraws = errand == Errand::Withdraw;
        let request = if withdraws { frames::withdraw(ids) } else { frames::del(ids) };
        self.ask(&request, ids, |answer, index| {
            Did::Del(match answer {
                Answer::Unclear => Deleted::Unclear,
                Answer::Refused => Deleted::Refused,
                Answer::Frame(frame) => match frame.outcomes()[index] {
                    ACKED if !withdraws => Deleted::Done,
                    WITHDRAWN if withdraws => Deleted::Done,
                    LATE => Deleted::Late,
                    UNKNOWN => Deleted::Unknown,
                    other => panic!("an outcome that was not asked for: {other}"),
                },
            })
        });
        // Repeating a DelMsg is harmless.
        for id in ids {
            if self.ledger[id].len() < 8 && self.random.random_bool(0.1) {
                self.errands.insert((Instant::now(), *id, errand));
            }
        }
    }

    /// Asks, and writes down for each message what that was; false where nobody could be asked.
    fn ask(&mut self, request: &Request, ids: &[u64], did: impl Fn(&Answer, usize) -> Did) -> bool {
        let kept = self.connection.take().filter(|_| self.random.random_bool(0.85));
        let Some((at, mut peer)) = kept.or_else(|| self.shared.connect(&mut self.random)) else { return false };
        let patience = if self.random.random_bool(0.01) { Duration::from_millis(1) } else { GIVES_UP };
        let begun = Instant::now();
        let frame = peer.ask(request, patience);
        let ended = Instant::now();
        self.connection = (frame.is_some() && !peer.went_away).then_some((at, peer));
        let answer = Answer::of(frame);
        for (index, id) in ids.iter().enumerate() {
            let asked = Asked { begun, ended, at, did: did(&answer, index) };
            self.ledger.entry(*id).or_default().push(asked);
        }
        true
    }
}

/// What came of a request.
enum Answer {
    Frame(Frame),
    Refused,
    /// Nobody knows: there was no answer, or an Error that says so.
    Unclear,
}

impl Answer {
    /// An Error must be one that says: try again.
    fn of(frame: Option<Frame>) -> Answer {
        match frame {
            Some(error) if error.kind == frames::ERROR => {
                assert_eq!(error.flags & RETRYABLE, RETRYABLE, "{error:?}");
                if error.flags & OUTCOME_UNKNOWN == 0 { Answer::Refused } else { Answer::Unclear }
            }
            Some(frame) => Answer::Frame(frame),
            None => Answer::Unclear,
        }
    }
}
