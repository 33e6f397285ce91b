//! The records of a logic node. In production this is a database, since nodes come and go.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Instant;

use ackwheel::core::{BatchId, DelOutcome, Message};

/// Everything that the node writes down.
#[derive(Debug, Default)]
pub struct Records {
    /// Sessions that are offline; all others are online. A phone that connects again gets a new session, so
    /// that what its old one did not answer says nothing against it.
    pub offline: BTreeSet<u64>,
    /// When each session was last heard. Here by its Acks; in a real node by whatever it says.
    heard: HashMap<u64, Instant>,
    /// The store: every message from before it is pushed until it has arrived. A phone that comes back fetches its
    /// messages that are not on the way.
    pub stored: HashSet<Message>,
    /// Messages that were pushed, and have neither arrived nor been given up.
    pub on_the_way: HashMap<Message, Push>,
    /// Batches that were dealt with: one that comes again is acknowledged, and that is all. A node that runs
    /// for years forgets them after an hour.
    pub dealt_with: HashSet<BatchId>,
    /// DelMsgs that the sidecar has not answered.
    pub unanswered: usize,
    /// For the summary.
    pub counts: Counts,
}

/// The last push of a message.
#[derive(Clone, Copy, Debug)]
pub struct Push {
    pub attempt: u8,
    pub pushed_at: Instant,
}

/// The counts of a run.
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
    /// Counts the sidecar's answer to the Ack of a message. `attempt` is set if the message was on the way.
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
    /// Records that these messages will be pushed, without those that have arrived since an earlier push. Should one of
    /// those time out after all, no push is recorded for it.
    pub fn set_out(&mut self, messages: &[Message], attempt: u8) -> Vec<Message> {
        let is_meant = |message: &&Message| attempt == 1 || self.on_the_way.contains_key(message);
        let meant: Vec<Message> = messages.iter().filter(is_meant).copied().collect();
        let push = Push { attempt, pushed_at: Instant::now() };
        self.on_the_way.extend(meant.iter().map(|message| (*message, push)));
        meant
    }

    /// The message has arrived, whatever was thought before. The attempt it was on, if it was on the way.
    pub fn arrived(&mut self, message: Message) -> Option<u8> {
        self.stored.remove(&message);
        self.heard.insert(message.client.0, Instant::now());
        if self.offline.remove(&message.client.0) {
            println!("session {:>3} is online again: it answered", message.client.0);
        }
        self.on_the_way.remove(&message).map(|push| push.attempt)
    }

    /// The message is pushed no more, and stays in the store. Its last push, if it was on the way.
    pub fn give_up(&mut self, message: Message) -> Option<Push> {
        self.on_the_way.remove(&message)
    }

    /// Nobody is there.
    pub fn mark_offline(&mut self, session: u64, why: &str) {
        if self.offline.insert(session) {
            println!("session {session:>3} is offline: {why}");
        }
    }

    /// The session has not answered a push. That says nothing if it was heard since: then it is there.
    pub fn mark_offline_unless_heard(&mut self, session: u64, push: Push, why: &str) {
        if self.heard.get(&session).is_none_or(|heard| *heard < push.pushed_at) {
            self.mark_offline(session, why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_heard_since_the_push_is_online_whatever_it_left_unanswered() {
        let mut records = Records::default();
        let [ignored, answered, later] = [1, 2, 3].map(|id| Message::new(id, 7));
        records.set_out(&[ignored, answered], 1);
        assert_eq!(records.arrived(answered), Some(1));
        let push = records.give_up(ignored).unwrap();
        records.mark_offline_unless_heard(7, push, "it did not answer");
        assert!(records.offline.is_empty());
        records.set_out(&[later], 1);
        let push = records.give_up(later).unwrap();
        records.mark_offline_unless_heard(7, push, "it did not answer");
        assert_eq!(records.offline, BTreeSet::from([7]), "it was heard, but before that push");
    }
}
