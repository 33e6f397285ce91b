//! The traffic of a healthy evening: most phones acknowledge within a second, those in bad networks take
//! their time, a few are gone, and some Acks come after all.

use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::frames;
use super::raw::Raw;
use super::sleep_until;

/// From one frame to the next.
const ROUND: Duration = Duration::from_millis(20);
/// How many messages a round adds, in the middle.
const ADDED: f64 = 30.0;
/// The load swells and sinks, and so does, not in step with it, the share of phones that are gone.
const SWELL: (Duration, Duration) = (Duration::from_secs(47), Duration::from_secs(61));

/// The share of pushes that fail, so that their messages are withdrawn.
const WITHDRAWN: f64 = 0.004;
/// The share of phones that are gone, in the middle.
const GONE: f64 = 0.016;
/// The share of phones in bad networks.
const BAD: f64 = 0.04;
/// Seconds until half of the Acks have come, and how far they spread (of the logarithm): in good networks and in bad.
const LATENCY: [(f64, f64); 2] = [(0.11, 0.6), (1.2, 1.0)];

/// The outcome of a message.
enum Fate {
    AckedAfter(Duration),
    Withdrawn,
    Gone,
}

fn fate(random: &mut SmallRng, gone: f64) -> Fate {
    let drawn: f64 = random.random();
    if drawn < gone {
        return Fate::Gone;
    }
    if drawn < gone + WITHDRAWN {
        return Fate::Withdrawn;
    }
    let (median, spread) = LATENCY[usize::from(random.random_bool(BAD))];
    // Twelve evenly spread numbers add up to a normal one, but for its mean.
    let normal = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
    Fate::AckedAfter(Duration::from_secs_f64(median * (spread * normal).exp()))
}

/// How high a swell stands after a while, from -1 to 1.
fn swell(after: Duration, period: Duration) -> f64 {
    (TAU * after.as_secs_f64() / period.as_secs_f64()).sin()
}

/// Adds and acknowledges through a sidecar for a while. No two seeds have a message in common.
pub fn run(sidecar: SocketAddr, seed: u64, length: Duration) {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut connection = Raw::greeted(sidecar);
    let mut due: BTreeMap<Instant, Vec<u64>> = BTreeMap::new();
    let mut ids = seed << 40..;
    let begun = Instant::now();
    let mut now = begun;
    while now < begun + length {
        let [load, absence] = [SWELL.0, SWELL.1].map(|period| swell(now - begun, period));
        let expected = ADDED * (1.0 + 0.25 * load) * random.random_range(0.7..1.3);
        let added: Vec<u64> = ids
            .by_ref()
            .zip(0_u32..)
            .take_while(|(_, count)| f64::from(*count) < expected)
            .map(|(id, _)| id)
            .collect();
        connection.ask(&frames::add(&added, 0, 1)).added();
        let mut withdrawn = Vec::new();
        for id in added {
            match fate(&mut random, GONE * (1.0 + 0.4 * absence)) {
                Fate::AckedAfter(latency) => due.entry(now + latency).or_default().push(id),
                Fate::Withdrawn => withdrawn.push(id),
                Fate::Gone => {}
            }
        }
        if !withdrawn.is_empty() {
            connection.ask(&frames::withdraw(&withdrawn)).outcomes();
        }
        let later = due.split_off(&now);
        let acked: Vec<u64> = std::mem::replace(&mut due, later).into_values().flatten().collect();
        if !acked.is_empty() {
            connection.ask(&frames::del(&acked)).outcomes();
        }
        sleep_until(now + ROUND);
        now = Instant::now();
    }
}
