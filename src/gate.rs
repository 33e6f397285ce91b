//! Before a tick is decided, what waits in the sockets is read.
//!
//! When the process stood still, acknowledgements wait unread. [`ReadGate::pass`] asks every connection to
//! read until its socket is empty, and returns when all have. A connection is a [`Member`] from its
//! first frame to its end; one that comes in the middle of a round is not waited for.
//!
//! Several tickers may come at the same time. One round goes on at a time, and whoever came before it began
//! shares its end: with many rings the connections are asked hardly more often than with one.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

/// A patience is waited for in so many parts, if they are long enough for a timer that counts in ms: while the process
/// stands still, only one of them runs out.
const PARTS: u32 = 4;

/// As long as a part is at least.
const LEAST_PART: Duration = Duration::from_millis(5);

/// Where the ticker meets the connections.
#[derive(Debug)]
pub struct ReadGate {
    round: watch::Sender<u64>,
    count: Mutex<Count>,
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
struct Count {
    round: u64,
    members: usize,
    /// Members that have not yet passed the current round.
    outstanding: usize,
}

impl ReadGate {
    /// A gate without members.
    #[must_use]
    pub fn new() -> Arc<ReadGate> {
        let (round, _) = watch::channel(0);
        Arc::new(ReadGate {
            round,
            count: Mutex::default(),
            all_passed: Notify::new(),
            last: tokio::sync::Mutex::default(),
        })
    }

    /// A connection joins.
    #[must_use]
    pub fn join(self: &Arc<Self>) -> Member {
        let mut count = self.count.lock();
        count.members += 1;
        let rounds = self.round.subscribe();
        Member { gate: Arc::clone(self), rounds, asked: count.round, passed: count.round }
    }

    fn take_off(&self, count: &mut Count) {
        count.outstanding -= 1;
        if count.outstanding == 0 {
            self.all_passed.notify_waiters();
        }
    }

    /// Waits until every connection has read what was waiting; at most `patience` from the begin of its round,
    /// and says whether all did. A pause of the process takes away a quarter of a patience of 20 ms or more: the
    /// connections have not had that time either.
    pub async fn pass(&self, patience: Duration) -> bool {
        // A round that goes on already may have asked some connections too early.
        let wanted = self.count.lock().round + 1;
        let mut last = self.last.lock().await;
        if last.round >= wanted {
            return last.all_passed;
        }
        let round = self.begin();
        let all_passed = self.ended(patience).await;
        *last = Last { round, all_passed };
        all_passed
    }

    fn begin(&self) -> u64 {
        let mut count = self.count.lock();
        count.round += 1;
        count.outstanding = count.members;
        self.round.send_replace(count.round);
        count.round
    }

    async fn ended(&self, patience: Duration) -> bool {
        let all_passed = async {
            loop {
                let notified = self.all_passed.notified();
                if self.count.lock().outstanding == 0 {
                    return;
                }
                notified.await;
            }
        };
        let mut all_passed = std::pin::pin!(all_passed);
        let parts = if patience < LEAST_PART * PARTS { 1 } else { PARTS };
        for _ in 0..parts {
            if tokio::time::timeout(patience / parts, &mut all_passed).await.is_ok() {
                return true;
            }
        }
        false
    }
}

/// A connection, as the gate sees it.
#[derive(Debug)]
pub struct Member {
    gate: Arc<ReadGate>,
    rounds: watch::Receiver<u64>,
    /// The last round that it was asked in.
    asked: u64,
    /// The last round that it passed; whoever joins in a round need not pass that.
    passed: u64,
}

impl Member {
    /// Waits until the ticker asks to read what waits. Cancel-safe.
    pub async fn asked(&mut self) {
        // The gate outlives its members, so the sender is there.
        let _ = self.rounds.changed().await;
        self.asked = *self.rounds.borrow_and_update();
    }

    /// Answers the last question: the socket was read until it was empty. A later question stays open.
    pub fn passed(&mut self) {
        let gate = Arc::clone(&self.gate);
        let mut count = gate.count.lock();
        if self.asked == count.round && self.passed != count.round {
            self.passed = count.round;
            gate.take_off(&mut count);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut count = self.gate.count.lock();
        count.members -= 1;
        if self.passed != count.round {
            self.gate.take_off(&mut count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_round_ends_when_every_member_passed_or_went() {
        let gate = ReadGate::new();
        assert!(gate.pass(Duration::from_secs(1)).await, "nobody to wait for");
        let (mut first, mut second) = (gate.join(), gate.join());
        assert!(!gate.pass(Duration::from_secs(1)).await, "two did not answer");
        for member in [&mut first, &mut second] {
            member.asked().await;
            member.passed();
        }

        let round = tokio::spawn({
            let gate = Arc::clone(&gate);
            async move { gate.pass(Duration::from_secs(60)).await }
        });
        first.asked().await;
        drop(second);
        let late = gate.join();
        first.passed();
        first.passed();
        assert_eq!(gate.count.lock().outstanding, 0, "passing twice counts once");
        tokio::task::yield_now().await;
        assert!(round.await.unwrap(), "whoever joins during a round is not waited for");
        drop(late);
        assert_eq!(gate.count.lock().members, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_came_before_a_round_shares_it_and_whoever_came_during_it_gets_the_next() {
        let gate = ReadGate::new();
        let mut member = gate.join();
        let pass = || {
            let gate = Arc::clone(&gate);
            tokio::spawn(async move { gate.pass(Duration::from_secs(60)).await })
        };
        let first = pass();
        member.asked().await;
        let (second, third) = (pass(), pass());
        tokio::task::yield_now().await;
        member.passed();
        assert!(first.await.unwrap());
        member.asked().await;
        assert!(!second.is_finished() && !third.is_finished(), "what came meanwhile is read for them");
        member.passed();
        assert!(second.await.unwrap() && third.await.unwrap());
        assert_eq!(gate.count.lock().round, 2, "the two shared a round");

        // A ticker that is aborted in its round does not leave the others waiting.
        let aborted = pass();
        member.asked().await;
        let waiting = pass();
        tokio::task::yield_now().await;
        aborted.abort();
        member.asked().await;
        member.passed();
        assert!(waiting.await.unwrap());
    }

    #[tokio::test]
    async fn a_pause_is_no_time_to_read_in() {
        let gate = ReadGate::new();
        let mut member = gate.join();
        let patience = Duration::from_millis(400);
        let round = tokio::spawn({
            let gate = Arc::clone(&gate);
            async move { gate.pass(patience).await }
        });
        member.asked().await;
        // As a paused process: nothing runs on this thread for longer than the patience.
        std::thread::sleep(patience * 2);
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        assert!(!round.is_finished(), "the connections have their time after a pause");
        member.passed();
        assert!(round.await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_to_the_last_round_is_none_to_the_next() {
        let gate = ReadGate::new();
        let mut member = gate.join();
        assert!(!gate.pass(Duration::from_secs(1)).await);
        member.asked().await;
        // It looked into its socket for the first round; what comes in the second it has not seen.
        let round = tokio::spawn({
            let gate = Arc::clone(&gate);
            async move { gate.pass(Duration::from_secs(60)).await }
        });
        tokio::task::yield_now().await;
        member.passed();
        assert_eq!(gate.count.lock().outstanding, 1);
        member.asked().await;
        member.passed();
        assert!(round.await.unwrap());
    }
}
