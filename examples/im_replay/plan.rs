//! From a trace to what the replay does when.

use std::time::Duration;

use ackwheel::core::Message;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::draw::normal;
use crate::expectation::Activity;
use crate::trace::Push;

/// Half of all round trips are shorter than this share of the ack timeout.
const MEDIAN_SHARE: f64 = 0.05;
/// How far round trips spread: one in six is 2.2 times the median or longer.
const SPREAD: f64 = 0.8;
/// No round trip is longer than this share of the ack timeout.
const LONGEST_SHARE: f64 = 0.5;

/// A message of the replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// Its msg_id is its index in the trace, its client the user it goes to.
    pub message: Message,
    /// When it is pushed, from the start of the replay.
    pub due: Duration,
    /// How long its phone takes to answer; none for a phone that is offline.
    pub round_trip: Option<Duration>,
}

/// The whole trace, stretched or squeezed to `duration`, first due first.
pub fn plan(trace: &[Push], duration: Duration, ack_timeout: Duration, seed: u64) -> Vec<Planned> {
    let activity = Activity::of(trace);
    let mut random = StdRng::seed_from_u64(seed);
    let first = trace.iter().map(|push| push.seconds).min().unwrap_or_default();
    let last = trace.iter().map(|push| push.seconds).max().unwrap_or_default();
    let position = |seconds: u64| {
        #[expect(clippy::cast_precision_loss, reason = "a share of a duration")]
        let share = (seconds - first) as f64 / (last - first).max(1) as f64;
        duration.mul_f64(share)
    };
    let mut plan: Vec<Planned> = (0..)
        .zip(trace)
        .map(|(index, push)| {
            // Drawn for offline phones too, so that a phone's state does not change all later draws.
            let drawn = round_trip(&mut random, ack_timeout);
            Planned {
                message: Message::new(index, push.destination),
                due: position(push.seconds),
                round_trip: activity.is_online(push).then_some(drawn),
            }
        })
        .collect();
    plan.sort_by_key(|planned| planned.due);
    plan
}

fn round_trip(random: &mut StdRng, ack_timeout: Duration) -> Duration {
    let share = MEDIAN_SHARE * (normal(random) * SPREAD).exp();
    ack_timeout.mul_f64(share.min(LONGEST_SHARE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace() -> Vec<Push> {
        (0..1_000)
            .map(|index| Push { source: index % 7, destination: index % 5, seconds: 9_000 - index })
            .collect()
    }

    #[test]
    fn a_replay_takes_its_duration_and_keeps_the_order_of_time() {
        let plan = plan(&trace(), Duration::from_secs(20), Duration::from_secs(3), 1);
        assert_eq!((plan[0].due, plan[999].due), (Duration::ZERO, Duration::from_secs(20)));
        assert!(plan.is_sorted_by_key(|planned| planned.due));
        assert_eq!(plan[0].message, Message::new(999, 999 % 5), "the id is the index in the trace");
    }

    #[test]
    fn round_trips_stay_well_inside_the_ack_timeout_and_follow_the_seed() {
        let with_seed = |seed| plan(&trace(), Duration::from_secs(20), Duration::from_secs(3), seed);
        assert_eq!(with_seed(1), with_seed(1));
        assert_ne!(with_seed(1), with_seed(2));
        let mut round_trips: Vec<Duration> =
            with_seed(1).iter().filter_map(|planned| planned.round_trip).collect();
        round_trips.sort_unstable();
        let median = round_trips[round_trips.len() / 2].as_secs_f64();
        assert!((0.12..0.18).contains(&median), "{median}");
        assert!(*round_trips.last().unwrap() <= Duration::from_millis(1_500));
    }

    #[test]
    fn messages_of_one_second_are_all_due_at_once() {
        let at_once = [Push { source: 1, destination: 2, seconds: 5 }; 3];
        let plan = plan(&at_once, Duration::from_secs(20), Duration::from_secs(3), 1);
        assert!(plan.iter().all(|planned| planned.due == Duration::ZERO));
    }
}
