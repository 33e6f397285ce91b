//! A trace for those who have none: conversations with a daily rhythm, in bursts.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::draw::{exponential, normal};
use crate::trace::Push;

const USERS: u64 = 500;
const DAYS: u64 = 14;
const DAY_SECONDS: u64 = 24 * 60 * 60;
/// A Monday, at midnight UTC.
const START_SECONDS: u64 = 1_735_516_800;

/// The share of conversations whose other side never writes back.
const MONOLOGUES: f64 = 0.45;
/// The share of conversations that begin within minutes of a common event: a match, a power cut.
const IN_BURSTS: f64 = 0.25;
const BURSTS: usize = 12;

const MEAN_MESSAGES: f64 = 8.0;
const MEAN_GAP_SECONDS: f64 = 75.0;
const BURST_WIDTH_SECONDS: f64 = 240.0;

/// A trace of this many messages, oldest first, the same for the same seed.
pub fn generate(messages: usize, seed: u64) -> Vec<Push> {
    let mut random = StdRng::seed_from_u64(seed);
    let bursts: Vec<u64> = (0..BURSTS).map(|_| time_of_day_and_night(&mut random)).collect();
    let mut trace = Vec::with_capacity(messages);
    while trace.len() < messages {
        let start = if random.random_bool(IN_BURSTS) {
            let event = bursts[random.random_range(0..BURSTS)];
            event.saturating_add_signed(whole_seconds(normal(&mut random) * BURST_WIDTH_SECONDS))
        } else {
            time_of_day_and_night(&mut random)
        };
        converse(&mut random, start, messages, &mut trace);
    }
    trace.sort_by_key(|push| push.seconds);
    trace
}

/// Two users write to each other, or one to another who does not answer.
fn converse(random: &mut StdRng, start: u64, messages: usize, trace: &mut Vec<Push>) {
    let (mut source, mut destination) = (user(random), user(random));
    let answered = !random.random_bool(MONOLOGUES);
    let mut seconds = start;
    while trace.len() < messages {
        trace.push(Push { source, destination, seconds });
        if random.random_bool(1.0 / MEAN_MESSAGES) {
            break;
        }
        seconds = seconds.saturating_add_signed(whole_seconds(exponential(random, MEAN_GAP_SECONDS)));
        if answered && random.random_bool(0.6) {
            std::mem::swap(&mut source, &mut destination);
        }
    }
}

/// A user: some write far more than others.
fn user(random: &mut StdRng) -> u64 {
    let uniform: f64 = random.random();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let user = (uniform * uniform * USERS as f64) as u64;
    user + 1
}

/// A time that is likelier in the evening than at four in the morning.
fn time_of_day_and_night(random: &mut StdRng) -> u64 {
    const QUIETEST_HOUR: f64 = 4.0;
    loop {
        let seconds = random.random_range(0..DAYS * DAY_SECONDS);
        #[expect(clippy::cast_precision_loss, reason = "the seconds of a day are few")]
        let hour = (seconds % DAY_SECONDS) as f64 / 3_600.0;
        let wakefulness = 0.52 - 0.48 * ((hour - QUIETEST_HOUR) / 24.0 * std::f64::consts::TAU).cos();
        if random.random_bool(wakefulness) {
            return START_SECONDS + seconds;
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "hours, not ages")]
fn whole_seconds(seconds: f64) -> i64 {
    seconds.round() as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expectation::Activity;

    #[test]
    fn the_same_seed_gives_the_same_trace_oldest_first_and_both_kinds_of_phones() {
        let trace = generate(5_000, 7);
        assert_eq!(trace, generate(5_000, 7));
        assert_ne!(trace, generate(5_000, 8));
        assert_eq!(trace.len(), 5_000);
        assert!(trace.is_sorted_by_key(|push| push.seconds));
        let activity = Activity::of(&trace);
        let online = trace.iter().filter(|push| activity.is_online(push)).count();
        assert!((1_000..4_000).contains(&online), "{online} of 5000 are online");
    }

    #[test]
    fn nights_are_quiet() {
        let trace = generate(5_000, 7);
        let at = |from, to| {
            let hour = |push: &&Push| (from..to).contains(&(push.seconds % DAY_SECONDS / 3_600));
            trace.iter().filter(hour).count()
        };
        assert!(at(2, 6) * 3 < at(14, 18), "{} by night, {} by day", at(2, 6), at(14, 18));
    }
}
