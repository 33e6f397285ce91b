use super::*;
use crate::core::{Tick, TickCounts, TimedOut};

const CONNECTION: u64 = 1;

fn ids() -> Ids {
    Ids::new(3, 0.5, false, 2)
}

/// Returns the numbers of the first `count` messages that the load acknowledges. If `acked` is false, returns the
/// numbers of messages that it does not acknowledge.
fn numbers(acked: bool, count: usize) -> Vec<u64> {
    (0..).filter(|number| ids().is_acked(CONNECTION, *number) == acked).take(count).collect()
}

fn batch(tick: u64, seq: u32, delivery_count: u32, numbers: &[u64]) -> TimeoutBatch {
    let timed_out = |number: &u64| TimedOut { message: ids().message(CONNECTION, *number), attempt: 1 };
    TimeoutBatch {
        id: BatchId { tick: Tick(tick), epoch: 1, ring: 0, seq },
        delivery_count,
        age_ms: 0,
        counts: TickCounts { added: 10, acked: 0, storm: false, drained: false },
        last: true,
        messages: numbers.iter().map(timed_out).collect(),
    }
}

fn counters(left_to_time_out: u64, numbers: u64) -> Counters {
    Counters { connection: 1, left_to_time_out, numbers, ..Counters::default() }
}

#[track_caller]
fn assert_errors(errors: &Errors, expected: &[&str]) {
    let (count, texts) = errors.first();
    assert_eq!(count, expected.len() as u64, "{texts:?}");
    for (text, words) in texts.iter().zip(expected) {
        assert!(text.contains(words), "{text:?} does not contain {words:?}");
    }
}

#[test]
fn each_message_once_is_right_and_a_redelivery_is_no_second_time() {
    let (left, errors) = (numbers(false, 5), Errors::default());
    let mut timeouts = Timeouts::new(ids());
    timeouts.take(&batch(20, 0, 1, &left[..3]), 100, &errors);
    timeouts.take(&batch(20, 0, 2, &left[..3]), 200, &errors);
    timeouts.take(&batch(20, 1, 1, &left[3..]), 300, &errors);
    timeouts.compare(&[counters(5, 100)], &errors);
    assert_errors(&errors, &[]);
    assert_eq!((timeouts.count, timeouts.redelivered, timeouts.of_others), (5, 1, 0));
}

#[test]
fn whatever_is_not_exactly_once_is_an_error() {
    let (left, acked, errors) = (numbers(false, 5), numbers(true, 1), Errors::default());
    let mut timeouts = Timeouts::new(ids());
    timeouts.take(&batch(20, 0, 1, &left[..2]), 100, &errors);
    timeouts.take(&batch(20, 0, 1, &left[..2]), 100, &errors);
    timeouts.take(&batch(20, 1, 1, &left[1..3]), 100, &errors);
    timeouts.take(&batch(20, 2, 1, &acked), 100, &errors);
    timeouts.compare(&[counters(5, left[2])], &errors);
    assert_errors(
        &errors,
        &["not as a redelivery", "in two batches", "was to be acknowledged", "2 of 5 messages", "was never added"],
    );
}

#[test]
fn messages_of_others_are_counted_apart() {
    let errors = Errors::default();
    let mut timeouts = Timeouts::new(ids());
    let mut foreign = batch(20, 0, 1, &[]);
    foreign.messages.push(TimedOut { message: crate::core::Message::new(101, 7), attempt: 1 });
    timeouts.take(&foreign, 100, &errors);
    timeouts.compare(&[counters(0, 0)], &errors);
    assert_eq!((timeouts.count, timeouts.of_others), (0, 1));
    assert_errors(&errors, &[]);
    assert!(timeouts.lateness(&TickTimes::default(), 15, &errors).is_empty());
}

#[test]
fn lateness_counts_from_the_last_sign_that_the_tick_was_not_over() {
    let (left, errors) = (numbers(false, 5), Errors::default());
    let mut tick_times = TickTimes::default();
    // A deadline is 15 ticks after the current tick. Tick 20 was current at 7,000,000 ns and had ended at 7,500,000 ns.
    for (deadline, sent_at) in [(34, 6_000_000), (35, 7_000_000), (36, 7_500_000)] {
        tick_times.record(deadline, sent_at);
    }
    let mut timeouts = Timeouts::new(ids());
    timeouts.take(&batch(20, 0, 1, &left[..4]), 7_900_000, &errors);
    timeouts.take(&batch(20, 1, 1, &left[4..]), 9_000_000, &errors);
    let lateness = timeouts.lateness(&tick_times, 15, &errors);
    assert_errors(&errors, &[]);
    assert_eq!(lateness.len(), 5);
    assert!(lateness.value_at_quantile(0.5).abs_diff(900_000) < 1_000, "{}", lateness.value_at_quantile(0.5));
    assert!(lateness.max().abs_diff(2_000_000) < 2_000, "{}", lateness.max());
}

#[test]
fn a_batch_before_the_end_of_its_tick_is_an_error_unless_the_server_drains() {
    let (left, errors) = (numbers(false, 2), Errors::default());
    let mut tick_times = TickTimes::default();
    tick_times.record(35, 7_000_000);
    let mut timeouts = Timeouts::new(ids());
    let mut drained = batch(20, 0, 1, &left[..1]);
    drained.counts.drained = true;
    timeouts.take(&drained, 5_000_000, &errors);
    assert!(timeouts.lateness(&tick_times, 15, &errors).is_empty());
    assert_errors(&errors, &[]);
    timeouts.take(&batch(20, 1, 1, &left[1..]), 6_000_000, &errors);
    assert!(timeouts.lateness(&tick_times, 15, &errors).is_empty());
    assert_errors(&errors, &["1000 us before its tick was over"]);
}
