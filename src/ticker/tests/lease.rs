//! Tests of leaders, followers, and leaders that are deposed.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_follower_asks_after_its_pause_and_at_once_when_the_lease_is_free() {
    let script = Script::new([follows(1_000), follows(1_000), follows(1_000), leads(7, None)], DrainOutcome::Kept);
    let (_handle, metrics) = script.start();
    sleep(1_500).await;
    assert_eq!(script.times(Call::Maintain), [0, 1_000]);
    assert_eq!(metrics.leader_changes.get(), 0);
    script.on_lease_free.lock().as_ref().unwrap()();
    sleep(10).await;
    assert_eq!(script.times(Call::Maintain), [0, 1_000, 1_500]);
    assert!(script.times(Call::Advance).is_empty(), "a follower does not move the pointer");
    sleep(1_000).await;
    assert_eq!(script.times(Call::Advance), [2_500]);
    assert_eq!(metrics.leader_changes.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_leader_renews_in_time_and_turns_the_ring_meanwhile() {
    let renewed = (1..=9).map(|second| leads(7, Some(TICK * second)));
    let script = Script::new(renewed, DrainOutcome::Kept);
    let (_handle, metrics) = script.start();
    sleep(3_500).await;
    assert_eq!(script.times(Call::Maintain), [0, 1_000, 2_000, 3_000]);
    assert_eq!(script.times(Call::Advance), [0, 1_000, 2_000, 3_000]);
    assert_eq!(metrics.leader_changes.get(), 1, "a renewal is no change of leader");
}

#[tokio::test(start_paused = true)]
async fn a_deposed_leader_asks_the_lease_at_once_but_not_without_pause() {
    let script = Script::new([leads(7, Some(TICK)), leads(7, Some(TICK * 60))], DrainOutcome::Kept);
    script.advances.lock().extend([Advance::Waiting(now() + TICK), Advance::Deposed, Advance::Deposed]);
    let (_handle, metrics) = script.start();
    sleep(1_500).await;
    // The lease and the ring disagree twice, with a pause each time. Then they agree.
    assert_eq!(script.times(Call::Maintain), [0, 1_000, 1_000, 1_100, 1_100, 1_200]);
    assert_eq!(script.times(Call::Advance), [0, 1_000, 1_100, 1_200]);
    assert_eq!(metrics.leader_changes.get(), 1);

    let script = Script::new(
        [leads(7, Some(TICK)), leads(7, Some(TICK * 60)), follows(1_000), leads(9, Some(TICK * 60))],
        DrainOutcome::Kept,
    );
    script.advances.lock().extend([Advance::Waiting(now() + TICK), Advance::Deposed]);
    let (_handle, metrics) = script.start();
    sleep(2_500).await;
    assert_eq!(script.times(Call::Maintain), [0, 1_000, 1_000, 2_000]);
    assert_eq!(script.times(Call::Advance), [0, 1_000, 2_000], "a new leader calls the ring at once");
    assert_eq!(metrics.leader_changes.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_lost_right_after_each_election_makes_no_storm_of_elections() {
    let elected = (1..=9).map(|second| leads(6 + second, Some(TICK * u32::try_from(second).unwrap())));
    let script = Script::new(elected, DrainOutcome::Kept);
    script.advances.lock().extend(repeat_n(Advance::Deposed, 4));
    let (_handle, metrics) = script.start();
    sleep(3_500).await;
    assert_eq!(script.times(Call::Maintain), [0, 1_000, 2_000, 3_000]);
    assert_eq!(script.times(Call::Advance), [0, 1_000, 2_000, 3_000]);
    assert_eq!(metrics.leader_changes.get(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_loses_its_lease_ignores_notices_from_the_time_that_it_led() {
    let script =
        Script::new([leads(7, Some(TICK)), follows(1_000), leads(9, Some(TICK * 60))], DrainOutcome::Kept);
    let (_handle, metrics) = script.start();
    sleep(500).await;
    script.on_lease_free.lock().as_ref().unwrap()();
    sleep(2_000).await;
    assert_eq!(script.times(Call::Maintain), [0, 1_000, 2_000]);
    assert_eq!(metrics.leader_changes.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_is_asked_again_after_a_pause() {
    let script = Script::new([leads(7, Some(TICK * 60))], DrainOutcome::Kept);
    *script.refusals.lock() = 2;
    let _running = script.start();
    sleep(500).await;
    assert_eq!(script.times(Call::Maintain), [0, 100, 200]);
    assert_eq!(script.times(Call::Advance), [200]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_does_not_wait_until_a_large_tick_is_published() {
    let script = Script::new([leads(7, Some(TICK * 60))], DrainOutcome::Kept);
    let (handle, _) = script.start();
    let more = PublishStep { more: true, ..PublishStep::default() };
    script.steps.lock().extend(repeat_n(more, 5_000));
    sleep(100).await;
    assert!(script.times(Call::Publish).len() > 10, "publishing has begun");
    handle.drain().await.unwrap();
    assert!(script.times(Call::Release)[0] <= 110, "{:?}", script.times(Call::Release));
    assert!(script.steps.lock().len() > 4_000, "the next leader publishes the rest");
}
