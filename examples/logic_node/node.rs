//! The logic node: what it does with pushes, Acks and timeout batches.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ackwheel::client::{AddOptions, Client, ClientError, SubscribeOptions, Subscription};
use ackwheel::core::{Message, Reason, TimedOut};
use ackwheel::protocol::frame::TimeoutBatch;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::sleep;

use crate::phones::{Patience, Phones, PushFailed};
use crate::records::Records;

/// How often a message is pushed before it is given up.
const MAX_ATTEMPTS: u8 = 2;
/// A batch that cannot be dealt with is wanted again after this time, and a subscription that has ended.
const LATER: Duration = Duration::from_secs(1);
/// Acks that wait are acknowledged together, at most so many.
const ACKS_AT_ONCE: usize = 1_024;

/// A logic node. Its records are locked for moments only, never across an await.
pub struct LogicNode {
    client: Client,
    phones: Phones,
    patience: Patience,
    records: Mutex<Records>,
}

impl LogicNode {
    /// A node that thinks all its phones are online.
    pub fn new(client: Client, phones: Phones, patience: Patience) -> LogicNode {
        LogicNode { client, phones, patience, records: Mutex::default() }
    }

    /// A user sent something: it is stored, and pushed if the other side is online.
    pub async fn send(&self, message: Message) {
        let offline = {
            let mut records = self.records();
            records.counts.sent += 1;
            records.stored.insert(message);
            let offline = records.offline.contains(&message.client.0);
            records.counts.not_pushed += usize::from(offline);
            offline
        };
        if !offline && let Err(error) = self.push(&[message], 1).await {
            println!("{message} stays in the store, and is not pushed: {error}");
        }
    }

    /// Adds, then pushes, then takes back what could not be pushed.
    async fn push(&self, messages: &[Message], attempt: u8) -> Result<(), ClientError> {
        if messages.is_empty() {
            return Ok(());
        }
        let options = AddOptions::default().ack_timeout_ticks(self.patience.ticks).attempt(attempt);
        self.client.add_new_msg(messages, options).await?;
        let meant = self.records().set_out(messages, attempt);
        let mut failed = Vec::new();
        for message in meant {
            if let Err(PushFailed) = self.phones.push(message, attempt) {
                failed.push(message);
            }
        }
        for message in &failed {
            let mut records = self.records();
            records.counts.withdrawn += 1;
            records.give_up(*message);
            records.mark_offline(message.client.0, "its connection is closed");
        }
        // A message that could not be withdrawn times out later, when nobody waits for it any more.
        if let Err(error) = self.client.withdraw(&failed).await {
            println!("{} pushes could not be withdrawn, and will time out: {error}", failed.len());
        }
        Ok(())
    }

    /// Takes Acks from the phones, as many together as are there.
    pub async fn acknowledge(self: Arc<Self>, mut acks: UnboundedReceiver<Message>) {
        let mut waiting = Vec::new();
        while acks.recv_many(&mut waiting, ACKS_AT_ONCE).await > 0 {
            let mut records = self.records();
            // Whatever the sidecar says of it: the phone has answered, and will not do so twice.
            let arrived = waiting.drain(..).map(|ack| (ack, records.arrived(ack))).collect();
            records.unanswered += 1;
            // No Ack waits for the answer to another: while Redis is away the sidecar holds them, and must have them for that.
            tokio::spawn(Arc::clone(&self).report(arrived));
        }
    }

    /// Reports messages that have arrived, each with the attempt that it was on, if it was still on the way.
    async fn report(self: Arc<Self>, arrived: Vec<(Message, Option<u8>)>) {
        let messages: Vec<Message> = arrived.iter().map(|(message, _)| *message).collect();
        let answered = self.client.del_msg(&messages).await;
        let mut records = self.records();
        records.unanswered -= 1;
        match answered {
            Ok(outcomes) => {
                for ((_, attempt), outcome) in arrived.into_iter().zip(outcomes) {
                    records.counts.acked(outcome, attempt);
                }
            }
            Err(error) => {
                println!("{} Acks may not have been counted, and time out then: {error}", messages.len());
            }
        }
    }

    /// Deals with timeout batches, for as long as the node lives: nobody else tells who is offline.
    pub async fn listen(self: Arc<Self>, options: SubscribeOptions) {
        loop {
            match self.client.subscribe(options.clone()).await {
                Ok(timeouts) => self.deal_with(timeouts).await,
                Err(error) => println!("no timeouts: {error}"),
            }
            sleep(LATER).await;
        }
    }

    /// Deals with timeout batches, one after the other, until the subscription ends: it comes back by itself when it is
    /// lost, but not when the sidecar refuses it, as with a wrong token.
    async fn deal_with(&self, mut timeouts: Subscription) {
        while let Some(batch) = timeouts.next().await {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => return println!("no more timeouts: {error}"),
            };
            let answered = match self.timed_out(&batch).await {
                // Only now: had this process died before, another node would have got the batch.
                Ok(()) => batch.ack().await,
                Err(error) => {
                    println!("batch {} is given back: {error}", batch.id);
                    batch.nack(LATER).await
                }
            };
            if let Err(error) = answered {
                println!("batch {} is not settled yet: {error}", batch.id);
            }
        }
    }

    /// Deals with a batch. It may be repeated after an error: what it did is seen from the records.
    async fn timed_out(&self, batch: &TimeoutBatch) -> Result<(), ClientError> {
        if self.records().dealt_with.contains(&batch.id) {
            self.records().counts.batches_again += 1;
            return Ok(());
        }
        let (again, mut given_up) = self.judge(batch);
        let mut says_offline = says_offline(batch);
        match self.push(&again, MAX_ATTEMPTS).await {
            // This sidecar takes no more messages, and given back the batch would end with it: they are stored, and nobody
            // who had one push only is offline for that.
            Err(error) if error.reason() == Some(Reason::Draining) => {
                given_up.extend(again);
                says_offline = false;
            }
            pushed => pushed?,
        }
        let mut records = self.records();
        for message in given_up {
            // Its late Ack may have come while the others were pushed.
            let Some(push) = records.give_up(message) else { continue };
            records.counts.given_up += 1;
            if says_offline {
                records.mark_offline_unless_heard(message.client.0, push, "it answered neither push");
            }
        }
        records.dealt_with.insert(batch.id);
        Ok(())
    }

    /// Which messages of a batch are pushed again, and which are given up. Those whose late Ack came before
    /// the batch, or that were pushed again already, are neither.
    fn judge(&self, batch: &TimeoutBatch) -> (Vec<Message>, Vec<Message>) {
        let records = self.records();
        let meant = batch.messages.iter().filter(|timed_out| {
            records.on_the_way.get(&timed_out.message).is_some_and(|push| push.attempt == timed_out.attempt)
        });
        // A sidecar that drains takes no new messages.
        let (again, given_up): (Vec<&TimedOut>, Vec<&TimedOut>) =
            meant.partition(|timed_out| timed_out.attempt < MAX_ATTEMPTS && !batch.counts.drained);
        let messages = |timed_out: Vec<&TimedOut>| timed_out.iter().map(|one| one.message).collect();
        (messages(again), messages(given_up))
    }

    /// Whether every message has arrived or is stored, and neither a phone nor the sidecar will say anything more.
    pub fn is_settled(&self) -> bool {
        let records = self.records();
        records.on_the_way.is_empty() && records.unanswered == 0 && self.phones.are_quiet()
    }

    /// The result of the run.
    pub fn print_summary(&self) {
        let records = self.records();
        let counts = &records.counts;
        let (arrived, open) = (counts.sent - records.stored.len(), records.on_the_way.len());
        let stored = records.stored.len() - open;
        println!("{} messages were sent: {arrived} arrived, {stored} are stored, {open} are open", counts.sent);
        println!(
            "  acknowledged        {:>4} first push, {} second push, {} late",
            counts.first_push, counts.second_push, counts.late
        );
        println!("  not acknowledged    {:>4} given up, {} withdrawn", counts.given_up, counts.withdrawn);
        println!("  not pushed at all   {:>4}", counts.not_pushed);
        println!("  batches dealt with  {:>4}, {} came again", records.dealt_with.len(), counts.batches_again);
        println!("  sessions offline    {:>4}: {:?}", records.offline.len(), records.offline);
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the silence in a batch is the phones' own. A storm is likelier our fault than theirs, and a drained batch was
/// cut short: their messages wait in the store until they are fetched, but nobody is marked offline. How old a
/// batch is does not matter, since each push is compared with what was heard after it.
fn says_offline(batch: &TimeoutBatch) -> bool {
    !batch.counts.storm && !batch.counts.drained
}

#[cfg(test)]
mod tests {
    use ackwheel::core::{BatchId, Tick, TickCounts};

    use super::*;

    #[test]
    fn storms_and_drains_mark_nobody_offline() {
        let batch = |counts| {
            let id = BatchId { tick: Tick(1), epoch: 1, ring: 0, seq: 0 };
            TimeoutBatch { id, delivery_count: 1, age_ms: 40, counts, last: true, messages: Vec::new() }
        };
        assert!(says_offline(&batch(TickCounts::default())));
        assert!(!says_offline(&batch(TickCounts { storm: true, ..TickCounts::default() })));
        assert!(!says_offline(&batch(TickCounts { drained: true, ..TickCounts::default() })));
    }
}
