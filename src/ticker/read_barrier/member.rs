//! A connection, as the gate sees it.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;

use futures_util::task::AtomicWaker;

use super::ReadBarrier;

/// What gate and connection tell each other.
#[derive(Debug)]
pub(super) struct Line {
    /// The last round in which the connection was asked.
    asked_in: AtomicU64,
    waker: AtomicWaker,
    taking: Taking,
}

impl Line {
    /// Whoever joins may have taken bytes before, as in a handshake of TLS.
    pub(super) fn new() -> Line {
        let taking = Taking(Arc::new(AtomicBool::new(true)));
        Line { asked_in: AtomicU64::new(0), waker: AtomicWaker::new(), taking }
    }

    pub(super) fn ask(&self, round: u64) {
        self.asked_in.store(round, Ordering::Release);
        self.waker.wake();
    }

    pub(super) fn is_taking(&self) -> bool {
        self.taking.is_under_way()
    }
}

/// Says whether a connection may have taken bytes out of its socket that it has not dealt with: those the gate cannot
/// find in the socket any more.
#[derive(Clone, Debug)]
pub struct Taking(Arc<AtomicBool>);

impl Taking {
    /// The socket is read next, or written to: what arrives during a system call is not yet seen in the socket.
    pub fn begin(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// There was nothing to read, and what was read before is dealt with.
    pub fn end(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// Whether bytes may have left the socket that are not dealt with.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A connection's place at the gate, which it leaves when this is dropped.
#[derive(Debug)]
pub struct Member {
    pub(super) read_barrier: Arc<ReadBarrier>,
    pub(super) number: u64,
    pub(super) line: Arc<Line>,
    /// The last round that it knows to be asked in.
    pub(super) asked: u64,
}

impl Member {
    /// What the connection has to tell about its reading.
    #[must_use]
    pub fn taking(&self) -> Taking {
        self.line.taking.clone()
    }

    /// Waits until the ticker asks to read what waits. Cancel-safe.
    pub async fn asked(&mut self) {
        poll_fn(|context| {
            self.line.waker.register(context.waker());
            let round = self.line.asked_in.load(Ordering::Acquire);
            if round == self.asked {
                return Poll::Pending;
            }
            self.asked = round;
            Poll::Ready(())
        })
        .await;
    }

    /// Answers the last question: the socket was read until it was empty. A later question stays open.
    pub fn passed(&mut self) {
        self.read_barrier.passed(self.number, self.asked);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.read_barrier.left(self.number);
    }
}
