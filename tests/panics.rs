//! A panic is never silent: it ends one connection alone, or the process with exit code 1 and an error in the log.
//!
//! The program itself has no way to make it panic. So a test starts its own binary again, as a sidecar on a store
//! that panics where it is asked to, with the rule that `serve` has.

use std::env;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use ackwheel::app;
use ackwheel::clock::Clock;
use ackwheel::config::Settings;
use ackwheel::core::{
    Advance, Backlog, BatchId, Completions, ConnectionId, Delivery, DrainOutcome, Dropped, GroupName,
    GroupOptions, Message, MessageState, Outbox, PublishStep, Refusal, RequestBatch, Retention, Ring, RingParts,
    RingStatus, Settled, Store, StormRule, Submitted, Wheel,
};
use ackwheel::memory::{MemoryOptions, MemoryStore};
use ackwheel::process::panics;
use async_trait::async_trait;

use crate::support::frames;
use crate::support::process::assert_names;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

/// Where the store panics, once a message with this id was added.
const FAULT: &str = "ACKWHEEL_TEST_PANIC_IN";
const ARMING: u64 = 4_711;

/// The log line of the panic itself.
const TEXT: &str = "a panic that a test asked for";

/// The test that is the sidecar, where the environment says so.
const CHILD: &str = "panics::a_sidecar_on_a_store_that_panics";

/// A memory store whose calls panic.
struct Faulty {
    seat: RingParts,
    store: MemoryStore,
}

/// When to panic.
struct Fault {
    place: String,
    /// Calls at that place since it was armed, and one; 0 before.
    calls: AtomicU64,
}

impl Fault {
    fn arm(&self) {
        self.calls.store(1, Ordering::SeqCst);
    }

    /// Panics if this is the place, with the so-manieth call after it was armed, and never again.
    fn meet(&self, place: &str, call: u64) {
        if self.place == place && self.calls.load(Ordering::SeqCst) > 0 {
            let calls = self.calls.fetch_add(1, Ordering::SeqCst);
            assert!(calls != call, "{TEXT}");
        }
    }
}

struct FaultyRing(Arc<dyn Ring>, Arc<Fault>);

struct FaultyOutbox(Arc<dyn Outbox>, Arc<Fault>);

impl Faulty {
    fn open(place: String) -> Faulty {
        let options = MemoryOptions {
            wheel: Wheel::new(15, std::time::Duration::from_millis(50)).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 1_000,
            threads: 1,
        };
        let store = MemoryStore::new(options, Clock::start().moment());
        let fault = Arc::new(Fault { place, calls: AtomicU64::new(0) });
        let RingParts { ring, outbox, lease } = store.rings()[0].clone();
        let seat = RingParts {
            ring: Arc::new(FaultyRing(ring, Arc::clone(&fault))),
            outbox: Arc::new(FaultyOutbox(outbox, fault)),
            lease,
        };
        Faulty { seat, store }
    }
}

#[async_trait]
impl Store for Faulty {
    fn kind(&self) -> &'static str {
        "faulty"
    }

    fn rings(&self) -> &[RingParts] {
        std::slice::from_ref(&self.seat)
    }

    fn is_up(&self) -> bool {
        true
    }

    async fn close(&self) -> Result<String, Refusal> {
        self.store.close().await
    }
}

#[async_trait]
impl Ring for FaultyRing {
    fn wheel(&self) -> Wheel {
        // A connection asks for it before it takes requests from what it has read, and with the requests in its hands.
        // The ticker asks for it too, on a thread of its own.
        if thread::current().name() != Some("ticker") {
            self.1.meet("connection", 2);
        }
        self.0.wheel()
    }

    fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
        now: Instant,
    ) -> Submitted {
        self.1.meet("ring", 1);
        let submitted = self.0.submit(batch, connection, completions, now);
        if batch.messages().iter().any(|message| message.msg_id.0 == ARMING) {
            self.1.arm();
        }
        submitted
    }

    async fn get(&self, messages: &[Message], now: Instant) -> Result<Vec<MessageState>, Refusal> {
        self.0.get(messages, now).await
    }

    async fn advance(&self, now: Instant) -> Result<Advance, Refusal> {
        self.1.meet("ticker", 1);
        self.0.advance(now).await
    }

    async fn publish_expired(&self, now: Instant) -> Result<PublishStep, Refusal> {
        self.0.publish_expired(now).await
    }

    async fn drain(&self, now: Instant) -> Result<DrainOutcome, Refusal> {
        self.0.drain(now).await
    }

    async fn status(&self, now: Instant) -> Result<RingStatus, Refusal> {
        self.1.meet("status", 1);
        self.0.status(now).await
    }
}

#[async_trait]
impl Outbox for FaultyOutbox {
    async fn open_group(&self, group: &GroupName, opening: GroupOptions, now: Instant) -> Result<bool, Refusal> {
        self.1.meet("subscribe", 1);
        self.0.open_group(group, opening, now).await
    }

    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal> {
        self.0.leave_group(group).await
    }

    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        self.0.delete_group(group).await
    }

    async fn take(&self, group: &GroupName, window: u64, now: Instant) -> Result<Vec<Delivery>, Refusal> {
        self.0.take(group, window, now).await
    }

    async fn retake(
        &self,
        group: &GroupName,
        batches: &[BatchId],
        now: Instant,
    ) -> Result<Vec<Delivery>, Refusal> {
        self.0.retake(group, batches, now).await
    }

    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        self.1.meet("group", 1);
        self.0.settle(group, batches).await
    }

    async fn release(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal> {
        self.0.release(group, batches).await
    }

    async fn maintain(&self, attended: &[GroupName], now: Instant) -> Result<Dropped, Refusal> {
        self.1.meet("retention", 1);
        self.0.maintain(attended, now).await
    }

    async fn backlog(&self, now: Instant) -> Result<Backlog, Refusal> {
        self.0.backlog(now).await
    }

    fn on_new_batches(&self, tell: Box<dyn Fn() + Send + Sync>) {
        self.0.on_new_batches(tell);
    }
}

#[test]
#[ignore = "the other tests of this file start it, each in a process of its own"]
fn a_sidecar_on_a_store_that_panics() {
    let Ok(place) = env::var(FAULT) else { return };
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    panics::end_the_process(|| {});
    let settings = Settings {
        listen: Some(String::from("127.0.0.1:0")),
        admin: Some(String::from("127.0.0.1:0")),
        ..Settings::default()
    };
    let config = settings.check().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let sidecar = app::Sidecar::start_on(config, Arc::new(Faulty::open(place))).await.unwrap();
        tracing::info!(listen = %sidecar.address, admin = %sidecar.admin_address, "listening");
        std::future::pending::<()>().await;
    });
}

fn sidecar_that_panics_in(place: &str) -> Sidecar {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", CHILD, "--ignored", "--nocapture"]).env(FAULT, place);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Sidecar::spawn(&mut command)
}

/// Asserts that the process ends by itself, and says why.
#[track_caller]
fn assert_ends(mut sidecar: Sidecar) {
    let status = sidecar.exit();
    let log = sidecar.log().text();
    assert_eq!(status.code(), Some(1), "{log}");
    let line = log.lines().find(|line| line.contains("ERROR")).unwrap_or_else(|| panic!("no error in {log}"));
    assert_names(line, &["a panic ends the process with exit code 1", TEXT, "place=", ".rs:", "thread="]);
}

fn arm(sidecar: &Sidecar) -> crate::support::raw::Raw {
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[ARMING], 1, 1)).added();
    connection
}

#[test]
fn a_panic_in_the_task_of_a_connection_ends_that_connection_alone() {
    let sidecar = sidecar_that_panics_in("connection");
    // On the same thread, since there is only one.
    let (mut other, mut unlucky) = (sidecar.connect(), sidecar.connect());
    unlucky.ask(&frames::add(&[ARMING], 15, 1)).added();
    unlucky.request(&frames::del(&[ARMING, 1, 2]));
    assert!(unlucky.receive().is_none(), "the connection ends without an answer");
    let answer = other.ask(&frames::del(&[3]));
    assert_eq!(answer.outcomes(), [frames::UNKNOWN], "its own answer, and no other's");
    assert_eq!(sidecar.connect().ask(&frames::del(&[ARMING])).outcomes(), [frames::ACKED], "it was not done");
    assert_eq!(sidecar.get("/livez").0, 200);
    wait_until("the other connection is alone", || sidecar.metrics().connections() == 1);
    let log = sidecar.log().assert_names(&[TEXT]);
    let lines: Vec<&str> = log.lines().filter(|line| line.contains(TEXT)).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert_names(lines[0], &["ERROR", "a panic ended this connection, and no other", "peer=127.0.0.1:", ".rs:"]);
}

#[test]
fn a_panic_in_what_connections_share_ends_the_process() {
    let sidecar = sidecar_that_panics_in("ring");
    arm(&sidecar).request(&frames::del(&[1]));
    assert_ends(sidecar);
}

#[test]
fn a_panic_in_a_request_that_waits_for_the_store_ends_the_process() {
    let sidecar = sidecar_that_panics_in("subscribe");
    arm(&sidecar).request(&frames::subscribe("offline", 1_000, 0));
    assert_ends(sidecar);
}

#[test]
fn a_panic_in_the_task_of_a_group_ends_the_process_and_acknowledges_nothing() {
    let sidecar = sidecar_that_panics_in("group");
    let mut subscriber = sidecar.connect().subscribed("offline");
    let _arming = arm(&sidecar);
    let batch = subscriber.batch();
    subscriber.request(&frames::batch_ack(&[batch.id]));
    assert!(subscriber.receive().is_none(), "no answer says that the batch is settled");
    assert_ends(sidecar);
}

#[test]
fn a_panic_of_the_ticker_ends_the_process() {
    let sidecar = sidecar_that_panics_in("ticker");
    arm(&sidecar);
    assert_ends(sidecar);
}

#[test]
fn a_panic_of_a_task_in_the_background_ends_the_process() {
    let sidecar = sidecar_that_panics_in("retention");
    arm(&sidecar);
    assert_ends(sidecar);
}

#[test]
fn a_panic_on_the_thread_that_asks_the_store_for_the_metrics_ends_the_process() {
    let sidecar = sidecar_that_panics_in("status");
    arm(&sidecar);
    let asking = std::net::TcpStream::connect(sidecar.admin).unwrap();
    std::io::Write::write_all(&mut &asking, b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    assert_ends(sidecar);
}
