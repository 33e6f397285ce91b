use std::future::poll_fn;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(target_os = "linux")]
use futures_util::FutureExt;
use tokio::io::{AsyncRead, ReadBuf};

use super::*;

#[tokio::test(start_paused = true)]
async fn a_round_ends_when_every_member_has_read_or_left() {
    let read_barrier = ReadBarrier::new();
    assert!(read_barrier.wait_until_read(Duration::from_secs(1)).await, "no member to wait for");
    let (mut first, mut second) = (read_barrier.join(None), read_barrier.join(None));
    assert!(!read_barrier.wait_until_read(Duration::from_secs(1)).await, "two did not answer");
    for member in [&mut first, &mut second] {
        member.read_requested().await;
        member.confirm_read();
    }

    let round = tokio::spawn({
        let read_barrier = Arc::clone(&read_barrier);
        async move { read_barrier.wait_until_read(Duration::from_secs(60)).await }
    });
    first.read_requested().await;
    drop(second);
    let late = read_barrier.join(None);
    first.confirm_read();
    first.confirm_read();
    assert!(round.await.unwrap(), "a round does not wait for a member that joins during it");
    drop(late);
    assert_eq!(read_barrier.members.lock().by_number.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn calls_before_a_round_share_it_and_calls_during_it_get_the_next() {
    let read_barrier = ReadBarrier::new();
    let mut member = read_barrier.join(None);
    let wait = || {
        let read_barrier = Arc::clone(&read_barrier);
        tokio::spawn(async move { read_barrier.wait_until_read(Duration::from_secs(60)).await })
    };
    let first = wait();
    member.read_requested().await;
    let (second, third) = (wait(), wait());
    tokio::task::yield_now().await;
    member.confirm_read();
    assert!(first.await.unwrap());
    member.read_requested().await;
    assert!(!second.is_finished() && !third.is_finished(), "they wait for the next round");
    member.confirm_read();
    assert!(second.await.unwrap() && third.await.unwrap());
    assert_eq!(read_barrier.members.lock().rounds, 2, "the two shared a round");

    // If a ticker is aborted during its round, the other tickers do not wait forever.
    let aborted = wait();
    member.read_requested().await;
    let waiting = wait();
    tokio::task::yield_now().await;
    aborted.abort();
    member.read_requested().await;
    member.confirm_read();
    assert!(waiting.await.unwrap());
}

#[tokio::test]
async fn a_stall_does_not_use_up_the_timeout() {
    let read_barrier = ReadBarrier::new();
    let mut member = read_barrier.join(None);
    let timeout = Duration::from_millis(400);
    let round = tokio::spawn({
        let read_barrier = Arc::clone(&read_barrier);
        async move { read_barrier.wait_until_read(timeout).await }
    });
    member.read_requested().await;
    // Like a stall of the process, this blocks the thread for longer than the timeout.
    std::thread::sleep(timeout * 2);
    tokio::task::yield_now().await;
    tokio::task::yield_now().await;
    assert!(!round.is_finished(), "the connections have their time after a stall");
    member.confirm_read();
    assert!(round.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn an_answer_to_the_last_round_does_not_count_for_the_next() {
    let read_barrier = ReadBarrier::new();
    let mut member = read_barrier.join(None);
    assert!(!read_barrier.wait_until_read(Duration::from_secs(1)).await);
    member.read_requested().await;
    // The member has read its socket for the first round, and not yet for the second.
    let round = tokio::spawn({
        let read_barrier = Arc::clone(&read_barrier);
        async move { read_barrier.wait_until_read(Duration::from_secs(60)).await }
    });
    tokio::task::yield_now().await;
    member.confirm_read();
    tokio::task::yield_now().await;
    assert!(!round.is_finished());
    member.read_requested().await;
    member.confirm_read();
    assert!(round.await.unwrap());
}

/// Returns both ends of a socket, and a member for the first end. The member has no unprocessed bytes.
fn connection(read_barrier: &Arc<ReadBarrier>) -> (UnixStream, UnixStream, Member) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let member = read_barrier.join(Some(ours.as_fd()));
    assert!(member.unprocessed_input().is_set(), "it may have read bytes before it joined");
    member.unprocessed_input().clear();
    (ours, theirs, member)
}

#[cfg(target_os = "linux")]
#[tokio::test(start_paused = true)]
async fn only_members_that_may_have_unread_bytes_are_asked() {
    let read_barrier = ReadBarrier::new();
    let mut connections: Vec<_> = (0..100).map(|_| connection(&read_barrier)).collect();
    assert!(read_barrier.wait_until_read(Duration::from_secs(1)).await, "nothing waits in any socket");

    let (mut ours, mut theirs, mut waiting) = connections.pop().unwrap();
    theirs.write_all(b"x").unwrap();
    let (_ours, _theirs, mut reading) = connections.pop().unwrap();
    reading.unprocessed_input().set();
    let round = tokio::spawn({
        let read_barrier = Arc::clone(&read_barrier);
        async move { read_barrier.wait_until_read(Duration::from_secs(60)).await }
    });
    tokio::task::yield_now().await;
    waiting.read_requested().await;
    reading.read_requested().await;
    for (_, _, member) in &mut connections {
        assert!(member.read_requested().now_or_never().is_none());
    }
    ours.read_exact(&mut [0]).unwrap();
    waiting.confirm_read();
    tokio::task::yield_now().await;
    assert!(!round.is_finished(), "the bytes that were taken are not processed");
    reading.unprocessed_input().clear();
    reading.confirm_read();
    assert!(round.await.unwrap());
    assert!(read_barrier.wait_until_read(Duration::from_secs(1)).await, "all of it is read");
}

/// Checks that bytes that are in a socket before a round are processed when the round ends. The reads and the rounds
/// overlap in many ways.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_bytes_are_missed_between_the_socket_and_its_reader() {
    let read_barrier = ReadBarrier::new();
    let (ours, mut theirs, mut member) = connection(&read_barrier);
    let processed = Arc::new(AtomicU64::new(0));
    ours.set_nonblocking(true).unwrap();
    // When the barrier asks, the reader reads from this clone, without the runtime. The runtime might not know yet that
    // bytes have arrived.
    let mut directly = ours.try_clone().unwrap();
    let mut ours = tokio::net::UnixStream::from_std(ours).unwrap();
    let reader = tokio::spawn({
        let processed = Arc::clone(&processed);
        async move {
            let reading = member.unprocessed_input();
            let mut buffer = [0; 8];
            loop {
                // Like a session, this processes bytes before it reads more.
                let read = poll_fn(|context| {
                    let mut buffer = ReadBuf::new(&mut buffer);
                    reading.set();
                    let read = Pin::new(&mut ours).poll_read(context, &mut buffer);
                    if read.is_pending() {
                        reading.clear();
                    }
                    read.map_ok(|()| buffer.filled().len())
                });
                let asked = tokio::select! {
                    read = read => match read.unwrap() {
                        0 => return,
                        count => {
                            std::thread::sleep(Duration::from_micros(20));
                            processed.fetch_add(count as u64, Ordering::SeqCst);
                            false
                        }
                    },
                    () = member.read_requested() => true,
                };
                if asked {
                    while let Ok(count @ 1..) = directly.read(&mut buffer) {
                        processed.fetch_add(count as u64, Ordering::SeqCst);
                    }
                    member.confirm_read();
                }
            }
        }
    });
    for sent in 1..=4_000 {
        theirs.write_all(b"x").unwrap();
        // This delay makes each round begin at a different point of the reading.
        for _ in 0..sent % 400 * 8 {
            std::hint::spin_loop();
        }
        assert!(read_barrier.wait_until_read(Duration::from_secs(10)).await);
        assert!(processed.load(Ordering::SeqCst) >= sent, "byte {sent} was missed");
    }
    drop(theirs);
    reader.await.unwrap();
}
