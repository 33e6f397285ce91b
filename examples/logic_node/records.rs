//! What a logic node knows. In a real one this is a database: nodes come and go.

use std::collections::{BTreeSet, HashMap, HashSet};

use ackwheel::core::batch::BatchId;
use ackwheel::core::message::{DelOutcome, Message};

/// Everything that the node writes down.
#[derive(Debug, Default)]
pub struct Records {
    /// Sessions that are offline; all others are online. A phone that connects anew gets a new session, so
    /// that what its old one did not answer says nothing against it.
    pub offline: BTreeSet<u64>,
    /// Messages that were pushed, each with its last attempt, and have neither arrived nor been given up.
    pub on_the_way: HashMap<Message, u8>,
    /// The offline storage: what a phone fetches when it comes back.
    pub stored: HashSet<Message>,
    /// Batches that were dealt with: one that comes again is acknowledged, and that is all. A node that runs
    /// for years forgets them after an hour.
    pub dealt_with: HashSet<BatchId>,
    /// DelMsgs that the sidecar has not answered.
    pub unanswered: usize,
    /// For the summary.
    pub counts: Counts,
}

/// What happened, in numbers.
#[derive(Debug, Default)]
pub struct Counts {
    /// Messages that were to be sent.
    pub sent: usize,
    /// Of these, stored at once, since their session was offline.
    pub not_pushed: usize,
    /// Delivered with the first push.
    pub first_push: usize,
    /// Delivered with the second.
    pub second_push: usize,
    /// Acks that came after their message had timed out.
    pub late: usize,
    /// Pushes that failed at once.
    pub withdrawn: usize,
    /// Messages given up after the second push.
    pub given_up: usize,
    /// Batches that came again.
    pub batches_again: usize,
}

impl Counts {
    /// What the sidecar said to the Ack of a message, which was on this attempt if it was on the way.
    pub fn acked(&mut self, outcome: DelOutcome, attempt: Option<u8>) {
        match (outcome, attempt) {
            (DelOutcome::Acked, Some(1)) => self.first_push += 1,
            (DelOutcome::Acked, Some(_)) => self.second_push += 1,
            // It timed out, but the phone is alive after all.
            (DelOutcome::Late, _) => self.late += 1,
            // It was counted when its late Ack came, and answered the second push too; or it is the second Ack of one
            // message, a very old one, or one of a message that a sidecar has lost: it says nothing new.
            (DelOutcome::Acked, None) | (DelOutcome::Unknown | DelOutcome::Withdrawn, _) => {}
        }
    }
}

impl Records {
    /// These messages are to be pushed. What was pushed before and has arrived since is left out: should it time out after
    /// all, it finds no push noted.
    pub fn set_out(&mut self, messages: &[Message], attempt: u8) -> Vec<Message> {
        let is_meant = |message: &&Message| attempt == 1 || self.on_the_way.contains_key(message);
        let meant: Vec<Message> = messages.iter().filter(is_meant).copied().collect();
        self.on_the_way.extend(meant.iter().map(|message| (*message, attempt)));
        meant
    }

    /// The message has arrived, whatever was thought before. The attempt it was on, if it was on the way.
    pub fn arrived(&mut self, message: Message) -> Option<u8> {
        self.stored.remove(&message);
        if self.offline.remove(&message.client.0) {
            println!("session {:>3} is online again: it answered", message.client.0);
        }
        self.on_the_way.remove(&message)
    }

    /// The message did not arrive: it waits in the offline storage.
    pub fn store(&mut self, message: Message) {
        self.on_the_way.remove(&message);
        self.stored.insert(message);
    }

    /// Nobody is there.
    pub fn mark_offline(&mut self, session: u64, why: &str) {
        if self.offline.insert(session) {
            println!("session {session:>3} is offline: {why}");
        }
    }
}
