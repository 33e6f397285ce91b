use ackwheel::core::{Tick, TickCounts, TimedOut};

use super::*;

const ACK_TIMEOUT: Duration = Duration::from_secs(3);
const TICK: Duration = Duration::from_millis(200);
const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// Message 0 goes to phone 7, which is online, and message 1 to phone 8, which is not.
fn messages() -> [Message; 2] {
    [Message::new(0, 7), Message::new(1, 8)]
}

/// Both are added; the answer comes 5 ms after the frame was sent.
fn ledger() -> (Ledger, Vec<Planned>, Instant) {
    let [online, offline] = messages();
    let plan = vec![
        Planned { message: online, due: Duration::ZERO, round_trip: Some(SECOND) },
        Planned { message: offline, due: Duration::ZERO, round_trip: None },
    ];
    let mut ledger = Ledger::new(&plan, ACK_TIMEOUT, TICK);
    let start = Instant::now();
    assert_eq!(ledger.open(), 0);
    ledger.sending(&messages(), start);
    ledger.added(&messages(), &[AddOutcome::Added; 2], start + 5 * MS);
    (ledger, plan, start)
}

fn batch(tick: u64, delivery_count: u32, messages: &[Message]) -> TimeoutBatch {
    let messages = messages.iter().map(|message| TimedOut { message: *message, attempt: 1 }).collect();
    let id = BatchId { tick: Tick(tick), epoch: 1, ring: 0, seq: 0 };
    TimeoutBatch { id, delivery_count, age_ms: 0, counts: TickCounts::default(), last: true, messages }
}

/// The kinds of mismatches, each as often as it was found.
fn kinds(ledger: &Ledger) -> Vec<&'static str> {
    let by_kind = ledger.mismatches().by_kind();
    by_kind.flat_map(|(kind, count)| vec![kind; usize::try_from(count).unwrap()]).collect()
}

#[test]
fn what_ends_as_the_trace_says_is_no_mismatch() {
    let (mut ledger, plan, start) = ledger();
    let [online, offline] = messages();
    ledger.deleted(&[online], &[DelOutcome::Acked], start + SECOND);
    ledger.delivered(&batch(15, 1, &[offline]), start + ACK_TIMEOUT);
    ledger.delivered(&batch(15, 2, &[offline]), start + 10 * ACK_TIMEOUT);
    ledger.close();
    assert_eq!(kinds(&ledger), [""; 0], "a redelivery neither");
    assert_eq!((ledger.pushed(), ledger.acked(), ledger.timed_out(), ledger.settled()), (2, 1, 1, 2));
    assert_eq!(ledger.clients_without_ack(&plan), 1);
    assert!(ledger.ack_latency().equivalent(ledger.ack_latency().max(), 1_000_000), "in µs");
}

#[test]
fn a_batch_is_early_counted_from_the_sending_and_late_counted_from_the_answer() {
    let [_, offline] = messages();
    let after = |after: Duration| {
        let (mut ledger, _, start) = ledger();
        ledger.delivered(&batch(15, 1, &[offline]), start + after);
        kinds(&ledger)
    };
    let latest = 5 * MS + ACK_TIMEOUT + TICK + 700 * MS;
    assert_eq!(after(ACK_TIMEOUT - MS), ["early"]);
    assert_eq!(after(ACK_TIMEOUT), [""; 0]);
    assert_eq!(after(latest), [""; 0]);
    assert_eq!(after(latest + MS), ["late"]);
}

#[test]
fn each_message_has_one_outcome_and_the_right_one() {
    let (mut wrong, _, start) = ledger();
    let [online, offline] = messages();
    wrong.deleted(&[online], &[DelOutcome::Late], start + SECOND);
    wrong.delivered(&batch(15, 1, &[online]), start + ACK_TIMEOUT);
    wrong.close();
    assert_eq!(kinds(&wrong), ["not_acked", "timed_out_though_online", "never_timed_out"]);

    let (mut twice, _, start) = ledger();
    twice.deleted(&[online], &[DelOutcome::Acked], start + SECOND);
    twice.delivered(&batch(15, 1, &[offline, offline]), start + ACK_TIMEOUT);
    twice.delivered(&batch(16, 1, &[offline, online]), start + ACK_TIMEOUT);
    assert_eq!(kinds(&twice), ["timed_out_though_online", "timed_out_twice", "timed_out_twice"]);
}

#[test]
fn strangers_and_batches_that_change_are_noticed() {
    let (mut ledger, _, start) = ledger();
    let [_, offline] = messages();
    let now = start + ACK_TIMEOUT;
    ledger.delivered(&batch(15, 1, &[offline, Message::new(1, 7), Message::new(u64::MAX, 8)]), now);
    assert_eq!(kinds(&ledger), ["stranger"; 2]);
    ledger.delivered(&batch(15, 1, &[offline]), now);
    ledger.delivered(&batch(15, 2, &[messages()[0]]), now);
    assert_eq!(kinds(&ledger)[..2], ["duplicate_delivery", "changed_redelivery"]);
}

#[test]
fn what_was_left_over_before_the_first_push_is_not_judged() {
    let mut ledger = Ledger::new(&[], ACK_TIMEOUT, TICK);
    ledger.delivered(&batch(3, 1, &messages()), Instant::now());
    assert_eq!(ledger.open(), 1);
    assert_eq!(kinds(&ledger), [""; 0]);
}

#[test]
fn a_failed_request_is_one_mismatch_a_message_and_nothing_more_is_asked_of_it() {
    let (mut ledger, _, start) = ledger();
    let error = ClientError::InvalidRequest("no".to_owned());
    ledger.failed(Kind::AckFailed, &messages(), &error);
    ledger.delivered(&batch(15, 1, &messages()), start);
    ledger.close();
    assert_eq!(kinds(&ledger), ["ack_failed"; 2]);
    assert_eq!(ledger.settled(), 2);
}
