//! The read barrier. Before a tick expires, the connections read the bytes that wait in their sockets.
//!
//! After a stall of the process, acknowledgements wait unread. [`ReadBarrier::wait_until_read`] runs a *round*: it
//! asks the connections to read until their sockets are empty, and returns when all have done so. A connection is a
//! [`Member`] from the acceptance of its Hello to its end. A round does not wait for a connection that joins during the round.
//!
//! A round asks only connections that may have unread bytes. Bytes that arrived before the round are in one of three
//! states:
//!
//! - The bytes are in the socket. The kernel reports them.
//! - The bytes are processed. There is nothing left to do.
//! - The connection has read the bytes but not processed them. It set [`UnprocessedInput`] before it read.
//!
//! The barrier asks the kernel first and checks `UnprocessedInput` after that. So it misses no bytes that move from
//! the socket to the connection.
//!
//! Several tickers may call the barrier at the same time. Only one round runs at a time. All calls that were made
//! before a round begins share its result. So a sidecar with many rings runs hardly more rounds than a sidecar with
//! one.

mod readable_sockets;

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::future::poll_fn;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use self::readable_sockets::ReadableSockets;
use crate::clock::stall_aware_timeout;
use crate::process::panics;

/// The barrier that all tickers and connections of a sidecar share.
#[derive(Debug)]
pub struct ReadBarrier {
    sockets: ReadableSockets,
    members: Mutex<Members>,
    /// The number of the last round, and whether all connections read in it. The lock is held while a round runs.
    last: tokio::sync::Mutex<(u64, bool)>,
}

#[derive(Debug, Default)]
struct Members {
    /// The number of rounds that have begun.
    rounds: u64,
    last_number: u64,
    by_number: HashMap<u64, Arc<MemberState>>,
}

/// A request to read. Each asked connection has a clone. The round ends when all clones are dropped.
type ReadRequest = mpsc::Sender<Infallible>;

/// The state that the barrier and a connection share.
#[derive(Debug)]
struct MemberState {
    /// Whether the kernel watches the socket of the connection. If not, the connection is asked in every round.
    watched: bool,
    /// A request that the connection has not seen yet.
    request: Mutex<Option<ReadRequest>>,
    /// Whether `request` is set. The connection checks this flag often, and takes the lock of `request` only if the
    /// flag is set.
    is_requested: AtomicBool,
    waker: AtomicWaker,
    unprocessed_input: UnprocessedInput,
}

impl ReadBarrier {
    /// Creates a barrier without members.
    pub fn new() -> Arc<ReadBarrier> {
        Arc::new(ReadBarrier {
            sockets: ReadableSockets::new(),
            members: Mutex::default(),
            last: tokio::sync::Mutex::default(),
        })
    }

    /// Adds a connection and the socket that it reads. A connection without a socket is asked in every round.
    #[must_use]
    pub fn join(self: &Arc<Self>, socket: Option<BorrowedFd<'_>>) -> Member {
        let _shared = panics::shared();
        let mut members = self.members.lock();
        members.last_number += 1;
        let number = members.last_number;
        let state = Arc::new(MemberState {
            watched: socket.is_some_and(|socket| self.sockets.watch(socket, number)),
            request: Mutex::default(),
            is_requested: AtomicBool::new(false),
            waker: AtomicWaker::new(),
            // The connection may have read bytes before it joined, as in a TLS handshake.
            unprocessed_input: UnprocessedInput(Arc::new(AtomicBool::new(true))),
        });
        members.by_number.insert(number, Arc::clone(&state));
        Member { read_barrier: Arc::clone(self), number, state, request: None }
    }

    /// Waits for a round that begins after this call, and runs the round if no other call does. The round takes at
    /// most `timeout`, of which a stall of the process uses up only a part. Returns whether all asked connections have
    /// read.
    pub async fn wait_until_read(&self, timeout: Duration) -> bool {
        // A round that is already running may have asked some connections too early.
        let wanted = self.members.lock().rounds + 1;
        let mut last = self.last.lock().await;
        if last.0 < wanted {
            let (round, mut requests) = self.begin_round();
            *last = (round, stall_aware_timeout(timeout, requests.recv()).await.is_some());
        }
        last.1
    }

    /// Asks all members that may have unread bytes. Returns the number of the round, and a receiver that ends when all
    /// of these members have read.
    fn begin_round(&self) -> (u64, mpsc::Receiver<Infallible>) {
        // Calls that come after this increment wait for the next round. The kernel is asked before `UnprocessedInput`
        // is checked. In reverse order, a connection could read bytes between the two steps, and the barrier would
        // miss these bytes.
        self.members.lock().rounds += 1;
        let waiting = self.sockets.waiting();
        let (request, requests) = mpsc::channel(1);
        let members = self.members.lock();
        for (number, member) in &members.by_number {
            let has_waiting = |waiting: &HashSet<u64>| waiting.contains(number);
            if !member.watched || member.unprocessed_input.is_set() || waiting.as_ref().is_none_or(has_waiting) {
                let mut pending = member.request.lock();
                *pending = Some(request.clone());
                member.is_requested.store(true, Ordering::Release);
                drop(pending);
                member.waker.wake();
            }
        }
        (members.rounds, requests)
    }
}

/// A connection that takes part in the read barrier. Dropping the member removes the connection from the barrier.
#[derive(Debug)]
pub struct Member {
    read_barrier: Arc<ReadBarrier>,
    number: u64,
    state: Arc<MemberState>,
    /// The last request that the connection has seen and not confirmed.
    request: Option<ReadRequest>,
}

impl Member {
    /// Returns the flag that the connection must set before it reads.
    pub fn unprocessed_input(&self) -> UnprocessedInput {
        self.state.unprocessed_input.clone()
    }

    /// Waits until the barrier asks the connection to read its socket. Cancel-safe.
    pub async fn read_requested(&mut self) {
        poll_fn(|context| {
            self.state.waker.register(context.waker());
            if !self.state.is_requested.load(Ordering::Acquire) {
                return Poll::Pending;
            }
            let mut pending = self.state.request.lock();
            self.state.is_requested.store(false, Ordering::Relaxed);
            self.request = pending.take();
            Poll::Ready(())
        })
        .await;
    }

    /// Confirms the last request that was seen. Must be called after the socket was read until it was empty. A
    /// request that came later stays open.
    pub fn confirm_read(&mut self) {
        self.request = None;
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _shared = panics::shared();
        self.read_barrier.members.lock().by_number.remove(&self.number);
    }
}

/// A flag that is set while a connection may have read bytes that it has not processed. The barrier cannot find such
/// bytes in the socket.
#[derive(Clone, Debug, Default)]
pub struct UnprocessedInput(Arc<AtomicBool>);

impl UnprocessedInput {
    /// Sets the flag. Must be called before reading from the socket or writing to it. While a system call uses the
    /// socket, the kernel does not report bytes that arrive.
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Clears the flag. Must be called when nothing was left to read, and all bytes that were read are processed.
    pub fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// Returns whether the connection may have unprocessed bytes.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests;
