//! SIGTERM: what was answered is kept, what is new is refused, and the end comes within 10 s.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::checker::{Ledger, Loader, Taker, assert_every_answer_was_kept};
use crate::support::frames::{self, ACKED, LATE};
use crate::support::held_thread::HeldThread;
use crate::support::process::{Log, Process, assert_names};
use crate::support::raw::Raw;
use crate::support::redis::Redis;
use crate::support::resp::{Reply, Resp};
use crate::support::sidecar::{Sidecar, serve};
use crate::support::wait_until;

const WITHIN: Duration = Duration::from_secs(10);

#[test]
fn a_drain_under_load_keeps_every_answer() {
    let mut sidecar = Sidecar::start(&["--tick", "200ms", "--slots", "5"]);
    let taker = Taker::start(sidecar.listen);
    let answered = Arc::new(AtomicU64::new(0));
    let loaders: Vec<_> = (0..4).map(|loader| Loader::start(sidecar.listen, loader << 32, &answered)).collect();
    wait_until("there is load, and something has timed out", || {
        answered.load(Ordering::Relaxed) >= 400 && taker.taken.load(Ordering::Relaxed) >= 1
    });
    assert_eq!(sidecar.get("/readyz").0, 200);
    taker.hold.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    sidecar.signal(Signal::TERM);
    wait_until("it is not ready", || sidecar.get("/readyz") == (503, String::from("draining\n")));
    wait_until("each loader is refused", || sidecar.metrics().refusals("draining") >= 100);
    assert_eq!(sidecar.get("/livez").0, 200, "it drains, and is not dead");
    wait_until("all is delivered", || sidecar.metrics().count("messages_in_flight") == 0);
    assert!(sidecar.metrics().count("messages_drained_total") > 0);
    wait_until("messages that a drain delivered early are not late, all others have their lateness", || {
        let metrics = sidecar.metrics();
        metrics.count("timeout_lateness_seconds_count") == metrics.count("messages_timed_out_total")
    });
    taker.hold.store(false, Ordering::Relaxed);
    let status = sidecar.exit();
    assert_eq!(status.code(), Some(0), "{}", sidecar.log().text());
    assert!(begun.elapsed() < WITHIN, "took {:?}", begun.elapsed());

    let ledgers: Vec<Ledger> =
        loaders.into_iter().map(|loader| loader.join().expect("nothing was wrong")).collect();
    let batches = taker.batches();
    assert_every_answer_was_kept(&ledgers, &batches);
    for ledger in &ledgers {
        assert!(ledger.went_away && !ledger.refused.is_empty() && !ledger.acked.is_empty(), "{ledger:?}");
    }
    assert!(batches.iter().any(|batch| batch.drained) && batches.iter().any(|batch| !batch.drained));
    assert!(batches.iter().filter(|batch| batch.drained).all(|batch| !batch.storm), "a drain is no storm");
}

#[test]
fn while_it_drains_acks_of_clients_are_answered_and_new_messages_refused() {
    let mut sidecar = Sidecar::start(&["--tick", "1s"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2, 3], 0, 1)).added();
    assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [ACKED]);
    sidecar.signal(Signal::TERM);
    let batch = subscriber.batch();
    assert_eq!((batch.ids(), batch.drained, batch.delivery), (vec![2, 3], true, 1));
    let error = connection.ask(&frames::add(&[4], 0, 1));
    error.assert_error(65, frames::RETRYABLE);
    assert_names(error.text(), &["draining"]);
    assert_eq!(connection.ask(&frames::del(&[1, 2, 4])).outcomes(), [0, LATE, 0], "4 was not applied");
    assert_eq!(connection.ask(&frames::ping(b"on")).body, b"on");
    assert_eq!(connection.went_away.len(), 1);
    subscriber.request(&frames::batch_ack(&[batch.id]));
    assert_eq!(sidecar.exit().code(), Some(0));
}

/// The ring still takes messages, because the thread that drains it is held.
#[test]
fn a_connection_that_knows_of_the_drain_gets_no_add_accepted_whatever_the_ring_does() {
    let mut sidecar = Sidecar::start(&["--resp", "127.0.0.1:0", "--drain-timeout", "3s"]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2], 0, 1)).added();
    let mut resp = Resp::connect(sidecar.resp.unwrap());
    assert_eq!(resp.ask("AW.DEL 7").texts(), ["unknown"]);
    let Some(held) = HeldThread::hold(sidecar.id(), "ticker") else { return };
    sidecar.signal(Signal::TERM);
    while connection.went_away.is_empty() {
        connection.ask(&frames::ping(b"until GoAway"));
    }
    let add = connection.request(&frames::add(&[3], 0, 1));
    let del = connection.request(&frames::del(&[1, 3]));
    connection.answer(add).assert_error(65, frames::RETRYABLE);
    assert_eq!(connection.answer(del).outcomes(), [ACKED, 0], "an Ack in the same write counts");
    // The other door says nothing about a drain before it refuses.
    wait_until("an add is refused", || matches!(resp.ask("AW.ADD 4"), Reply::Error(_)));
    for _ in 0..20 {
        resp.ask("AW.ADD 5").assert_error("DRAINING not applied");
    }
    assert_eq!(resp.ask("AW.DEL 2 5").texts(), ["acked", "unknown"]);
    drop(held);
    sidecar.exit();
}

#[test]
fn requests_pipelined_before_the_signal_are_answered() {
    let mut sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    sidecar.stop();
    let requests: Vec<u32> = (0..200).map(|id| connection.request(&frames::add(&[id], 0, 1))).collect();
    sidecar.signal(Signal::TERM);
    sidecar.go_on();
    // Read before or after the drain began: each is answered, one way or the other.
    for request in requests {
        let answer = connection.answer(request);
        if answer.kind != frames::ADD_ANSWER {
            answer.assert_error(65, frames::RETRYABLE);
        }
    }
    sidecar.end_of_drain();
}

#[test]
fn batches_that_no_subscriber_took_are_named_in_the_log() {
    let mut sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2, 3], 0, 1)).added();
    drop(connection);
    let took = sidecar.terminate();
    assert!(took < Duration::from_secs(4), "nobody to wait for, and yet it took {took:?}");
    let line = sidecar.log().line("did not acknowledge its last batches").expect("a person is told");
    assert_names(&line, &["ERROR", "default", "--journal"]);
    let lost = "ackwheel: the drain lost 0 messages that were not delivered, and 1 batches with 3 messages";
    assert_names(&sidecar.log().whole(), &[lost]);
}

#[test]
fn a_subscriber_that_does_not_acknowledge_holds_the_end_up_only_so_long() {
    let mut sidecar = Sidecar::start(&["--drain-timeout", "1s"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&[1], 0, 1)).added();
    let took = sidecar.terminate();
    assert!(took >= Duration::from_secs(1), "it waited for {took:?} only");
    assert!(took < Duration::from_secs(4), "it took {took:?}");
    assert!(subscriber.batch().drained);
    assert_names(
        &sidecar.log().whole(),
        &["the drain lost 0 messages that were not delivered, and 1 batches with 1 messages"],
    );
}

#[test]
fn an_open_connection_with_all_its_answers_is_not_logged_as_missing_them() {
    let mut sidecar = Sidecar::start(&[]);
    let mut connections: Vec<Raw> = (0..300).map(|_| sidecar.connect()).collect();
    for connection in &mut connections {
        connection.ask(&frames::ping(b"on"));
    }
    sidecar.signal(Signal::TERM);
    assert_eq!(sidecar.exit().code(), Some(0));
    let log = sidecar.log().whole();
    assert!(!log.contains("last answers"), "{log}");
    drop(connections);
}

#[test]
fn sigint_and_sighup_drain_too() {
    for (signal, name) in [(Signal::INT, "SIGINT"), (Signal::HUP, "SIGHUP")] {
        let mut sidecar = started_with("--default-signal=HUP", &[]);
        sidecar.signal(signal);
        assert_eq!(sidecar.exit().code(), Some(0));
        sidecar.log().assert_names(&[name, "drained"]);
    }
}

#[test]
fn a_sidecar_started_with_nohup_survives_the_end_of_its_terminal() {
    let mut sidecar = started_with("--ignore-signal=HUP", &["--tick", "100ms"]);
    sidecar.signal(Signal::HUP);
    // With nothing in flight a drain would be over by then.
    sidecar.wait_for_pointer(sidecar.pointer() + 3);
    sidecar.signal(Signal::TERM);
    assert_eq!(sidecar.exit().code(), Some(0));
    let log = sidecar.log().text();
    assert_names(&log, &["SIGTERM", "drained"]);
    assert!(!log.contains("SIGHUP"), "{log}");
}

/// Serves with these flags, its signals set by an option of `env`, whatever those of the tests are.
fn started_with(signals: &str, flags: &[&str]) -> Sidecar {
    let serve = serve(flags);
    let mut command = Command::new("env");
    command.arg(signals).arg(serve.get_program()).args(serve.get_args());
    Sidecar::spawn(command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut sidecar = Sidecar::start(&[]);
    let _subscriber = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&[1], 0, 1)).added();
    sidecar.signal(Signal::TERM);
    let begun = Instant::now();
    wait_until("it drains", || sidecar.get("/readyz").0 == 503);
    // A signal within a second is the same stop: `timeout` signals its child, and then its group.
    sidecar.signal(Signal::INT);
    sidecar.signal(Signal::TERM);
    wait_until("it drains for longer than that", || begun.elapsed() > Duration::from_millis(1_500));
    assert_eq!(sidecar.get("/readyz").0, 503);
    let again = Instant::now();
    sidecar.signal(Signal::TERM);
    assert_eq!(sidecar.exit().code(), Some(1));
    sidecar.log().assert_names(&["SIGTERM ended the drain"]);
    assert!(again.elapsed() < Duration::from_secs(3), "took {:?}", again.elapsed());
}

#[test]
fn a_sidecar_that_still_waits_for_its_store_ends_at_once() {
    // It takes connections, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = format!("redis://{}/", silent.local_addr().unwrap());
    for signal in [Signal::TERM, Signal::INT] {
        let mut process = Process::spawn(&mut serve(&["--store", &store]));
        let log = Log::of(process.stderr());
        log.line("trying again").expect("it waits");
        let begun = Instant::now();
        process.signal(signal);
        assert_eq!(process.exit().code(), Some(0), "{}", log.text());
        assert!(begun.elapsed() < Duration::from_secs(2), "took {:?}", begun.elapsed());
    }
}

#[test]
fn with_many_rings_and_a_stalled_redis_the_end_comes_in_time_and_says_which_acks_are_lost() {
    let redis = Redis::start();
    let mut sidecar = Sidecar::on(&redis, "a", &["--rings", "8"]);
    let mut connection = sidecar.connect();
    let ids: Vec<u64> = (1..=64).collect();
    connection.ask(&frames::add(&ids, 0, 1)).added();
    redis.stop();
    connection.request(&frames::del(&ids));
    wait_until("the Acks are held", || sidecar.metrics().count("held_acks") == 64);
    let begun = Instant::now();
    sidecar.signal(Signal::TERM);
    let status = sidecar.exit();
    assert!(begun.elapsed() < WITHIN, "took {:?}", begun.elapsed());
    assert_eq!(status.code(), Some(1), "{}", sidecar.log().text());
    assert_names(&sidecar.log().whole(), &["the drain lost 64 acknowledgements, because Redis was unreachable"]);
}
