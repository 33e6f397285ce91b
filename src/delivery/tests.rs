//! Tests of groups and subscriptions with the memory store.

use super::*;
use crate::core::{CombinedOutbox, MAX_GROUPS, Retention, RingParts, Store, StormRule, Wheel};
use crate::memory::{MemoryOptions, MemoryStore};

fn seat(clock: &Clock) -> RingParts {
    let options = MemoryOptions {
        wheel: Wheel::new(5, Duration::from_secs(1)).unwrap(),
        storm: StormRule::default(),
        retention: Retention::default(),
        max_in_flight: 10,
        threads: 1,
    };
    MemoryStore::open(options, None, clock.moment()).unwrap().0.rings()[0].clone()
}

#[tokio::test]
async fn a_group_that_only_some_rings_could_open_is_left_on_the_others() {
    let clock = Arc::new(Clock::start());
    let seats = [seat(&clock), seat(&clock)];
    for number in 1..MAX_GROUPS {
        let group = format!("group-{number}").parse().unwrap();
        assert!(seats[1].outbox.open_group(&group, GroupOptions::default(), clock.now()).await.unwrap());
    }
    let outbox = CombinedOutbox::of(&seats);
    let delivery = Delivery::new(outbox, Arc::clone(&clock), Arc::new(Metrics::default()), Duration::from_secs(1));
    let options = GroupOptions { from_end: true, ephemeral: true };
    let refusal = delivery.subscribe(None, 1, options).await.err().unwrap();
    assert_eq!(refusal.reason, Reason::TooManyGroups);
    let left = seats[0].outbox.backlog(clock.now()).await.unwrap();
    assert_eq!(left.groups.len(), 1, "only the default group is left: {left:?}");
}
