//! The silence of one Redis: whether it stalled while somebody in this process waited for an answer.
//!
//! Acknowledgements that were read meanwhile wait in all sidecars, and an expiry that comes before them reads as
//! silence of clients. Every request tells something: how long nothing at all was answered while it waited. So all links
//! to one Redis share what they know: an answer to one of them shows that Redis works, however long another waits.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::redis::options::RESPONSE_TIMEOUT;

/// A silence so short is none: a script takes as long, or a processor that has others to serve.
const UNNOTICED: Duration = Duration::from_millis(100);

/// The least round trip is that of this time and of as much before it: the way to Redis may change.
const ROUND_TRIPS_KEPT: Duration = Duration::from_secs(10);

/// No way to Redis takes longer; beyond, it is Redis that is slow.
const LONGEST_WAY: Duration = Duration::from_millis(250);

/// What is known of it.
#[derive(Debug, Default)]
pub(crate) struct StallDetector(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    unanswered: u32,
    /// Since when nothing was answered. It counts while something is unanswered.
    since: Option<Instant>,
    answers: u64,
    /// Probes that were sent, and those that were answered.
    probes: [u64; 2],
    /// How long the last two requests took that were answered.
    round_trips: [Duration; 2],
    /// The shortest of lately and of before, and since when it is lately.
    least: [Option<Duration>; 2],
    least_since: Option<Instant>,
    /// When Redis had stood still, and for how long.
    stall: Option<(Instant, Duration)>,
}

/// How it looks at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Redis answers.
    Answers,
    /// It does not, for longer than it should.
    Silent,
    /// It stood still, and what waited for it may be on its way for so long.
    CatchesUp(Duration),
}

impl StallDetector {
    /// A request goes out.
    pub(crate) fn asked(&self, now: Instant) -> Unanswered<'_> {
        let mut state = self.0.lock();
        if state.unanswered == 0 {
            state.since = Some(now);
        }
        state.unanswered += 1;
        Unanswered { silence: self, asked_at: now, answers: state.answers, probes: state.probes[0] }
    }

    /// A probe goes out; the one before is answered, or given up.
    pub(crate) fn probed(&self, now: Instant) -> Unanswered<'_> {
        let unanswered = self.asked(now);
        self.0.lock().probes[0] += 1;
        unanswered
    }

    /// The answer to the last probe has come.
    pub(crate) fn probe_answered(&self) {
        let mut state = self.0.lock();
        state.probes[1] = state.probes[0];
    }

    /// How many requests were answered.
    pub(crate) fn answers(&self) -> u64 {
        self.0.lock().answers
    }

    /// The round trip of a request if Redis has nothing else to do: the shortest lately.
    pub(crate) fn least_round_trip(&self) -> Duration {
        let least = self.0.lock().least;
        least.into_iter().flatten().min().unwrap_or_default().min(LONGEST_WAY)
    }

    /// How long a request may be under way before Redis is taken to have stood still. Where two in a row took long that
    /// is the way there, and no stall.
    pub(crate) fn patience(&self) -> Duration {
        self.0.lock().patience()
    }

    pub(crate) fn look(&self, now: Instant) -> Look {
        let state = self.0.lock();
        if state.unanswered > 0 && state.length(now) > state.patience() {
            return Look::Silent;
        }
        let Some((end, length)) = state.stall else { return Look::Answers };
        match (end + length).checked_duration_since(now) {
            None | Some(Duration::ZERO) => Look::Answers,
            // Who had no answer for so long may have to connect anew.
            Some(_) if length >= RESPONSE_TIMEOUT => Look::CatchesUp(Duration::MAX),
            Some(left) => Look::CatchesUp(left),
        }
    }
}

impl State {
    fn patience(&self) -> Duration {
        (*self.round_trips.iter().min().expect("there are two") * 2).max(UNNOTICED)
    }

    fn length(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    fn took(&mut self, round_trip: Duration, now: Instant) {
        self.round_trips = [self.round_trips[1], round_trip];
        if self.least_since.is_none_or(|since| now.saturating_duration_since(since) > ROUND_TRIPS_KEPT) {
            (self.least, self.least_since) = ([None, self.least[0]], Some(now));
        }
        self.least[0] = Some(self.least[0].map_or(round_trip, |least| least.min(round_trip)));
    }

    /// Notes a stall, if this was one.
    fn note(&mut self, now: Instant) {
        let length = self.length(now);
        if length > self.patience() {
            self.stall = Some((now, length));
        }
    }
}

/// A request without an answer. Dropped, it counts no more.
#[derive(Debug)]
pub(crate) struct Unanswered<'a> {
    silence: &'a StallDetector,
    asked_at: Instant,
    /// Answers that had come before it.
    pub(crate) answers: u64,
    /// Probes that were sent before it.
    probes: u64,
}

impl Unanswered<'_> {
    /// Its answer has come.
    pub(crate) fn answered(self, now: Instant) {
        let mut state = self.silence.0.lock();
        state.note(now);
        state.since = Some(now);
        state.answers += 1;
        state.took(now.saturating_duration_since(self.asked_at), now);
    }

    /// How many probes were sent later and are answered.
    pub(crate) fn later_probes(&self) -> u64 {
        self.silence.0.lock().probes[1].saturating_sub(self.probes)
    }

    /// Nobody waits for it any longer.
    pub(crate) fn given_up(self, now: Instant) {
        self.silence.0.lock().note(now);
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.silence.0.lock().unanswered -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_silence_while_somebody_waits_is_a_stall_and_one_while_nobody_does_is_none() {
        let (silence, start) = (StallDetector::default(), Instant::now());
        silence.asked(start).answered(start + ms(1));
        assert_eq!(silence.look(start + ms(5_000)), Look::Answers);
        let (first, second) = (silence.asked(start + ms(5_000)), silence.asked(start + ms(5_120)));
        assert_eq!(silence.look(start + ms(5_090)), Look::Answers);
        assert_eq!(silence.look(start + ms(5_130)), Look::Silent);
        first.answered(start + ms(5_200));
        assert_eq!(silence.look(start + ms(5_210)), Look::CatchesUp(ms(190)));
        second.answered(start + ms(5_201));
        assert_eq!(silence.look(start + ms(5_399)), Look::CatchesUp(ms(1)));
        assert_eq!(silence.look(start + ms(5_400)), Look::Answers);
    }

    #[test]
    fn who_has_many_requests_under_way_hears_of_redis_all_the_time() {
        let (silence, start) = (StallDetector::default(), Instant::now());
        // Each takes 300 ms, and one is answered every 60.
        let mut under_way = Vec::new();
        for nth in 0..50 {
            under_way.push(silence.asked(start + ms(60 * nth)));
            if nth >= 5 {
                under_way.remove(0).answered(start + ms(60 * nth));
                assert_eq!(silence.look(start + ms(60 * nth)), Look::Answers, "{nth}");
            } else {
                // The first answer is still to come.
                silence.0.lock().since = Some(start + ms(60 * nth));
            }
        }
    }

    #[test]
    fn a_long_way_to_redis_is_no_stall_and_a_stall_is_no_long_way() {
        let (silence, start) = (StallDetector::default(), Instant::now());
        assert_eq!(silence.patience(), UNNOTICED);
        for (took, patience) in
            [(1, UNNOTICED), (400, UNNOTICED), (1, UNNOTICED), (300, UNNOTICED), (320, ms(600)), (310, ms(620))]
        {
            silence.asked(start).answered(start + ms(took));
            assert_eq!(silence.patience(), patience, "after {took} ms");
        }
    }

    #[test]
    fn the_least_round_trip_is_the_shortest_of_the_last_seconds() {
        let (silence, start) = (StallDetector::default(), Instant::now());
        assert_eq!(silence.least_round_trip(), Duration::ZERO);
        let least = |after: u64, took: u64| {
            silence.asked(start + ms(after)).answered(start + ms(after + took));
            silence.least_round_trip()
        };
        assert_eq!(
            [least(0, 50), least(100, 60), least(200, 40), least(300, 90)].map(|d| d.as_millis()),
            [50, 50, 40, 40]
        );
        assert_eq!(least(11_000, 70), ms(40), "of before");
        assert_eq!(least(22_000, 80), ms(70));
        assert_eq!([least(33_000, 900), least(44_000, 900)], [ms(80), LONGEST_WAY]);
    }

    #[test]
    fn a_request_knows_how_many_later_probes_were_answered() {
        let (silence, now) = (StallDetector::default(), Instant::now());
        let first = silence.asked(now);
        let probe = silence.probed(now);
        let second = silence.asked(now);
        assert_eq!((first.later_probes(), second.later_probes()), (0, 0));
        probe.answered(now);
        silence.probe_answered();
        assert_eq!((first.later_probes(), second.later_probes()), (1, 0));
        silence.probed(now).given_up(now);
        assert_eq!((first.later_probes(), second.later_probes()), (1, 0));
        silence.probed(now).answered(now);
        silence.probe_answered();
        assert_eq!((first.later_probes(), second.later_probes()), (3, 2));
    }

    #[test]
    fn an_answer_that_never_came_is_a_stall_too() {
        let (silence, start) = (StallDetector::default(), Instant::now());
        silence.asked(start).given_up(start + RESPONSE_TIMEOUT);
        assert_eq!(silence.look(start + RESPONSE_TIMEOUT + ms(100)), Look::CatchesUp(Duration::MAX));
        drop(silence.asked(start + ms(2_000)));
        assert_eq!(silence.look(start + ms(3_000)), Look::Answers, "whoever asked has gone");
    }
}
