//! Tests of the state of a ticker that other threads read.

use super::*;

fn handle() -> TickerHandle {
    TickerHandle::new(mpsc::unbounded_channel().0, now())
}

fn recorded(ticker: &TickerHandle) -> Vec<u64> {
    ticker.recent_ticks.lock().iter().map(|(tick, _)| tick.0).collect()
}

#[test]
fn the_oldest_tick_is_dropped_and_a_drain_is_no_tick() {
    let ticker = handle();
    for tick in 1..=100 {
        ticker.record_tick(Tick(tick), TickCounts { added: tick, ..TickCounts::default() });
    }
    ticker.record_tick(Tick(101), TickCounts { drained: true, ..TickCounts::default() });
    assert_eq!(recorded(&ticker), (41..=100).collect::<Vec<_>>());
    assert!(ticker.recent_ticks.lock().iter().all(|(tick, counts)| tick.0 == counts.added));
}

#[test]
fn a_recreated_ring_leaves_no_tick_twice() {
    let ticker = handle();
    for tick in [7, 8, 9, 8, 12] {
        ticker.record_tick(Tick(tick), TickCounts::default());
    }
    assert_eq!(recorded(&ticker), [7, 8, 12]);
}
