//! Load generators: logic nodes that add, acknowledge, re-arm and withdraw, and record every answer. Half of them speak RESP.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::client::{Answered, Client, Deleted, Part, Protocol, Question};
use super::history::Wheel;
use super::ledger::{Answer, Exchange, Ledger};
use super::shared::{Phase, Shared, Side};
use crate::support::sleep_until;

/// An answer that takes longer is given up, and the connection with it.
const GIVES_UP: Duration = Duration::from_secs(12);

/// A message is added at most this often.
const MOST_ADDS: usize = 4;

/// A DelMsg is repeated only for messages with fewer requests than this.
const MOST_REQUESTS: usize = 8;

/// A frame of due tasks has at most this many messages.
const LARGEST_FRAME: usize = 8_192;

/// The frames of one generator in a flood, and the most messages of each.
const FLOOD_FRAMES: usize = 2;
const FLOOD_MESSAGES: u64 = 24_000;

/// A generator that was held up makes up for at most this much time.
const CATCHES_UP: Duration = Duration::from_secs(2);

/// How long a generator waits before it tries to connect again.
const RETRY: Duration = Duration::from_millis(20);

/// A request that is to be sent for some messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    Ack,
    Withdraw,
    AddAgain,
}

pub struct Loader {
    wheel: Wheel,
    shared: Arc<Shared>,
    side: Side,
    protocol: Protocol,
    random: SmallRng,
    /// New messages a second.
    rate: f64,
    connection: Option<(usize, Client)>,
    floods: u32,
    /// The requests to send, by time; the number separates equal times.
    tasks: BTreeMap<(Instant, u64), (Task, Vec<u32>)>,
    planned: u64,
    ledger: Ledger,
}

impl Loader {
    /// Starts one with ids from `first_id` on. It ends when the load is to stop.
    pub fn start(
        wheel: Wheel,
        shared: &Arc<Shared>,
        side: Side,
        protocol: Protocol,
        seed: u64,
        first_id: u64,
        rate: f64,
    ) -> JoinHandle<Ledger> {
        let loader = Loader {
            wheel,
            shared: Arc::clone(shared),
            side,
            protocol,
            random: SmallRng::seed_from_u64(seed),
            rate,
            connection: None,
            floods: 0,
            tasks: BTreeMap::new(),
            planned: 0,
            ledger: Ledger::new(first_id),
        };
        thread::spawn(move || loader.run())
    }

    fn run(mut self) -> Ledger {
        let mut next = Instant::now();
        while !self.shared.is(Phase::Unloaded) {
            self.do_tasks();
            if self.shared.floods() != self.floods {
                self.floods = self.shared.floods();
                let count = FLOOD_MESSAGES.min(self.new_in(Duration::from_secs(4)));
                (0..FLOOD_FRAMES).for_each(|_| self.add_new(count));
            }
            let now = Instant::now();
            if now >= next {
                let count = self.frame_size();
                self.add_new(count);
                let takes = Duration::from_secs_f64(f64::from(u32::try_from(count).expect("few")) / self.rate);
                next = next.max(now.checked_sub(CATCHES_UP).unwrap_or(now)) + takes;
            }
            let first = self.tasks.first_key_value().map_or(next, |((due, _), _)| *due);
            sleep_until(first.min(next));
        }
        self.ledger
    }

    /// Mostly hundreds of messages, sometimes a few, sometimes thousands; those of half a second at most.
    fn frame_size(&mut self) -> u64 {
        let (least, most) = match self.random.random_range(0..10) {
            0..2 => (1, 20),
            2..9 => (100, 1_000),
            _ => (1_000, 4_000),
        };
        self.random.random_range(least..=most).min(self.new_in(Duration::from_millis(500)))
    }

    /// How many new messages belong to this time; at least one.
    fn new_in(&self, time: Duration) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate is a small number")]
        let count = (self.rate * time.as_secs_f64()) as u64;
        count.max(1)
    }

    fn add_new(&mut self, count: u64) {
        let first = self.ledger.indices().end;
        let indices: Vec<u32> = (first..).take(usize::try_from(count).expect("few")).collect();
        self.add(&indices, 1);
    }

    /// Sends all that is due, one frame for messages that can share it.
    fn do_tasks(&mut self) {
        let now = Instant::now();
        let mut due: BTreeMap<(Task, usize), Vec<u32>> = BTreeMap::new();
        while let Some(entry) = self.tasks.first_entry().filter(|entry| entry.key().0 <= now) {
            let (task, indices) = entry.remove();
            // A frame has one attempt for all its messages, and a task is for messages of one frame.
            let adds = if task == Task::AddAgain { self.ledger.adds(indices[0]) } else { 0 };
            due.entry((task, adds)).or_default().extend(indices);
        }
        for ((task, adds), indices) in due {
            for indices in indices.chunks(LARGEST_FRAME) {
                match task {
                    Task::Ack | Task::Withdraw => self.del(indices, task),
                    Task::AddAgain => self.add(indices, u8::try_from(adds + 1).expect("few")),
                }
            }
        }
    }

    fn add(&mut self, indices: &[u32], attempt: u8) {
        let ack_timeout_ticks = self.random.random_range(1..=self.wheel.slots);
        let Some(parts) = self.ask(Question::Add { ack_timeout_ticks, attempt }, indices) else { return };
        let mut rest = indices;
        for (exchange, (count, answered)) in parts {
            let (of_part, behind) = rest.split_at(count);
            rest = behind;
            if let Answered::Added { deadline, .. } = answered {
                self.ledger.record_deadline(exchange, deadline);
            }
            for (position, index) in of_part.iter().enumerate() {
                let answer = match &answered {
                    Answered::Added { rearmed, .. } if rearmed[position] => Answer::Rearmed,
                    Answered::Added { .. } => Answer::Added,
                    Answered::Refused => Answer::Refused,
                    Answered::Unclear => Answer::Unclear,
                    Answered::Deleted(_) => panic!("an AddNewMsg is answered as a DelMsg"),
                };
                self.ledger.record(*index, exchange, answer);
            }
        }
        self.plan(indices, ack_timeout_ticks, usize::from(attempt));
    }

    /// Decides what comes next for messages that were added: mostly an early Ack, sometimes nothing.
    fn plan(&mut self, indices: &[u32], ack_timeout_ticks: u16, adds: usize) {
        let longest = self.wheel.ticks(ack_timeout_ticks + 3);
        let last_tick = self.wheel.ticks(ack_timeout_ticks);
        let mut parts: [Vec<u32>; 8] = Default::default();
        for index in indices {
            // Eleven of a hundred are left to time out.
            let part = match self.random.random_range(0..100) {
                0..18 => 0,
                18..36 => 1,
                36..54 => 2,
                54..70 => 3,
                70..74 => 4,
                74..78 => 5,
                78..82 => 6,
                82..89 if adds < MOST_ADDS => 7,
                _ => continue,
            };
            parts[part].push(*index);
        }
        for (part, indices) in parts.into_iter().enumerate() {
            let share = self.random.random_range(0.0_f64..1.0);
            let (task, after) = match part {
                0..4 => (Task::Ack, longest.mul_f64(share.powi(3))),
                // A race with the deadline, which is one tick or less after that.
                4 => (Task::Ack, last_tick + self.wheel.tick.mul_f64(share * 1.2)),
                5 => (Task::Ack, longest.mul_f64(share)),
                6 => (Task::Withdraw, longest.mul_f64(share.powi(2))),
                _ => (Task::AddAgain, longest.mul_f64(share)),
            };
            self.at(Instant::now() + after, task, indices);
        }
    }

    fn at(&mut self, due: Instant, task: Task, indices: Vec<u32>) {
        if !indices.is_empty() {
            self.planned += 1;
            self.tasks.insert((due, self.planned), (task, indices));
        }
    }

    fn del(&mut self, indices: &[u32], task: Task) {
        let Some(parts) = self.ask(Question::Del { withdraws: task == Task::Withdraw }, indices) else { return };
        let failed = parts.iter().any(|(_, (_, answered))| !matches!(answered, Answered::Deleted(_)));
        let mut rest = indices;
        for (exchange, (count, answered)) in parts {
            let (of_part, behind) = rest.split_at(count);
            rest = behind;
            for (position, index) in of_part.iter().enumerate() {
                let answer = match &answered {
                    Answered::Deleted(outcomes) => match outcomes[position] {
                        Deleted::Done => Answer::Done,
                        Deleted::Late => Answer::Late,
                        Deleted::Unknown => Answer::Unknown,
                        Deleted::Held => Answer::Unclear,
                    },
                    Answered::Refused => Answer::Refused,
                    Answered::Unclear => Answer::Unclear,
                    Answered::Added { .. } => panic!("a DelMsg is answered as an AddNewMsg"),
                };
                self.ledger.record(*index, exchange, answer);
            }
        }
        // Repeating a DelMsg is harmless. One that failed is always repeated, as a logic node does.
        let again: Vec<u32> = indices
            .iter()
            .copied()
            .filter(|_| failed || self.random.random_bool(0.05))
            .filter(|index| self.ledger.of(*index).count() < MOST_REQUESTS)
            .collect();
        let pause = if failed { Duration::from_millis(100) } else { Duration::ZERO };
        self.at(Instant::now() + pause, task, again);
    }

    /// Asks for messages and records when; none if no sidecar could be reached.
    fn ask(&mut self, question: Question, indices: &[u32]) -> Option<Vec<(u32, Part)>> {
        let kept = self.connection.take().filter(|_| self.random.random_bool(0.95));
        let kept = kept.filter(|(place, _)| self.shared.reaches(self.side, *place));
        let Some((place, mut client)) =
            kept.or_else(|| self.shared.connect(self.side, self.protocol, &mut self.random))
        else {
            thread::sleep(RETRY);
            return None;
        };
        let patience = if self.random.random_bool(0.003) { Duration::from_millis(1) } else { GIVES_UP };
        let ids: Vec<u64> = indices.iter().map(|index| self.ledger.id(*index)).collect();
        // AW.ADD does not say which of several messages were in flight before.
        let may_rearm = matches!(question, Question::Add { attempt: 2.., .. });
        let is_pipelined = may_rearm || self.random.random_bool(0.2);
        let begun = Instant::now();
        let parts = client.ask(question, &ids, is_pipelined, patience, || self.shared.reaches(self.side, place));
        let ended = Instant::now();
        self.connection = client.goes_on().then_some((place, client));
        let place = u8::try_from(place).expect("few places");
        let ack_timeout_ticks = match question {
            Question::Add { ack_timeout_ticks, .. } => Some(ack_timeout_ticks),
            Question::Del { .. } => None,
        };
        let mut record =
            || self.ledger.exchange(Exchange { begun, ended, place, ack_timeout_ticks, deadline: None });
        Some(parts.into_iter().map(|part| (record(), part)).collect())
    }
}
