//! Before a tick is decided, what waits in the sockets is read.
//!
//! When the process stood still, acknowledgements wait unread. [`ReadBarrier::pass`] asks the connections to read until
//! their sockets are empty, and returns when all have. A connection is a [`Member`] from its first frame to its end;
//! one that comes in the middle of a round is not waited for.
//!
//! Only those are asked that may have something: a round wakes whoever has to read, and has but a look at what the
//! others say of themselves. Bytes that came before the round are in one of three places. They are still in the socket: then the kernel says so. Or they
//! are out of it and dealt with. Or they are on the way between: then the connection has said that it is [`Taking`]
//! before it read, and the gate looks for that after it has asked the kernel, so that nothing slips through.
//!
//! Several tickers may come at the same time. One round goes on at a time, and whoever came before it began
//! shares its end: with many rings the connections are asked hardly more often than with one.

mod arrivals;
mod member;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use self::arrivals::{Arrivals, Waiting};
use self::member::Line;
pub use self::member::{Member, Taking};
use crate::process::panics;
use crate::ticker::stall_aware_timeout;

/// Where the ticker meets the connections.
#[derive(Debug)]
pub struct ReadBarrier {
    arrivals: Arrivals,
    members: Mutex<Members>,
    all_passed: Notify,
    /// Held while a round goes on.
    last: tokio::sync::Mutex<Last>,
}

/// The last round that has ended.
#[derive(Debug, Default)]
struct Last {
    round: u64,
    all_passed: bool,
}

#[derive(Debug, Default)]
struct Members {
    round: u64,
    /// Those that were asked in the current round and have not passed it.
    outstanding: usize,
    /// So many have come so far.
    numbers: u64,
    seats: HashMap<u64, Registration>,
}

#[derive(Debug)]
struct Registration {
    line: Arc<Line>,
    /// Whether the kernel tells when something waits in its socket; who is not watched is asked in every round.
    watched: bool,
    /// Whether the current round waits for it.
    outstanding: bool,
}

impl ReadBarrier {
    /// A gate without members.
    #[must_use]
    pub fn new() -> Arc<ReadBarrier> {
        Arc::new(ReadBarrier {
            arrivals: Arrivals::new(),
            members: Mutex::default(),
            all_passed: Notify::new(),
            last: tokio::sync::Mutex::default(),
        })
    }

    /// A connection joins, with the socket that it reads; without one it is asked in every round.
    #[must_use]
    pub fn join(self: &Arc<Self>, socket: Option<BorrowedFd<'_>>) -> Member {
        let _shared = panics::shared();
        let line = Arc::new(Line::new());
        let number = {
            let mut members = self.members.lock();
            members.numbers += 1;
            members.numbers
        };
        let watched = socket.is_some_and(|socket| self.arrivals.watch(socket, number));
        let seat = Registration { line: Arc::clone(&line), watched, outstanding: false };
        self.members.lock().seats.insert(number, seat);
        Member { read_barrier: Arc::clone(self), number, line, asked: 0 }
    }

    /// Waits until what was waiting in the sockets is read; at most `patience` from the begin of its round,
    /// and says whether all of it was. A pause of the process does not use the patience up.
    pub async fn pass(&self, patience: Duration) -> bool {
        // A round that goes on already may have asked some connections too early.
        let wanted = self.members.lock().round + 1;
        let mut last = self.last.lock().await;
        if last.round >= wanted {
            return last.all_passed;
        }
        let round = self.begin();
        let all_passed = self.ended(patience).await;
        *last = Last { round, all_passed };
        all_passed
    }

    /// Asks all that may have something to read.
    fn begin(&self) -> u64 {
        // Whoever comes from here on waits for the next round. Then first the sockets, and after them who is taking:
        // the other way round, bytes could be taken between the two.
        let round = {
            let mut members = self.members.lock();
            members.round += 1;
            members.round
        };
        let waiting = self.arrivals.waiting();
        let mut members = self.members.lock();
        let any = waiting == Waiting::Unknown;
        for seat in members.seats.values_mut() {
            seat.outstanding = any || !seat.watched || seat.line.is_taking();
        }
        if let Waiting::In(numbers) = waiting {
            for number in numbers {
                // Who is not there any more has left, and closes its socket.
                if let Some(seat) = members.seats.get_mut(&number) {
                    seat.outstanding = true;
                }
            }
        }
        let asked: Vec<Arc<Line>> =
            members.seats.values().filter(|seat| seat.outstanding).map(|seat| Arc::clone(&seat.line)).collect();
        members.outstanding = asked.len();
        drop(members);
        for line in asked {
            line.ask(round);
        }
        round
    }

    async fn ended(&self, patience: Duration) -> bool {
        let all_passed = async {
            loop {
                let notified = self.all_passed.notified();
                if self.members.lock().outstanding == 0 {
                    return;
                }
                notified.await;
            }
        };
        stall_aware_timeout(patience, all_passed).await.is_some()
    }

    /// A member has passed the round in which it was asked.
    fn passed(&self, number: u64, round: u64) {
        let _shared = panics::shared();
        let mut members = self.members.lock();
        if round != members.round {
            return;
        }
        let seat = members.seats.get_mut(&number).expect("a member has a seat until it leaves");
        if std::mem::take(&mut seat.outstanding) {
            self.take_off(&mut members);
        }
    }

    fn left(&self, number: u64) {
        let _shared = panics::shared();
        let mut members = self.members.lock();
        let seat = members.seats.remove(&number).expect("a member leaves once");
        if seat.outstanding {
            self.take_off(&mut members);
        }
    }

    fn take_off(&self, members: &mut Members) {
        members.outstanding -= 1;
        if members.outstanding == 0 {
            self.all_passed.notify_waiters();
        }
    }
}
