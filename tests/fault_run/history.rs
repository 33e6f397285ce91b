//! Checks the requests, answers and timeout batches of one message against the promises.
//!
//! The checker knows the promises and no implementation. It follows every state that the message may have between two
//! answers. A history is right if one sequence of states explains all answers and all batches.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The settings that the promises refer to.
#[derive(Clone, Copy, Debug)]
pub struct Wheel {
    pub tick: Duration,
    pub slots: u16,
}

impl Wheel {
    pub fn ticks(&self, count: u16) -> Duration {
        self.tick * u32::from(count)
    }
}

/// How an AddNewMsg ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Added {
    Accepted {
        rearmed: bool,
    },
    Refused,
    /// No answer, or an Error with "outcome unknown": it may be applied at any later time, or never.
    Unclear,
}

/// How a DelMsg ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Deleted {
    /// Acknowledged or withdrawn, as was asked.
    Done,
    Late,
    Unknown,
    Refused,
    /// As with [`Added::Unclear`].
    Unclear,
}

#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    Add { ack_timeout_ticks: u16, added: Added },
    Del(Deleted),
}

/// A request for a message. Each was answered, or given up, before the next was sent.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub begun: Instant,
    pub ended: Instant,
    /// The place of the sidecar that was asked.
    pub place: usize,
    pub outcome: Outcome,
}

impl Request {
    /// The ack timeout, if the request is an AddNewMsg.
    pub fn ack_timeout_ticks(&self) -> Option<u16> {
        match self.outcome {
            Outcome::Add { ack_timeout_ticks, .. } => Some(ack_timeout_ticks),
            Outcome::Del(_) => None,
        }
    }
}

/// A message in a batch. The attempt says which of its AddNewMsgs timed out, from 1 on.
#[derive(Clone, Copy, Debug)]
pub struct Timeout {
    pub attempt: u8,
    pub arrived: Instant,
    /// Whether its batch came as soon as it was published: the first delivery, to a subscriber that was there.
    pub is_prompt: bool,
}

/// A promise that a history breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breach {
    /// Accepted, never reported, and not acknowledged; or unknown although in flight.
    Lost,
    /// The same attempt is in two batches.
    Doubled,
    /// Reported before its ack timeout was over.
    Early,
    /// Reported although the DelMsg was answered `acked` or `withdrawn`.
    AckedAndReported,
    /// A DelMsg sent well before the deadline was answered `late`.
    LateInTime,
    /// Any other answer or batch that no sequence of states explains.
    WrongOutcome,
}

impl Breach {
    pub const ALL: [Breach; 6] = [
        Breach::Lost,
        Breach::Doubled,
        Breach::Early,
        Breach::AckedAndReported,
        Breach::LateInTime,
        Breach::WrongOutcome,
    ];
}

/// The state of a message. Its lives are numbered as its AddNewMsgs are, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Out,
    InFlight(u8),
    Late(u8),
}

/// One sequence of states up to now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Course {
    state: State,
    /// The lives that timed out, a bit each.
    timed_out: u32,
    /// The requests that may still be applied, a bit each.
    pending: u32,
}

/// Promises that a second look at a wrong history leaves out, to name the one that was broken.
#[derive(Clone, Copy, Default)]
struct Exempt {
    late_in_time: bool,
    lost: bool,
    acked_and_reported: bool,
}

/// The requests of a message in their order, and its batches.
pub struct History<'a> {
    pub wheel: Wheel,
    pub requests: &'a [Request],
    pub timeouts: &'a [Timeout],
    /// Whether the sidecar that got a DelMsg could pass it on.
    pub heard: &'a dyn Fn(&Request) -> bool,
}

/// A DelMsg that was sent this long before the deadline must not be answered `late`.
const IN_TIME: Duration = Duration::from_secs(1);

impl History<'_> {
    /// Ok if every promise was kept; else the first that was broken, and why.
    pub fn check(&self) -> Result<(), (Breach, String)> {
        let seen = self.timed_out_lives()?;
        let Err(why) = self.explain(seen, Exempt::default()) else { return Ok(()) };
        for (breach, exempt) in [
            (Breach::LateInTime, Exempt { late_in_time: true, ..Exempt::default() }),
            (Breach::Lost, Exempt { lost: true, ..Exempt::default() }),
            (Breach::AckedAndReported, Exempt { acked_and_reported: true, ..Exempt::default() }),
        ] {
            if self.explain(seen, exempt).is_ok() {
                return Err((breach, why));
            }
        }
        Err((Breach::WrongOutcome, why))
    }

    /// The lives that are in batches, a bit each.
    fn timed_out_lives(&self) -> Result<u32, (Breach, String)> {
        let mut seen = 0_u32;
        let wrong = |breach, text: &str| Err((breach, String::from(text)));
        for Timeout { attempt, arrived, .. } in self.timeouts {
            let Some(life) = attempt.checked_sub(1) else {
                return wrong(Breach::WrongOutcome, "attempt 0");
            };
            let Some(add) = self.adds().nth(usize::from(life)) else {
                return wrong(Breach::WrongOutcome, "an attempt that was never added");
            };
            let earliest = self.deadline_of(add);
            if *arrived < earliest {
                return wrong(Breach::Early, &format!("attempt {attempt} came {:?} early", earliest - *arrived));
            }
            if seen & 1 << life != 0 {
                return wrong(Breach::Doubled, &format!("attempt {attempt} is in two batches"));
            }
            seen |= 1 << life;
        }
        Ok(seen)
    }

    /// Ok if a sequence of states explains everything, with some promises left out.
    fn explain(&self, seen: u32, exempt: Exempt) -> Result<(), String> {
        let mut courses = BTreeSet::from([Course { state: State::Out, timed_out: 0, pending: 0 }]);
        for index in 0..self.requests.len() {
            let before = self.closure(courses, seen, exempt, Some(self.requests[index].ended));
            courses = before.iter().flat_map(|course| self.after(index, *course, exempt)).collect();
            if courses.is_empty() {
                return Err(format!("answer {index} cannot be, after {before:?}"));
            }
        }
        let over = |course: &Course| course.timed_out == seen && !matches!(course.state, State::InFlight(_));
        let ends = self.closure(courses, seen, exempt, None);
        if ends.iter().any(over) { Ok(()) } else { Err(format!("batches of {seen:b}, and none of {ends:?}")) }
    }

    fn adds(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().filter(|request| request.ack_timeout_ticks().is_some())
    }

    /// The earliest moment at which a life may time out.
    fn deadline_of(&self, add: &Request) -> Instant {
        add.begun + self.wheel.ticks(add.ack_timeout_ticks().expect("it is an AddNewMsg"))
    }

    fn deadline(&self, life: u8) -> Instant {
        self.deadline_of(self.adds().nth(usize::from(life)).expect("a life has its AddNewMsg"))
    }

    /// The number of the life that the AddNewMsg at an index begins.
    fn life(&self, index: usize) -> u8 {
        let before = self.requests[..index].iter().filter(|request| request.ack_timeout_ticks().is_some());
        u8::try_from(before.count()).expect("a message has few lives")
    }

    /// All states that these may become by a moment without another answer.
    fn closure(
        &self,
        courses: BTreeSet<Course>,
        seen: u32,
        exempt: Exempt,
        by: Option<Instant>,
    ) -> BTreeSet<Course> {
        let mut all = courses.clone();
        let mut open: Vec<Course> = courses.into_iter().collect();
        while let Some(course) = open.pop() {
            let mut next = Vec::new();
            if let State::InFlight(life) = course.state {
                let timed_out = course.timed_out | 1 << life;
                if timed_out & !seen == 0 && by.is_none_or(|by| by >= self.deadline(life)) {
                    next.push(Course { state: State::Late(life), timed_out, ..course });
                }
                if exempt.lost {
                    next.extend([State::Out, State::Late(life)].map(|state| Course { state, ..course }));
                }
            }
            for index in (0..self.requests.len()).filter(|index| course.pending & 1 << index != 0) {
                let pending = course.pending & !(1 << index);
                match (self.requests[index].outcome, course.state) {
                    (Outcome::Add { .. }, _) => {
                        let state = State::InFlight(self.life(index));
                        next.push(Course { state, pending, ..course });
                    }
                    (Outcome::Del(_), State::InFlight(_)) => {
                        next.push(Course { state: State::Out, pending, ..course });
                    }
                    (Outcome::Del(_), _) => {}
                }
            }
            open.extend(next.into_iter().filter(|next| all.insert(*next)));
        }
        all
    }

    /// The course after an answer; none if the answer is impossible.
    fn after(&self, index: usize, course: Course, exempt: Exempt) -> Vec<Course> {
        let request = &self.requests[index];
        let in_flight = matches!(course.state, State::InFlight(_));
        let to = |state| Course { state, ..course };
        let next = match request.outcome {
            Outcome::Add { added: Added::Accepted { rearmed }, .. } => {
                (rearmed == in_flight).then(|| to(State::InFlight(self.life(index))))
            }
            Outcome::Add { added: Added::Unclear, .. } | Outcome::Del(Deleted::Unclear) => {
                Some(Course { pending: course.pending | 1 << index, ..course })
            }
            Outcome::Add { added: Added::Refused, .. } | Outcome::Del(Deleted::Refused) => Some(course),
            Outcome::Del(Deleted::Done) if in_flight && exempt.acked_and_reported => {
                return vec![to(State::Out), course];
            }
            Outcome::Del(Deleted::Done) => in_flight.then(|| to(State::Out)),
            Outcome::Del(Deleted::Late) => match course.state {
                State::Late(life) => {
                    let in_time = request.begun + IN_TIME <= self.deadline(life) && (self.heard)(request);
                    let allowed = exempt.late_in_time || !in_time;
                    (request.ended >= self.deadline(life) && allowed).then_some(course)
                }
                State::Out | State::InFlight(_) => None,
            },
            Outcome::Del(Deleted::Unknown) => match course.state {
                State::Out => Some(course),
                // It is remembered for a revolution.
                State::Late(life) => (request.ended >= self.deadline(life) + self.wheel.ticks(self.wheel.slots))
                    .then(|| to(State::Out)),
                State::InFlight(_) => None,
            },
        };
        next.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHEEL: Wheel = Wheel { tick: Duration::from_secs(1), slots: 5 };
    const ADDED: Outcome = Outcome::Add { ack_timeout_ticks: 5, added: Added::Accepted { rearmed: false } };
    const REARMED: Outcome = Outcome::Add { ack_timeout_ticks: 5, added: Added::Accepted { rearmed: true } };
    const MAYBE_ADDED: Outcome = Outcome::Add { ack_timeout_ticks: 5, added: Added::Unclear };
    const NOT_ADDED: Outcome = Outcome::Add { ack_timeout_ticks: 5, added: Added::Refused };

    /// The verdict on requests, each with its second, and on batches, each with its attempt and second.
    fn check(asked: &[(u64, Outcome)], batches: &[(u8, u64)]) -> Result<(), Breach> {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let requests: Vec<Request> = asked
            .iter()
            .map(|(second, outcome)| Request {
                begun: at(*second),
                ended: at(*second),
                place: 0,
                outcome: *outcome,
            })
            .collect();
        let timeouts: Vec<Timeout> = batches
            .iter()
            .map(|(attempt, second)| Timeout { attempt: *attempt, arrived: at(*second), is_prompt: true })
            .collect();
        History { wheel: WHEEL, requests: &requests, timeouts: &timeouts, heard: &|_| true }
            .check()
            .map_err(|(breach, _)| breach)
    }

    #[test]
    fn possible_histories_are_accepted() {
        let del = Outcome::Del;
        for (asked, batches) in [
            (&[(0, ADDED)][..], &[(1, 6)][..]),
            (&[(0, NOT_ADDED)], &[]),
            (&[(0, MAYBE_ADDED)], &[]),
            (&[(0, MAYBE_ADDED)], &[(1, 9)]),
            (&[(0, ADDED), (1, del(Deleted::Done)), (2, del(Deleted::Unknown))], &[]),
            (&[(0, ADDED), (6, del(Deleted::Late)), (6, del(Deleted::Late))], &[(1, 7)]),
            (&[(0, ADDED), (10, del(Deleted::Unknown))], &[(1, 6)]),
            (&[(0, ADDED), (1, del(Deleted::Refused))], &[(1, 6)]),
            (&[(0, ADDED), (1, del(Deleted::Unclear))], &[]),
            (&[(0, ADDED), (1, del(Deleted::Unclear))], &[(1, 6)]),
            (&[(0, ADDED), (1, REARMED)], &[(2, 7)]),
            (&[(0, ADDED), (6, ADDED)], &[(1, 6), (2, 12)]),
            (&[(0, ADDED), (1, MAYBE_ADDED)], &[(1, 6)]),
            (&[(0, ADDED), (1, MAYBE_ADDED)], &[(2, 7)]),
            // Done after the DelMsg, by a sidecar that had stalled.
            (&[(0, MAYBE_ADDED), (1, del(Deleted::Unknown))], &[(1, 7)]),
        ] {
            assert_eq!(check(asked, batches), Ok(()), "{asked:?} {batches:?}");
        }
    }

    #[test]
    fn a_broken_promise_is_noticed() {
        let del = Outcome::Del;
        for (asked, batches, breach) in [
            (&[(0, ADDED)][..], &[][..], Breach::Lost),
            (&[(0, ADDED), (1, del(Deleted::Unknown))], &[], Breach::Lost),
            (&[(0, ADDED), (6, del(Deleted::Late))], &[], Breach::Lost),
            (&[(0, ADDED), (1, MAYBE_ADDED)], &[], Breach::Lost),
            (&[(0, ADDED)], &[(1, 4)], Breach::Early),
            (&[(0, ADDED)], &[(1, 6), (1, 7)], Breach::Doubled),
            (&[(0, ADDED), (1, del(Deleted::Done))], &[(1, 6)], Breach::AckedAndReported),
            (&[(0, MAYBE_ADDED), (1, del(Deleted::Done))], &[(1, 6)], Breach::AckedAndReported),
            (&[(0, ADDED), (3, del(Deleted::Late))], &[(1, 6)], Breach::WrongOutcome),
            (&[(0, ADDED)], &[(2, 6)], Breach::WrongOutcome),
            (&[(0, NOT_ADDED)], &[(1, 6)], Breach::WrongOutcome),
            // In flight, and unknown.
            (&[(0, ADDED), (1, del(Deleted::Unknown))], &[(1, 6)], Breach::WrongOutcome),
            // Late one revolution too short.
            (&[(0, ADDED), (9, del(Deleted::Unknown))], &[(1, 6)], Breach::WrongOutcome),
            // Re-armed, and in the batch of the attempt before.
            (&[(0, ADDED), (1, REARMED)], &[(1, 6), (2, 7)], Breach::WrongOutcome),
            // In flight until its time, and not re-armed.
            (&[(0, ADDED), (4, ADDED)], &[(1, 6), (2, 10)], Breach::WrongOutcome),
        ] {
            assert_eq!(check(asked, batches), Err(breach), "{asked:?} {batches:?}");
        }
    }

    #[test]
    fn a_del_msg_in_time_counts_however_late_its_answer_is() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let requests = [
            Request { begun: at(0), ended: at(0), place: 0, outcome: ADDED },
            Request { begun: at(3), ended: at(9), place: 1, outcome: Outcome::Del(Deleted::Late) },
        ];
        let timeouts = [Timeout { attempt: 1, arrived: at(8), is_prompt: true }];
        let judged = |heard: &dyn Fn(&Request) -> bool| {
            History { wheel: WHEEL, requests: &requests, timeouts: &timeouts, heard }.check()
        };
        assert_eq!(judged(&|_| true).map_err(|(breach, _)| breach), Err(Breach::LateInTime));
        // A sidecar that was cut off could tell nobody, and the wheel went on without it.
        assert_eq!(judged(&|request| request.place == 0), Ok(()));
    }
}
