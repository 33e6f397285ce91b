//! What was asked and answered about a message, in what batches it was, and whether one has a right to it.
//!
//! The checker knows the promises and no implementation: it follows every course that things may have taken between
//! what clients saw, and a history is right if one of them leads to its end.

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
    /// No answer, or an Error that does not know: it may be done at any time from then on, or never.
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
pub enum Did {
    Add { ack_timeout_ticks: u16, added: Added },
    Del(Deleted),
}

/// A request for a message; one was answered, or given up, before the next was sent.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub begun: Instant,
    pub ended: Instant,
    /// The place of the sidecar that was asked.
    pub at: usize,
    pub did: Did,
}

/// That a message was in a batch with an attempt: which of its AddNewMsgs, from 1 on.
#[derive(Clone, Copy, Debug)]
pub struct TimedOut {
    pub attempt: u8,
    pub arrived: Instant,
}

/// Where a message may be. Its lives are numbered as its AddNewMsgs are, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Out,
    InFlight(u8),
    Late(u8),
}

/// A course that things may have taken so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Course {
    place: Place,
    /// The lives that timed out, a bit each.
    timed_out: u32,
    /// The requests that may still be done, a bit each.
    pending: u32,
}

/// A message's requests in their order, and its batches.
pub struct History<'a> {
    pub wheel: Wheel,
    pub asked: &'a [Asked],
    pub timed_out: &'a [TimedOut],
    /// Whether a DelMsg was heard by a sidecar that could tell the others.
    pub heard: &'a dyn Fn(&Asked) -> bool,
}

/// A DelMsg sent so long before the deadline, and heard, is no late one.
const IN_TIME: Duration = Duration::from_secs(1);

impl History<'_> {
    /// Whether every promise was kept, or which was not.
    pub fn check(&self) -> Result<(), String> {
        let mut seen = 0_u32;
        for TimedOut { attempt, arrived } in self.timed_out {
            let life = attempt.checked_sub(1).ok_or("attempt 0")?;
            let add = self.adds().nth(usize::from(life)).ok_or("an attempt that was never added")?;
            if seen & 1 << life != 0 {
                return Err(format!("attempt {attempt} is in two batches"));
            }
            seen |= 1 << life;
            let earliest = self.deadline_of(add);
            if *arrived < earliest {
                return Err(format!("attempt {attempt} came {:?} early", earliest - *arrived));
            }
        }
        let mut courses = BTreeSet::from([Course { place: Place::Out, timed_out: 0, pending: 0 }]);
        for index in 0..self.asked.len() {
            let before = self.unasked(courses, seen, Some(self.asked[index].ended));
            courses = before.iter().filter_map(|course| self.after(index, *course)).collect();
            if courses.is_empty() {
                return Err(format!("answer {index} cannot be, after {before:?}"));
            }
        }
        let over = |course: &Course| course.timed_out == seen && !matches!(course.place, Place::InFlight(_));
        let ends = self.unasked(courses, seen, None);
        if ends.iter().any(over) { Ok(()) } else { Err(format!("batches of {seen:b}, and none of {ends:?}")) }
    }

    fn adds(&self) -> impl Iterator<Item = &Asked> {
        self.asked.iter().filter(|asked| matches!(asked.did, Did::Add { .. }))
    }

    /// The earliest moment at which a life may time out.
    fn deadline_of(&self, add: &Asked) -> Instant {
        let Did::Add { ack_timeout_ticks, .. } = add.did else { unreachable!("it is an AddNewMsg") };
        add.begun + self.wheel.ticks(ack_timeout_ticks)
    }

    fn deadline(&self, life: u8) -> Instant {
        self.deadline_of(self.adds().nth(usize::from(life)).expect("a life has its AddNewMsg"))
    }

    /// The number of the life that the AddNewMsg at an index begins.
    fn life(&self, index: usize) -> u8 {
        let before = self.asked[..index].iter().filter(|asked| matches!(asked.did, Did::Add { .. }));
        u8::try_from(before.count()).expect("a message has few lives")
    }

    /// All that may have become of these courses by a moment, without another answer.
    fn unasked(&self, courses: BTreeSet<Course>, seen: u32, by: Option<Instant>) -> BTreeSet<Course> {
        let mut all = courses.clone();
        let mut open: Vec<Course> = courses.into_iter().collect();
        while let Some(course) = open.pop() {
            let mut next = Vec::new();
            if let Place::InFlight(life) = course.place {
                let timed_out = course.timed_out | 1 << life;
                if timed_out & !seen == 0 && by.is_none_or(|by| by >= self.deadline(life)) {
                    next.push(Course { place: Place::Late(life), timed_out, ..course });
                }
            }
            for index in (0..self.asked.len()).filter(|index| course.pending & 1 << index != 0) {
                let pending = course.pending & !(1 << index);
                match (self.asked[index].did, course.place) {
                    (Did::Add { .. }, _) => {
                        let place = Place::InFlight(self.life(index));
                        next.push(Course { place, pending, ..course });
                    }
                    (Did::Del(_), Place::InFlight(_)) => {
                        next.push(Course { place: Place::Out, pending, ..course });
                    }
                    (Did::Del(_), _) => {}
                }
            }
            open.extend(next.into_iter().filter(|next| all.insert(*next)));
        }
        all
    }

    /// What a course becomes by an answer; none, if the answer cannot be.
    fn after(&self, index: usize, course: Course) -> Option<Course> {
        let asked = &self.asked[index];
        let in_flight = matches!(course.place, Place::InFlight(_));
        match asked.did {
            Did::Add { added: Added::Accepted { rearmed }, .. } => {
                (rearmed == in_flight).then(|| Course { place: Place::InFlight(self.life(index)), ..course })
            }
            Did::Add { added: Added::Unclear, .. } | Did::Del(Deleted::Unclear) => {
                Some(Course { pending: course.pending | 1 << index, ..course })
            }
            Did::Add { added: Added::Refused, .. } | Did::Del(Deleted::Refused) => Some(course),
            Did::Del(Deleted::Done) => in_flight.then_some(Course { place: Place::Out, ..course }),
            Did::Del(Deleted::Late) => match course.place {
                Place::Late(life) => {
                    let in_time = asked.begun + IN_TIME <= self.deadline(life) && (self.heard)(asked);
                    (asked.ended >= self.deadline(life) && !in_time).then_some(course)
                }
                Place::Out | Place::InFlight(_) => None,
            },
            Did::Del(Deleted::Unknown) => match course.place {
                Place::Out => Some(course),
                // It is remembered for a revolution.
                Place::Late(life) => (asked.ended >= self.deadline(life) + self.wheel.ticks(self.wheel.slots))
                    .then_some(Course { place: Place::Out, ..course }),
                Place::InFlight(_) => None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHEEL: Wheel = Wheel { tick: Duration::from_secs(1), slots: 5 };
    const ADDED: Did = Did::Add { ack_timeout_ticks: 5, added: Added::Accepted { rearmed: false } };
    const REARMED: Did = Did::Add { ack_timeout_ticks: 5, added: Added::Accepted { rearmed: true } };
    const MAYBE_ADDED: Did = Did::Add { ack_timeout_ticks: 5, added: Added::Unclear };
    const NOT_ADDED: Did = Did::Add { ack_timeout_ticks: 5, added: Added::Refused };

    /// What is said of requests, each with its second, and of batches, each with its attempt and second.
    fn check(asked: &[(u64, Did)], batches: &[(u8, u64)]) -> Result<(), String> {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let asked: Vec<Asked> = asked
            .iter()
            .map(|(second, did)| Asked { begun: at(*second), ended: at(*second), at: 0, did: *did })
            .collect();
        let timed_out: Vec<TimedOut> =
            batches.iter().map(|(attempt, second)| TimedOut { attempt: *attempt, arrived: at(*second) }).collect();
        History { wheel: WHEEL, asked: &asked, timed_out: &timed_out, heard: &|_| true }.check()
    }

    #[test]
    fn what_may_be_is_right() {
        let del = Did::Del;
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
            // Done after the DelMsg, by a sidecar that had stood still.
            (&[(0, MAYBE_ADDED), (1, del(Deleted::Unknown))], &[(1, 7)]),
        ] {
            assert_eq!(check(asked, batches), Ok(()), "{asked:?} {batches:?}");
        }
    }

    #[test]
    fn what_breaks_a_promise_is_seen() {
        let del = Did::Del;
        for (asked, batches, why) in [
            (&[(0, ADDED)][..], &[][..], "lost"),
            (&[(0, ADDED)], &[(1, 4)], "early"),
            (&[(0, ADDED)], &[(1, 6), (1, 7)], "in two batches"),
            (&[(0, ADDED)], &[(2, 6)], "never added"),
            (&[(0, NOT_ADDED)], &[(1, 6)], "refused, and in a batch"),
            (&[(0, ADDED), (1, del(Deleted::Done))], &[(1, 6)], "acknowledged, and in a batch"),
            (&[(0, ADDED), (1, del(Deleted::Unknown))], &[(1, 6)], "accepted, and unknown"),
            (&[(0, ADDED), (6, del(Deleted::Late))], &[], "late, and in no batch"),
            (&[(0, ADDED), (4, del(Deleted::Late))], &[(1, 6)], "decided early"),
            (&[(0, ADDED), (9, del(Deleted::Unknown))], &[(1, 6)], "forgotten early"),
            (&[(0, ADDED), (1, REARMED)], &[(1, 6), (2, 7)], "re-armed, and in the batch of before"),
            (&[(0, ADDED), (1, ADDED)], &[(2, 7)], "in flight, and not re-armed"),
            (&[(0, ADDED), (4, ADDED)], &[(1, 6), (2, 10)], "in flight until its time, and not re-armed"),
            (&[(0, ADDED), (1, del(Deleted::Done)), (2, REARMED)], &[(2, 8)], "acknowledged, and re-armed"),
            (&[(0, ADDED), (1, MAYBE_ADDED)], &[], "lost, re-armed or not"),
            (&[(0, MAYBE_ADDED), (1, del(Deleted::Done))], &[(1, 6)], "acknowledged, so it had been added"),
        ] {
            assert!(check(asked, batches).is_err(), "{why}: {asked:?} {batches:?}");
        }
    }

    #[test]
    fn a_del_msg_in_time_counts_however_late_its_answer_is() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let asked = [
            Asked { begun: at(0), ended: at(0), at: 0, did: ADDED },
            Asked { begun: at(3), ended: at(9), at: 1, did: Did::Del(Deleted::Late) },
        ];
        let timed_out = [TimedOut { attempt: 1, arrived: at(8) }];
        let judged = |heard: &dyn Fn(&Asked) -> bool| {
            History { wheel: WHEEL, asked: &asked, timed_out: &timed_out, heard }.check()
        };
        assert!(judged(&|_| true).is_err());
        // Where nobody heard it, the wheel went on without.
        assert_eq!(judged(&|asked| asked.at == 0), Ok(()));
    }
}
