//! `watch`: timeout batches as they come, a line each.

use std::fmt::Write as _;
use std::io::{Write, stderr, stdout};

use clap::Args;
use serde::Serialize;

use super::Failure;
use super::connect::Connect;
use crate::client::{SubscribeOptions, Subscription};
use crate::core::group::GroupName;
use crate::protocol::frame::TimeoutBatch;

/// Characters of a plain line after which messages are no longer listed.
const LINE_LENGTH: usize = 80;

/// Print timeout batches as they come
///
/// Without --group you look on as a group of your own that takes nothing from the logic nodes. With --group
/// you are a member of that group and share its batches.
#[derive(Args, Debug)]
pub(super) struct Watch {
    /// The group to join, as the logic nodes do
    #[arg(long, value_name = "NAME")]
    group: Option<GroupName>,
    /// Print an object a line, with every message
    #[arg(long)]
    json: bool,
    /// End after this many batches
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Do not acknowledge what was printed: it comes again, here or at another member of the group, and
    /// nothing new comes once --credit is out
    #[arg(long)]
    no_ack: bool,
    /// Messages to hold unacknowledged at most
    #[arg(long, default_value_t = 16_384, value_name = "MESSAGES", value_parser = clap::value_parser!(u32).range(1..))]
    credit: u32,
    #[command(flatten)]
    connect: Connect,
}

/// A batch as a line of JSON. Ids are strings: many readers of JSON lose the last digits of a u64.
#[derive(Serialize)]
struct Line {
    ring: u16,
    epoch: u64,
    tick: u64,
    seq: u32,
    delivery: u32,
    age_ms: u64,
    added: u64,
    acked: u64,
    storm: bool,
    drained: bool,
    ids: Vec<String>,
    clients: Vec<String>,
    attempts: Vec<u8>,
}

impl Watch {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let options = SubscribeOptions {
            group: self.group.as_ref().map(ToString::to_string),
            credit: self.credit,
            ephemeral: self.group.is_none(),
            ..SubscribeOptions::default()
        };
        let mut subscription =
            Subscription::open(self.connect.address(), options, self.connect.options()?).await?;
        let mut printed = 0;
        while self.count.is_none_or(|count| printed < count) {
            let Some(delivered) = subscription.next().await else { break };
            let delivered = delivered?;
            let line = if self.json { json_line(&delivered) } else { plain_line(&delivered) };
            let mut out = stdout().lock();
            writeln!(out, "{line}")?;
            out.flush()?;
            drop(out);
            printed += 1;
            if !self.no_ack
                && let Err(error) = delivered.ack().await
            {
                // The batch will come again with a higher delivery count: nothing is lost.
                let _ =
                    writeln!(stderr(), "ackwheel: batch {} was printed, not acknowledged: {error}", delivered.id);
            }
        }
        Ok(())
    }
}

fn json_line(batch: &TimeoutBatch) -> String {
    let line = Line {
        ring: batch.id.ring,
        epoch: batch.id.epoch,
        tick: batch.id.tick.0,
        seq: batch.id.seq,
        delivery: batch.delivery_count,
        age_ms: batch.age_ms,
        added: batch.counts.added,
        acked: batch.counts.acked,
        storm: batch.counts.storm,
        drained: batch.counts.drained,
        ids: batch.messages.iter().map(|timed_out| timed_out.message.msg_id.0.to_string()).collect(),
        clients: batch.messages.iter().map(|timed_out| timed_out.message.client.0.to_string()).collect(),
        attempts: batch.messages.iter().map(|timed_out| timed_out.attempt).collect(),
    };
    serde_json::to_string(&line).expect("numbers and strings can be written as JSON")
}

fn plain_line(batch: &TimeoutBatch) -> String {
    let mut line =
        format!("tick {} {}/{} timed out", batch.id.tick, batch.messages.len(), batch.counts.timed_out());
    if batch.delivery_count > 1 {
        let _ = write!(line, " delivery {}", batch.delivery_count);
    }
    for (flag, word) in [(batch.counts.storm, " STORM"), (batch.counts.drained, " drained")] {
        line.push_str(if flag { word } else { "" });
    }
    line.push(':');
    for (listed, timed_out) in batch.messages.iter().enumerate() {
        let message = timed_out.message.to_string();
        let left = batch.messages.len() - listed;
        let more = format!(" +{left} more");
        if line.len() + 1 + message.len() + more.len() > LINE_LENGTH {
            line.push_str(&more);
            break;
        }
        let _ = write!(line, " {message}");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::batch::{BatchId, TickCounts, TimedOut};
    use crate::core::message::Message;
    use crate::core::tick::Tick;

    fn batch(count: u64) -> TimeoutBatch {
        TimeoutBatch {
            id: BatchId { tick: Tick(1_792_000_015), epoch: 1_792_000_000_000, ring: 0, seq: 0 },
            delivery_count: 2,
            age_ms: 12,
            counts: TickCounts { added: count + 5, acked: 5, storm: true, drained: false },
            last: true,
            messages: (0..count)
                .map(|id| TimedOut { message: Message::new(u64::MAX - id, id), attempt: 1 })
                .collect(),
        }
    }

    #[test]
    fn plain_lines_fit_80_columns_and_say_what_they_leave_out() {
        assert_eq!(plain_line(&batch(1)), "tick 1792000015 1/1 timed out delivery 2 STORM: 18446744073709551615");
        let line = plain_line(&batch(4_096));
        assert!(line.len() <= LINE_LENGTH && line.ends_with(" +4096 more"), "{line}");
    }

    #[test]
    fn json_keeps_every_digit_of_an_id() {
        let value: serde_json::Value = serde_json::from_str(&json_line(&batch(2))).unwrap();
        assert_eq!(value["ids"], serde_json::json!(["18446744073709551615", "18446744073709551614"]));
        assert_eq!(value["clients"], serde_json::json!(["0", "1"]));
        let keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let mut expected = [
            "ring", "epoch", "tick", "seq", "delivery", "age_ms", "added", "acked", "storm", "drained", "ids",
            "clients", "attempts",
        ];
        expected.sort_unstable();
        assert_eq!(keys, expected);
    }
}
