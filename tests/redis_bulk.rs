//! Much at once, and for long: no command holds Redis up, and nothing stays behind.

use std::collections::HashSet;
use std::env;
use std::time::{Duration, Instant};

use crate::support::flow::{Flow, Plan};
use crate::support::frames;
use crate::support::raw::{Batch, Raw};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::{PATIENCE, SLACK, sleep_until, wait_until};

const MESSAGES: u64 = 200_000;
const FRAME: u64 = 10_000;

/// Adds all of them so that they expire in one tick; returns it.
fn add_for_one_tick(connection: &mut Raw) -> u64 {
    let (mut ticks, mut deadline) = (15, None);
    for first in (1..=MESSAGES).step_by(usize::try_from(FRAME).unwrap()) {
        let ids: Vec<u64> = (first..first + FRAME).collect();
        loop {
            let (answered, _) = connection.ask(&frames::add(&ids, ticks, 1)).added();
            let deadline = *deadline.get_or_insert(answered);
            if answered == deadline {
                break;
            }
            // The clock went on meanwhile: once more, for the same tick.
            let later = u16::try_from(answered - deadline).unwrap();
            ticks = ticks.checked_sub(later).filter(|ticks| *ticks > 0).expect("fifteen ticks are time enough");
        }
    }
    deadline.unwrap()
}

#[test]
fn a_tick_of_two_hundred_thousand_messages_holds_nothing_up() {
    // The log has the time that passed. On a busy machine Redis may have been without its core for some of it; a
    // command that takes long by itself takes long every time, and longer than that.
    let is_much = |slow: &Vec<(u64, String)>| slow.len() > 5 || slow.iter().any(|(micros, _)| *micros >= 100_000);
    let mut all = Vec::new();
    for _ in 0..3 {
        let slow = slow_commands_of_a_large_tick();
        if !is_much(&slow) {
            return;
        }
        all.push(slow);
    }
    panic!("more than five commands of over 20 ms, or one of 100 ms, three times: {all:?}");
}

/// Has a large tick expire; returns the commands that took more than 20 ms, in µs.
fn slow_commands_of_a_large_tick() -> Vec<(u64, String)> {
    let redis = Redis::start();
    let sidecars = ["a", "b"].map(|name| Sidecar::on(&redis, name, &["--tick", "500ms"]));
    let deadline = add_for_one_tick(&mut sidecars[0].connect());
    let mut subscriber = sidecars[1].connect().subscribed("default");

    let mut ids = HashSet::new();
    let mut batches: Vec<Batch> = Vec::new();
    while ids.len() < usize::try_from(MESSAGES).unwrap() {
        let batch = subscriber.settled_batch();
        assert_eq!((batch.tick, batch.added, batch.acked, batch.delivery), (deadline, MESSAGES, 0, 1));
        assert!(batch.storm && batch.messages.len() <= 4_096, "{:?}", batch.id);
        for (id, _) in &batch.messages {
            assert!((1..=MESSAGES).contains(id) && ids.insert(*id), "{id} came twice, or was never added");
        }
        batches.push(batch);
    }
    assert!(batches.last().unwrap().last && batches.iter().filter(|batch| batch.last).count() == 1);
    sidecars[0].wait_for_settled("default");
    // Messages that timed out are remembered for a revolution, and then removed, which must delay nothing either.
    let mut connection = sidecars[0].connect();
    wait_until("it is forgotten", || {
        connection.ask(&frames::del(&[1, MESSAGES])).outcomes() == [frames::UNKNOWN; 2]
    });

    redis.slowlog().into_iter().filter(|(micros, _)| *micros > 20_000).collect()
}

#[test]
fn ticks_leave_nothing_behind() {
    const TICK: Duration = Duration::from_millis(10);
    let ticks = if env::var_os("ACKWHEEL_LONG").is_some() { 3_600 } else { 2_000 };
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "10ms"]);
    let plan = Plan { tick: TICK, ack_timeout_ticks: 15, added: 100, acked: 50, pause: Duration::from_millis(50) };
    let run = |ticks: u32| {
        let begun = Instant::now();
        let flow = Flow::start(plan, sidecar.listen, sidecar.listen);
        sleep_until(begun + TICK * ticks);
        let evidence = flow.finish();
        evidence.assert_kept(PATIENCE);
        evidence
    };
    // Ids are remembered for a revolution after they timed out; the next run adds the same again.
    let forgotten = || {
        sidecar.wait_for_settled("default");
        let mut connection = sidecar.connect();
        wait_until("everything is forgotten", || {
            connection.ask(&frames::del(&[u64::MAX])).outcomes() == [frames::UNKNOWN]
        });
    };
    run(100);
    forgotten();
    // Buffers of connections and of streams come and go.
    let (keys, memory) = (redis.dbsize(), redis.used_memory());
    let pointer = sidecar.pointer();
    let evidence = run(ticks);
    forgotten();
    assert!(sidecar.pointer() - pointer >= u64::from(ticks) * 9 / 10, "the wheel turned");
    assert!(evidence.messages.len() > 1_000 && evidence.errors.is_empty(), "{:?}", evidence.errors);
    wait_until("no key is left behind", || redis.dbsize() <= keys);
    let room = memory + 768 * 1_024;
    wait_until("the memory is as before", || redis.used_memory() <= room);
    println!("{} messages: {memory} bytes before, {} after", evidence.messages.len(), redis.used_memory());
    assert!(evidence.assert_kept(PATIENCE) <= Duration::from_secs(2) + SLACK, "the wheel kept up");
}
