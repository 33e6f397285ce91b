//! Parses timeout batches and group names in the answers of Lua scripts. The outbox is a stream in Redis, and each
//! batch is one entry of this stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tracing::{error, warn};

use crate::core::{BatchId, Delivery, GroupName, Tick, TickCounts, TimedOut, TimeoutBatch};
use crate::redis::connection::errors::Fault;
use crate::redis::scripts::Answer;

/// Whether a group with an illegal name was logged. The names come from outside, so one line must do for all of them.
static IS_LOGGED: AtomicBool = AtomicBool::new(false);

/// Returns the id of the stream entry that contains this batch.
pub(super) fn entry_id(batch: BatchId) -> String {
    format!("{}-{}", batch.tick, batch.seq)
}

/// Returns the entry id and the epoch of each batch, as arguments of a script. The epoch is the number of the election
/// whose leader published the batch.
pub(super) fn ids_and_epochs(batches: &[BatchId]) -> Vec<(String, u64)> {
    batches.iter().map(|batch| (entry_id(*batch), batch.epoch)).collect()
}

/// Reads the next value of an answer as the name of a group. Returns `None` if another program has made a group with an
/// illegal name in the stream.
pub(super) fn group_name(answer: &mut Answer) -> Result<Option<GroupName>, Fault> {
    let name = answer.bytes()?;
    let legal = std::str::from_utf8(&name).ok().and_then(|name| name.parse().ok());
    if legal.is_none() && !IS_LOGGED.swap(true, Ordering::Relaxed) {
        warn!(
            group = %String::from_utf8_lossy(&name),
            "Redis has a group whose name is not a name of a group, and it is ignored: another program writes to \
             ackwheel's keys; delete the group with XGROUP DESTROY; further such groups are not logged"
        );
    }
    Ok(legal)
}

/// Reads one entry from a reply of the script `take` or `retake`. Returns the id of the entry, and the batch in it.
/// Returns a fault in place of a batch that this version cannot read, for example because a newer version wrote it.
pub(super) fn delivery(mut reply: Answer, ring: u16) -> Result<(String, Result<Delivery, Fault>), Fault> {
    let entry = reply.text()?;
    let read = read(&entry, reply, ring);
    Ok((entry, read))
}

fn read(entry: &str, mut reply: Answer, ring: u16) -> Result<Delivery, Fault> {
    let (tick, seq) = parse_entry_id(entry).ok_or_else(|| reply.strange(entry))?;
    let delivery_count = u32::try_from(reply.count()?).unwrap_or(u32::MAX);
    let id = BatchId { tick, epoch: reply.count()?, ring, seq };
    let counts = TickCounts {
        added: reply.count()?,
        acked: reply.count()?,
        storm: reply.count()? == 1,
        // This flag marks messages that a draining sidecar delivers before their deadline. With Redis, a draining
        // sidecar leaves the messages in flight in Redis, so no batch has the flag.
        drained: false,
    };
    let last = reply.count()? == 1;
    let age = Duration::from_millis(reply.count()?);
    let text = reply.text()?;
    let mut foreign = Vec::new();
    let messages = text.split(' ').filter_map(|word| {
        let message = parse_message(word);
        if message.is_none() {
            foreign.push(word);
        }
        message
    });
    let messages: Vec<TimedOut> = messages.collect();
    if messages.is_empty() {
        return Err(reply.strange(&format!("the messages of {id}")));
    }
    if !foreign.is_empty() {
        error!(
            ring,
            entry,
            foreign = foreign.join(" "),
            "a batch contains words that are not messages, and is delivered without these words: another program \
             writes to ackwheel's keys; give ackwheel a Redis or a namespace of its own"
        );
    }
    Ok(Delivery { batch: Arc::new(TimeoutBatch { id, counts, last, messages }), delivery_count, age })
}

fn parse_entry_id(text: &str) -> Option<(Tick, u32)> {
    let (tick, seq) = text.split_once('-')?;
    Some((Tick(tick.parse().ok()?), seq.parse().ok()?))
}

/// Parses a message of a batch: `id[:client id][/attempt]`. Without a client id, the client id is 0. Without an
/// attempt, the attempt is 1.
fn parse_message(text: &str) -> Option<TimedOut> {
    let (message, attempt) = text.split_once('/').unwrap_or((text, "1"));
    Some(TimedOut { message: message.parse().ok()?, attempt: attempt.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;
    use crate::core::Message;
    use crate::redis::scripts::SCRIPTS;

    fn reply(values: [&str; 9]) -> Answer {
        let values = values.map(|value| Value::BulkString(value.into()));
        Answer::new(&SCRIPTS.take, Value::Array(values.into())).unwrap()
    }

    #[test]
    fn a_batch_is_read_from_its_entry() {
        let text = "1 2:7 18446744073709551615:18446744073709551615/255";
        let read = reply(["170-3", "2", "1700000000000", "10", "7", "1", "0", "250", text]);
        let Delivery { batch, delivery_count, age } = delivery(read, 4).unwrap().1.unwrap();
        assert_eq!(batch.id, BatchId { tick: Tick(170), epoch: 1_700_000_000_000, ring: 4, seq: 3 });
        assert_eq!(entry_id(batch.id), "170-3");
        assert_eq!(batch.counts, TickCounts { added: 10, acked: 7, storm: true, drained: false });
        assert_eq!((batch.last, delivery_count, age), (false, 2, Duration::from_millis(250)));
        let expected = [(1, 0, 1), (2, 7, 1), (u64::MAX, u64::MAX, 255)]
            .map(|(id, client, attempt)| TimedOut { message: Message::new(id, client), attempt });
        assert_eq!(batch.messages, expected);
    }

    #[test]
    fn a_foreign_word_in_a_batch_is_left_out() {
        let read = delivery(reply(["170-3", "1", "5", "1", "0", "0", "1", "0", "1 x 2:7/256 3:4/2"]), 0);
        let messages = &read.unwrap().1.unwrap().batch.messages;
        let expected = [(1, 0, 1), (3, 4, 2)]
            .map(|(id, client, attempt)| TimedOut { message: Message::new(id, client), attempt });
        assert_eq!(*messages, expected);
    }

    #[test]
    fn an_entry_without_a_readable_message_is_no_batch() {
        for (id, messages) in [("1", "9"), ("1-x", "9"), ("1-0", ""), ("1-0", "9/256"), ("1-0", "a:1")] {
            let read = delivery(reply([id, "1", "5", "1", "0", "0", "1", "0", messages]), 0).unwrap();
            assert!(read.0 == id && read.1.is_err());
        }
    }
}
