//! The read barrier: before a tick expires, the connections read what waits in their sockets.
//!
//! After a stall of the process, acknowledgements wait unread. [`ReadBarrier::wait_until_read`] asks the connections to
//! read until their sockets are empty, and returns when all have. A connection is a [`Member`] from its first frame to
//! its end. A round does not wait for a connection that joins during it.
//!
//! A round asks only connections that may have unread bytes. Bytes that arrived before the round are in one of three
//! places. In the socket: the kernel tells that. Processed: nothing is to do. In between: the connection set [`UnprocessedInput`]
//! before it read. The barrier checks `UnprocessedInput` after it has asked the kernel, so that it misses no bytes.
//!
//! Several tickers may wait at the same time. Only one round runs at a time, and all that called before it began share
//! its result. So with many rings the connections are asked hardly more often than with one.

mod readable_sockets;

use std::collections::HashMap;
use std::future::poll_fn;
use std::mem;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;

use self::readable_sockets::ReadableSockets;
use crate::process::panics;
use crate::ticker::stall_aware_timeout;

/// Waits for the connections to read.
#[derive(Debug)]
pub struct ReadBarrier {
    sockets: ReadableSockets,
    members: Mutex<Members>,
    /// Notified when no connection is outstanding.
    all_read: Notify,
    /// The number of the last round, and whether all were read in it. Locked while a round runs.
    last: tokio::sync::Mutex<(u64, bool)>,
}

#[derive(Debug, Default)]
struct Members {
    round: u64,
    /// Number of members that were asked in the current round and have not confirmed.
    outstanding: usize,
    last_number: u64,
    by_number: HashMap<u64, Registered>,
}

#[derive(Debug)]
struct Registered {
    state: Arc<MemberState>,
    /// Whether the kernel watches its socket. Other members are asked in every round.
    watched: bool,
    /// Whether the current round waits for it.
    outstanding: bool,
}

/// The state that barrier and connection share.
#[derive(Debug)]
struct MemberState {
    /// The last round in which the connection was asked.
    asked_in: AtomicU64,
    waker: AtomicWaker,
    unprocessed_input: UnprocessedInput,
}

impl ReadBarrier {
    /// A barrier without members.
    #[must_use]
    pub fn new() -> Arc<ReadBarrier> {
        Arc::new(ReadBarrier {
            sockets: ReadableSockets::new(),
            members: Mutex::default(),
            all_read: Notify::new(),
            last: tokio::sync::Mutex::default(),
        })
    }

    /// Adds a connection with the socket that it reads. A connection without one is asked in every round.
    #[must_use]
    pub fn join(self: &Arc<Self>, socket: Option<BorrowedFd<'_>>) -> Member {
        let _shared = panics::shared();
        // The connection may have read bytes before, as in a TLS handshake.
        let unprocessed_input = UnprocessedInput(Arc::new(AtomicBool::new(true)));
        let state =
            Arc::new(MemberState { asked_in: AtomicU64::new(0), waker: AtomicWaker::new(), unprocessed_input });
        let mut members = self.members.lock();
        members.last_number += 1;
        let number = members.last_number;
        let watched = socket.is_some_and(|socket| self.sockets.watch(socket, number));
        let registered = Registered { state: Arc::clone(&state), watched, outstanding: false };
        members.by_number.insert(number, registered);
        Member { read_barrier: Arc::clone(self), number, state, asked: 0 }
    }

    /// Waits until the bytes that waited in the sockets are read, for at most `timeout` from the begin of the round.
    /// Returns whether all were read. A stall of the process does not use up the timeout.
    pub async fn wait_until_read(&self, timeout: Duration) -> bool {
        // A round that runs already may have asked some connections too early.
        let wanted = self.members.lock().round + 1;
        let mut last = self.last.lock().await;
        if last.0 >= wanted {
            return last.1;
        }
        let round = self.begin_round();
        let all_read = async {
            loop {
                let notified = self.all_read.notified();
                if self.members.lock().outstanding == 0 {
                    return;
                }
                notified.await;
            }
        };
        let all_read = stall_aware_timeout(timeout, all_read).await.is_some();
        *last = (round, all_read);
        all_read
    }

    /// Asks all members that may have unread bytes.
    fn begin_round(&self) -> u64 {
        // A call from here on waits for the next round. The kernel is asked before `UnprocessedInput` is checked: in the other
        // order, a connection could take bytes between the two.
        let round = {
            let mut members = self.members.lock();
            members.round += 1;
            members.round
        };
        let waiting = self.sockets.waiting();
        let mut members = self.members.lock();
        for member in members.by_number.values_mut() {
            member.outstanding = waiting.is_none() || !member.watched || member.state.unprocessed_input.is_set();
        }
        for number in waiting.into_iter().flatten() {
            // A number without a member has left, and its socket is being closed.
            if let Some(member) = members.by_number.get_mut(&number) {
                member.outstanding = true;
            }
        }
        let asked = members.by_number.values().filter(|member| member.outstanding);
        let asked: Vec<Arc<MemberState>> = asked.map(|member| Arc::clone(&member.state)).collect();
        members.outstanding = asked.len();
        drop(members);
        for member in asked {
            member.asked_in.store(round, Ordering::Release);
            member.waker.wake();
        }
        round
    }

    /// A member has read all bytes of the round in which it was asked.
    fn confirm(&self, number: u64, round: u64) {
        let _shared = panics::shared();
        let mut members = self.members.lock();
        if round == members.round {
            let member = members.by_number.get_mut(&number).expect("a member is registered until it leaves");
            let was_outstanding = mem::take(&mut member.outstanding);
            self.remove_outstanding(&mut members, was_outstanding);
        }
    }

    fn leave(&self, number: u64) {
        let _shared = panics::shared();
        let mut members = self.members.lock();
        let member = members.by_number.remove(&number).expect("a member leaves once");
        self.remove_outstanding(&mut members, member.outstanding);
    }

    fn remove_outstanding(&self, members: &mut Members, was_outstanding: bool) {
        members.outstanding -= usize::from(was_outstanding);
        if was_outstanding && members.outstanding == 0 {
            self.all_read.notify_waiters();
        }
    }
}

/// A connection that takes part in the read barrier. It leaves when this is dropped.
#[derive(Debug)]
pub struct Member {
    read_barrier: Arc<ReadBarrier>,
    number: u64,
    state: Arc<MemberState>,
    /// The last round in which it knows that it was asked.
    asked: u64,
}

impl Member {
    /// The flag that the connection sets while it reads.
    #[must_use]
    pub fn unprocessed_input(&self) -> UnprocessedInput {
        self.state.unprocessed_input.clone()
    }

    /// Waits until the ticker asks to read what waits in the socket. Cancel-safe.
    pub async fn read_requested(&mut self) {
        poll_fn(|context| {
            self.state.waker.register(context.waker());
            let round = self.state.asked_in.load(Ordering::Acquire);
            if round == self.asked {
                return Poll::Pending;
            }
            self.asked = round;
            Poll::Ready(())
        })
        .await;
    }

    /// Answers the last question: the socket was read until it was empty. A later question stays open.
    pub fn confirm_read(&mut self) {
        self.read_barrier.confirm(self.number, self.asked);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.read_barrier.leave(self.number);
    }
}

/// Whether a connection may have taken bytes out of its socket that it has not processed. The barrier cannot find those
/// in the socket.
#[derive(Clone, Debug)]
pub struct UnprocessedInput(Arc<AtomicBool>);

impl UnprocessedInput {
    /// Call before reading from the socket or writing to it: bytes that arrive during a system call are not seen in the
    /// socket yet.
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Call when nothing was left to read, and all bytes that were read are processed.
    pub fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// Whether the connection may have unprocessed bytes.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests;
