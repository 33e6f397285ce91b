//! A subscriber that does not read is cut off, and its batches go to others.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::support::frames::{self, Request};
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

/// A connection whose kernel takes little for it.
fn with_a_small_buffer(address: SocketAddr) -> Raw {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    socket.connect(&address.into()).unwrap();
    Raw::over_tcp(TcpStream::from(socket)).greet()
}

const MESSAGES: u64 = 400_000;

/// Adds more messages to one tick than all buffers on the way to a subscriber hold as batches.
fn add_many(address: SocketAddr) {
    let mut adder = Raw::greeted(address);
    let ids: Vec<u64> = (0..MESSAGES).collect();
    for chunk in ids.chunks(32_000) {
        adder.request(&frames::add(chunk, 20, 1));
    }
    for chunk in ids.chunks(32_000) {
        assert_eq!(adder.next_answer().added().1.len(), chunk.len());
    }
}

#[test]
fn a_subscriber_that_does_not_read_is_cut_off_and_its_batches_go_to_others() {
    let flags = ["--tick", "100ms", "--slots", "20", "--max-queued-bytes", "300000"];
    let sidecar = Sidecar::start(&flags);
    let mut slow = with_a_small_buffer(sidecar.listen).subscribed("default");
    let adding = {
        let address = sidecar.listen;
        std::thread::spawn(move || add_many(address))
    };
    let sign_of_life = Request::new(frames::PONG, 0, Vec::new()).bytes(0);
    wait_until("it is cut off", || {
        slow.send(&sign_of_life);
        sidecar.metrics().refusals("slow_reader") == 1
    });
    adding.join().expect("all were added");
    wait_until("it has left the group", || sidecar.subscribers() == 0);
    let handed = sidecar.metrics().count("batches_delivered_total");
    assert!(handed >= 1 && handed <= MESSAGES.div_ceil(4_096) + 20, "{handed} batches were delivered");

    let mut reader = sidecar.connect().subscribed("default");
    let mut deliveries = BTreeMap::new();
    let mut messages = 0;
    while messages < MESSAGES {
        let batch = reader.settled_batch();
        messages += batch.messages.len() as u64;
        assert!(deliveries.insert(batch.id, batch.delivery).is_none(), "settled, and yet again: {:?}", batch.id);
    }
    assert_eq!(messages, MESSAGES);
    let again = deliveries.values().filter(|delivery| **delivery == 2).count() as u64;
    assert_eq!(again, handed, "what the slow one held came as the second delivery");
    assert!(deliveries.values().all(|delivery| (1..=2).contains(delivery)));

    // The bytes that had reached it before it was cut off are whole.
    let mut seen = 0;
    while let Some(frame) = slow.receive_any() {
        seen += u64::from(frame.kind == frames::TIMEOUT_BATCH);
    }
    assert!(seen <= handed, "{seen} of {handed}");
}

/// Batches fill what is queued for it, but not so far that it is not listened to.
#[test]
fn the_acks_of_a_subscriber_that_does_not_read_are_heard() {
    const LIVE: u64 = u64::MAX;
    let flags = ["--tick", "100ms", "--slots", "100", "--max-queued-bytes", "300000"];
    let sidecar = Sidecar::start(&flags);
    let mut busy = with_a_small_buffer(sidecar.listen).subscribed("default");
    let mut other = sidecar.connect();
    let (deadline, _) = other.ask(&frames::add(&[LIVE], 80, 1)).added();
    add_many(sidecar.listen);
    wait_until("the others time out", || sidecar.metrics().count("messages_timed_out_total") == MESSAGES);
    sidecar.wait_for_pointer(sidecar.pointer() + 5);
    busy.request(&frames::del(&[LIVE]));
    wait_until("it is decided", || sidecar.metrics().acked("acked") == 1 || sidecar.pointer() > deadline);
    assert_eq!((sidecar.metrics().acked("acked"), sidecar.metrics().refusals("slow_reader")), (1, 0));
}

/// Batches are overdue again and again before two ping intervals are over: that is no reason to cut it off.
#[test]
fn unread_batches_of_a_subscriber_do_not_pile_up_while_they_are_overdue() {
    let flags =
        ["--tick", "100ms", "--slots", "300", "--max-queued-bytes", "300000", "--redeliver-after", "300ms"];
    let sidecar = Sidecar::start(&flags);
    let credit = u32::try_from(MESSAGES).unwrap();
    let paused = with_a_small_buffer(sidecar.listen);
    let mut paused = paused.subscribed_with(&frames::subscribe("default", credit, 0));
    add_many(sidecar.listen);
    wait_until("all time out", || sidecar.metrics().count("messages_timed_out_total") == MESSAGES);
    sidecar.wait_for_pointer(sidecar.pointer() + 20);
    // The kernel's buffers hold fewer than all of them, and the way there no more than its credit.
    let metrics = sidecar.metrics();
    let handed = metrics.count("batches_delivered_total");
    assert!(handed <= 2 * MESSAGES.div_ceil(4_096) + 20, "{handed} batches were delivered");
    assert!(metrics.count("batches_redelivered_total") > 0, "nothing was overdue");

    let mut settled = BTreeMap::new();
    while settled.values().sum::<usize>() < usize::try_from(MESSAGES).unwrap() {
        let batch = paused.batch();
        paused.ask(&frames::batch_ack(&[batch.id]));
        settled.insert(batch.id, batch.messages.len());
    }
    assert_eq!((sidecar.metrics().refusals("slow_reader"), sidecar.subscribers()), (0, 1));
}

#[test]
fn a_subscriber_that_reads_slowly_but_steadily_is_not_cut_off() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "20", "--max-queued-bytes", "100000"]);
    let mut steady = with_a_small_buffer(sidecar.listen).subscribed("default");
    let ids: Vec<u64> = (0..30_000).collect();
    sidecar.connect().ask(&frames::add(&ids, 1, 1)).added();
    let mut messages = 0;
    while messages < ids.len() {
        messages += steady.batch().messages.len();
        std::thread::sleep(Duration::from_millis(350));
    }
    let metrics = sidecar.metrics();
    assert_eq!((metrics.refusals("slow_reader"), metrics.count("batches_redelivered_total")), (0, 0));
    assert_eq!(messages, ids.len());
}
