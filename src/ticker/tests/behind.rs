//! Tests of expiry that does not keep up with the ticks.

use super::*;

#[tokio::test(start_paused = true)]
async fn ticks_that_expire_before_expiry_is_done_with_earlier_ones_are_counted() {
    let script = Script::new([leads(7, None)], DrainOutcome::Kept);
    let expired = |behind| PublishStep {
        counted: Some((Tick(7), TickCounts::default())),
        more: true,
        behind,
        ..PublishStep::default()
    };
    script.steps.lock().extend([0, 1, 5, 0].map(expired));
    let (_handle, metrics) = script.start();
    sleep(900).await;
    assert_eq!(metrics.expiry_behind_ticks.get(), 2);
}
