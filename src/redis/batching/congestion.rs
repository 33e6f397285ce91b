//! Limits how many messages a link sends to Redis at once, based on how long the answers take. A *link* connects a
//! sidecar to the Redis of one ring.
//!
//! Redis serves its connections in turns. The more scripts all links of all sidecars have in flight, the longer a turn
//! takes. A link cannot see the other links. So each link has a congestion window, as in TCP: the link sends fewer
//! messages if its answers take long, and more otherwise. With this limit, a thousand links do not overload Redis, and
//! a single link can use the whole capacity of Redis.

use std::time::{Duration, Instant};

use crate::redis::batching::chunk::MAX_CHUNK;

/// Maximum number of scripts that a link has in flight. Redis also keeps this number of last answers for each link.
pub(crate) const DEPTH: usize = 2;

/// The window at the beginning and after a pause, in messages. If a thousand links begin at once, Redis can process
/// their messages within [`RESPONSE_TIMEOUT`](crate::redis::options::RESPONSE_TIMEOUT).
const FIRST: usize = 250;

/// The minimum window, in messages. With fewer messages, the fixed cost of a script exceeds the cost of its messages.
const LEAST: usize = 50;

/// If an answer waits in Redis for longer than this, Redis counts as overloaded, and the window is halved. The wait is
/// the round trip minus the round trip to an idle Redis.
const TARGET: Duration = Duration::from_millis(50);

/// The length of a period in which less than half of the window is used. After each such period, a window above its
/// initial size is halved, and a window below that size is doubled, until the window has its initial size.
const UNUSED: Duration = Duration::from_millis(250);

/// Minimum number of waiting messages for which a second script is sent while one is in flight.
pub(crate) const LEAST_FOR_SECOND: usize = 256;

/// If a round trip is longer than this, most of it counts as time in the network. Two full scripts take Redis about two
/// milliseconds.
const FAR: Duration = Duration::from_millis(4);

/// Returns the number of waiting messages at which a second script is sent while one is in flight.
///
/// A script has a fixed cost in Redis, so it should carry many messages. The threshold is half of `unanswered`, the
/// messages that waited or were in flight at the last answer. So under constant load, the two scripts carry about
/// equally many messages. If the round trip is mostly time in the network, the threshold is the minimum, because
/// waiting would only delay answers.
pub(crate) fn second_script_threshold(unanswered: usize, round_trip: Duration) -> usize {
    if round_trip > FAR { LEAST_FOR_SECOND } else { (unanswered / 2).clamp(LEAST_FOR_SECOND, MAX_CHUNK / 2) }
}

/// The congestion window of a link: the maximum number of messages that one script carries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    messages: usize,
    /// The last time at which an answer showed that at least half of the window was used. Each change of an unused
    /// window moves this time forward by [`UNUSED`].
    used_at: Instant,
    /// The last time at which an answer reduced the window.
    congested_at: Option<Instant>,
}

impl Window {
    pub(crate) fn new(now: Instant) -> Window {
        Window { messages: FIRST, used_at: now, congested_at: None }
    }

    /// Returns the maximum number of messages for a script that is sent at `now`. If the window was not used lately,
    /// first moves it towards its initial size.
    pub(crate) fn messages(&mut self, now: Instant) -> usize {
        while self.messages != FIRST && now.saturating_duration_since(self.used_at) >= UNUSED {
            let is_large = self.messages > FIRST;
            self.messages = if is_large { (self.messages / 2).max(FIRST) } else { (self.messages * 2).min(FIRST) };
            self.used_at += UNUSED;
        }
        self.messages
    }

    /// Returns the maximum number of scripts in flight. It is one if the window is small, because two small scripts
    /// cost Redis more than one larger script.
    pub(crate) fn scripts(&self) -> usize {
        if self.messages < LEAST_FOR_SECOND { 1 } else { DEPTH }
    }

    /// Adapts the window to the answer of a script. `messages` is the number of messages in that script. `waited` is
    /// its round trip, minus the round trip to an idle Redis.
    pub(crate) fn answered(&mut self, messages: usize, sent_at: Instant, waited: Duration, now: Instant) {
        if messages * 2 >= self.messages {
            self.used_at = now;
        }
        if waited > TARGET {
            // The answer to a script that was sent before the last halving does not halve the window again.
            if self.congested_at.is_none_or(|congested| sent_at >= congested) {
                self.messages = (self.messages / 2).max(LEAST);
                self.congested_at = Some(now);
            }
        } else if messages >= self.messages {
            let more = if waited < TARGET / 2 { self.messages } else { LEAST };
            self.messages = (self.messages + more).min(MAX_CHUNK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Simulates a link that always has more messages than its window. `waits` are the waits of its answers in ms.
    /// Returns the window after each answer.
    fn full(window: &mut Window, now: Instant, waits: &[u64]) -> Vec<usize> {
        let answered = |wait: &u64| {
            let messages = window.messages(now);
            window.answered(messages, now, ms(*wait), now);
            window.messages(now)
        };
        waits.iter().map(answered).collect()
    }

    #[test]
    fn a_window_grows_while_redis_has_time_and_is_halved_when_answers_wait() {
        let start = Instant::now();
        let mut window = Window::new(start);
        assert_eq!(full(&mut window, start, &[24, 0, 1]), [500, 1_000, 1_000]);
        assert_eq!(full(&mut window, start, &[51, 60, 40, 50, 30]), [500, 250, 300, 350, 400]);
        assert_eq!(full(&mut window, start, &[500, 500, 500, 500, 0]), [200, 100, 50, 50, 100]);
    }

    #[test]
    fn a_second_script_goes_where_the_first_is_not_small() {
        let start = Instant::now();
        let mut window = Window::new(start);
        assert_eq!((window.messages, window.scripts()), (250, 1));
        full(&mut window, start, &[0]);
        assert_eq!((window.messages, window.scripts()), (500, 2));
    }

    #[test]
    fn scripts_in_flight_together_halve_it_once() {
        let start = Instant::now();
        let mut window = Window::new(start);
        full(&mut window, start, &[0; 5]);
        window.answered(1_000, start, ms(300), start + ms(300));
        window.answered(1_000, start, ms(310), start + ms(310));
        assert_eq!(window.messages(start + ms(310)), 500);
        window.answered(500, start + ms(300), ms(100), start + ms(400));
        assert_eq!(window.messages(start + ms(400)), 250);
    }

    #[test]
    fn a_window_that_is_not_used_becomes_the_first_again_and_one_that_is_half_used_stays() {
        let start = Instant::now();
        let mut window = Window::new(start);
        full(&mut window, start, &[0; 5]);
        for after in 1..10 {
            let now = start + ms(200 * after);
            window.answered(500, now, ms(1), now);
            assert_eq!(window.messages(now), 1_000);
        }
        for (after, messages) in [(1_800, 1_000), (2_049, 1_000), (2_050, 500), (2_300, FIRST), (60_000, FIRST)] {
            assert_eq!(window.messages(start + ms(after)), messages, "after {after} ms");
        }
        window.answered(10, start, ms(1), start + ms(60_000));
        assert_eq!(window.messages(start + ms(60_000)), FIRST, "the window was not full");
        full(&mut window, start + ms(60_000), &[500; 5]);
        for (after, messages) in [(60_249, 50), (60_250, 100), (60_750, FIRST), (99_000, FIRST)] {
            assert_eq!(window.messages(start + ms(after)), messages, "after {after} ms");
        }
    }

    /// Simulates 256 links. Redis needs 60 µs per script and 1.5 µs per message, and answers at the end of each turn.
    #[test]
    fn many_links_queue_no_more_than_redis_does_in_a_moment() {
        let mut now = Instant::now();
        let mut windows = vec![Window::new(now); 256];
        let mut turns = Vec::new();
        for _ in 0..200 {
            let sent: Vec<usize> = windows.iter_mut().map(|window| window.messages(now)).collect();
            let scripts = windows.iter().map(Window::scripts);
            let micros: usize =
                scripts.zip(&sent).map(|(scripts, messages)| scripts * (60 + messages * 3 / 2)).sum();
            let (begun, turn) = (now, Duration::from_micros(micros as u64));
            now += turn;
            windows.iter_mut().zip(sent).for_each(|(window, sent)| window.answered(sent, begun, turn, now));
            turns.push(turn);
        }
        let longest = turns.iter().max().unwrap();
        assert!(*longest < ms(150), "{longest:?}");
    }

    #[test]
    fn a_second_script_waits_for_half_of_the_unanswered_messages_unless_redis_is_far() {
        let near = [(0, 256), (512, 256), (700, 350), (1_000, 500), (100_000, 500)];
        for (unanswered, threshold) in near {
            assert_eq!(second_script_threshold(unanswered, Duration::from_millis(2)), threshold);
            assert_eq!(second_script_threshold(unanswered, Duration::from_millis(5)), 256);
        }
    }
}
