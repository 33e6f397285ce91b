//! Detects from the timing of answers whether a Redis stalls, or stalled lately. In a *stall*, Redis answers nothing
//! although requests wait.
//!
//! During a stall, Acks wait in all sidecars. If a tick expired before Redis applied those Acks, messages would time
//! out although clients have acknowledged them. All connections of this process to one Redis share a detector. An
//! answer on any connection shows that Redis works, even if a request on another connection waits long.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::redis::options::RESPONSE_TIMEOUT;

/// A time without answers is a stall only if it is longer than this. A long script, or the scheduling of processes, can
/// also delay answers for this long.
const UNNOTICED: Duration = Duration::from_millis(100);

/// The length of a period for which the shortest round trip is remembered. The detector uses the current and the
/// previous period. Older round trips are forgotten, since the network path may change.
const ROUND_TRIPS_KEPT: Duration = Duration::from_secs(10);

/// Maximum round trip that is attributed to the network path. If all round trips take longer, Redis itself is slow.
const LONGEST_WAY: Duration = Duration::from_millis(250);

/// A detector for the stalls of one Redis.
#[derive(Debug, Default)]
pub(crate) struct StallDetector(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    unanswered: u32,
    /// The beginning of the current time without answers: the last answer, or the first request after an idle time.
    /// Used only while a request waits for its answer.
    since: Option<Instant>,
    answers: u64,
    /// Number of probes sent, and number of the last answered probe. A probe is a script without effect that is sent
    /// while an answer is late.
    probes: [u64; 2],
    /// The last two round trips, from which [`patience`](State::patience) is computed.
    round_trips: [Duration; 2],
    /// For the estimate of the round trip to an idle Redis: the shortest round trip of the current period, and that of
    /// the previous period. `least_since` is the beginning of the current period.
    least: [Option<Duration>; 2],
    least_since: Option<Instant>,
    /// The end of the last stall, and its length.
    stall: Option<(Instant, Duration)>,
}

/// Whether a Redis stalls at a given moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Redis answers.
    Answers,
    /// Redis has not answered for too long, and requests wait.
    Silent,
    /// Redis answers again after a stall. Requests that waited during the stall may still arrive within this duration.
    CatchesUp(Duration),
}

impl StallDetector {
    /// Records that a request is sent. The caller must report the outcome to the returned value, or drop it.
    pub(crate) fn request_sent(&self, now: Instant) -> Unanswered<'_> {
        let mut state = self.0.lock();
        if state.unanswered == 0 {
            state.since = Some(now);
        }
        state.unanswered += 1;
        Unanswered { detector: self, sent_at: now, answers: state.answers, probes: state.probes[0] }
    }

    /// Records that a probe is sent. The caller must send only one probe at a time.
    pub(crate) fn probe_sent(&self, now: Instant) -> Unanswered<'_> {
        let unanswered = self.request_sent(now);
        self.0.lock().probes[0] += 1;
        unanswered
    }

    /// Records that the last probe was answered.
    pub(crate) fn probe_answered(&self) {
        let mut state = self.0.lock();
        state.probes[1] = state.probes[0];
    }

    /// Returns the number of requests that Redis has answered, including probes.
    pub(crate) fn answers(&self) -> u64 {
        self.0.lock().answers
    }

    /// Returns an estimate of the round trip to an idle Redis: the shortest recent round trip.
    pub(crate) fn least_round_trip(&self) -> Duration {
        let least = self.0.lock().least;
        least.into_iter().flatten().min().unwrap_or_default().min(LONGEST_WAY)
    }

    /// Returns how long Redis may answer nothing before this counts as a stall. If the last two round trips both took
    /// long, the network path may be long, so the limit is higher.
    pub(crate) fn patience(&self) -> Duration {
        self.0.lock().patience()
    }

    /// Returns whether Redis stalls at `now`, or stalled shortly before.
    pub(crate) fn look(&self, now: Instant) -> Look {
        let state = self.0.lock();
        if state.unanswered > 0 && state.length(now) > state.patience() {
            return Look::Silent;
        }
        let Some((end, length)) = state.stall else { return Look::Answers };
        match (end + length).checked_duration_since(now) {
            None | Some(Duration::ZERO) => Look::Answers,
            // After a stall of at least RESPONSE_TIMEOUT, sidecars may have to connect again. So the time until their
            // requests arrive is unknown.
            Some(_) if length >= RESPONSE_TIMEOUT => Look::CatchesUp(Duration::MAX),
            Some(left) => Look::CatchesUp(left),
        }
    }
}

impl State {
    fn patience(&self) -> Duration {
        (self.round_trips[0].min(self.round_trips[1]) * 2).max(UNNOTICED)
    }

    /// Returns how long Redis has answered nothing. Valid only while a request waits.
    fn length(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Records a stall that ends now, if the time without answers was longer than the limit.
    fn record_stall(&mut self, now: Instant) {
        let length = self.length(now);
        if length > self.patience() {
            self.stall = Some((now, length));
        }
    }
}

/// A request without an answer. The detector counts the request as unanswered until this value is dropped.
#[derive(Debug)]
pub(crate) struct Unanswered<'a> {
    detector: &'a StallDetector,
    sent_at: Instant,
    /// The number of answers that Redis had given when the request was sent.
    pub(crate) answers: u64,
    /// The number of probes that had been sent when the request was sent.
    probes: u64,
}

impl Unanswered<'_> {
    /// Records that the request is answered.
    pub(crate) fn answered(self, now: Instant) {
        let mut state = self.detector.0.lock();
        state.record_stall(now);
        state.since = Some(now);
        state.answers += 1;
        let round_trip = now.saturating_duration_since(self.sent_at);
        state.round_trips = [state.round_trips[1], round_trip];
        if state.least_since.is_none_or(|since| now.saturating_duration_since(since) > ROUND_TRIPS_KEPT) {
            (state.least, state.least_since) = ([None, state.least[0]], Some(now));
        }
        state.least[0] = Some(state.least[0].map_or(round_trip, |least| least.min(round_trip)));
    }

    /// Returns the number of probes that were sent after the request and are answered.
    pub(crate) fn later_probes(&self) -> u64 {
        self.detector.0.lock().probes[1].saturating_sub(self.probes)
    }

    /// Records that the sidecar no longer waits for the answer.
    pub(crate) fn given_up(self, now: Instant) {
        self.detector.0.lock().record_stall(now);
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.detector.0.lock().unanswered -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn no_answer_while_a_request_waits_is_a_stall_and_an_idle_link_is_none() {
        let (detector, start) = (StallDetector::default(), Instant::now());
        detector.request_sent(start).answered(start + ms(1));
        assert_eq!(detector.look(start + ms(5_000)), Look::Answers);
        let (first, second) = (detector.request_sent(start + ms(5_000)), detector.request_sent(start + ms(5_120)));
        assert_eq!(detector.look(start + ms(5_090)), Look::Answers);
        assert_eq!(detector.look(start + ms(5_130)), Look::Silent);
        first.answered(start + ms(5_200));
        assert_eq!(detector.look(start + ms(5_210)), Look::CatchesUp(ms(190)));
        second.answered(start + ms(5_201));
        assert_eq!(detector.look(start + ms(5_399)), Look::CatchesUp(ms(1)));
        assert_eq!(detector.look(start + ms(5_400)), Look::Answers);
    }

    #[test]
    fn many_requests_in_flight_have_answers_all_the_time() {
        let (detector, start) = (StallDetector::default(), Instant::now());
        // Each request takes 300 ms, and Redis answers one every 60 ms.
        let mut under_way = Vec::new();
        for nth in 0..50 {
            under_way.push(detector.request_sent(start + ms(60 * nth)));
            if nth >= 5 {
                under_way.remove(0).answered(start + ms(60 * nth));
                assert_eq!(detector.look(start + ms(60 * nth)), Look::Answers, "{nth}");
            } else {
                // The first answer has not arrived yet, so the test pretends that Redis has just answered another
                // request.
                detector.0.lock().since = Some(start + ms(60 * nth));
            }
        }
    }

    #[test]
    fn a_long_path_is_no_stall_and_a_stall_is_no_long_path() {
        let (detector, start) = (StallDetector::default(), Instant::now());
        assert_eq!(detector.patience(), UNNOTICED);
        for (took, patience) in
            [(1, UNNOTICED), (400, UNNOTICED), (1, UNNOTICED), (300, UNNOTICED), (320, ms(600)), (310, ms(620))]
        {
            detector.request_sent(start).answered(start + ms(took));
            assert_eq!(detector.patience(), patience, "after {took} ms");
        }
    }

    #[test]
    fn the_least_round_trip_is_the_shortest_of_the_last_seconds() {
        let (detector, start) = (StallDetector::default(), Instant::now());
        assert_eq!(detector.least_round_trip(), Duration::ZERO);
        let least = |after: u64, took: u64| {
            detector.request_sent(start + ms(after)).answered(start + ms(after + took));
            detector.least_round_trip()
        };
        assert_eq!(
            [least(0, 50), least(100, 60), least(200, 40), least(300, 90)].map(|d| d.as_millis()),
            [50, 50, 40, 40]
        );
        assert_eq!(least(11_000, 70), ms(40), "the previous period still counts");
        assert_eq!(least(22_000, 80), ms(70));
        assert_eq!([least(33_000, 900), least(44_000, 900)], [ms(80), LONGEST_WAY]);
    }

    #[test]
    fn a_request_counts_the_later_probes_that_were_answered() {
        let (detector, now) = (StallDetector::default(), Instant::now());
        let first = detector.request_sent(now);
        let probe = detector.probe_sent(now);
        let second = detector.request_sent(now);
        assert_eq!((first.later_probes(), second.later_probes()), (0, 0));
        probe.answered(now);
        detector.probe_answered();
        assert_eq!((first.later_probes(), second.later_probes()), (1, 0));
        detector.probe_sent(now).given_up(now);
        assert_eq!((first.later_probes(), second.later_probes()), (1, 0));
        detector.probe_sent(now).answered(now);
        detector.probe_answered();
        assert_eq!((first.later_probes(), second.later_probes()), (3, 2));
    }

    #[test]
    fn an_answer_that_never_came_is_a_stall_too() {
        let (detector, start) = (StallDetector::default(), Instant::now());
        detector.request_sent(start).given_up(start + RESPONSE_TIMEOUT);
        assert_eq!(detector.look(start + RESPONSE_TIMEOUT + ms(100)), Look::CatchesUp(Duration::MAX));
        drop(detector.request_sent(start + ms(2_000)));
        assert_eq!(detector.look(start + ms(3_000)), Look::Answers, "a dropped request is no stall");
    }
}
