//! The verb `watch`: prints timeout batches as they arrive, one per line. A timeout batch is a list of messages that
//! were not acknowledged in time.

use std::fmt::{self, Write as _};
use std::io::{IsTerminal, Write, stderr, stdout};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::timeout;

use super::Failure;
use super::connect::Connect;
use super::text::{COLUMNS, span};
use crate::client::{ClientError, Delivered, SubscribeOptions, Subscription};
use crate::core::{BatchId, GroupName, TickCounts};
use crate::protocol::frame::TimeoutBatch;

/// The age from which the line of a batch shows how old the batch is. The clients in such an old batch may be online
/// again.
const OLD: Duration = Duration::from_secs(10);

/// How long to wait for a batch before checking whether the connection is lost.
const LOOK: Duration = Duration::from_millis(500);

/// Print timeout batches as they come
///
/// Without --group, you get a group of your own, and the logic nodes still receive all batches. With --group, you are a
/// member of that group and share its batches.
///
/// A line is at most 80 columns long: the tick (and the ring, unless it is 0), the messages in this batch and those of
/// its tick that timed out, and the messages, as many as fit. The line also says if the batch is old, redelivered, of a
/// storm, or drained. After a lost connection, the command reconnects.
#[derive(Args, Debug)]
pub(super) struct Watch {
    /// The group to join, as the logic nodes do
    #[arg(long, value_name = "NAME")]
    group: Option<GroupName>,
    /// Print one JSON object per batch, with every message
    #[arg(long)]
    json: bool,
    /// End after this many batches
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Do not acknowledge batches: they are delivered again, here or to another member of the group, and no new batch
    /// arrives once --credit is used up
    #[arg(long)]
    no_ack: bool,
    /// Maximum number of unacknowledged messages
    #[arg(long, default_value_t = 16_384, value_name = "MESSAGES", value_parser = clap::value_parser!(u32).range(1..))]
    credit: u32,
    #[command(flatten)]
    connect: Connect,
}

/// A batch as a line of JSON. Message ids and client ids are strings, because many JSON parsers lose the last digits of
/// a u64.
#[derive(Serialize)]
struct Line {
    #[serde(flatten)]
    id: BatchId,
    delivery: u32,
    age_ms: u64,
    #[serde(flatten)]
    counts: TickCounts,
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
            Subscription::open(self.connect.addr.clone(), options, self.connect.options()?).await?;
        if stderr().is_terminal() {
            // At a terminal, this line shows that the command waits. In a pipe, the line is of no use.
            remark(format_args!("waiting for timeout batches of the group {}", subscription.group()));
        }
        let (mut printed, mut reconnects) = (0, 0);
        while self.count.is_none_or(|count| printed < count) {
            let Some(delivered) = next(&mut subscription).await else { break };
            let delivered = delivered?;
            if subscription.reconnects() > reconnects {
                reconnects = subscription.reconnects();
                let missing = if self.group.is_none() {
                    ", and batches that were delivered during the outage are missing"
                } else {
                    ""
                };
                remark(format_args!("the connection was lost and made again{missing}"));
            }
            print(if self.json { json_line(&delivered) } else { plain_line(&delivered) }).await?;
            printed += 1;
            if !self.no_ack
                && let Err(error) = delivered.ack().await
            {
                // The subscription sends the acknowledgement again after it reconnects, or when the server redelivers
                // the batch.
                remark(format_args!("batch {} was printed but not acknowledged: {error}", delivered.id));
            }
        }
        Ok(())
    }
}

/// Waits for the next batch. If the connection is lost during the wait, prints one line for each outage.
async fn next(subscription: &mut Subscription) -> Option<Result<Delivered, ClientError>> {
    let mut said = false;
    loop {
        match timeout(LOOK, subscription.next()).await {
            Ok(next) => return next,
            Err(_) => match subscription.outage() {
                Some(outage) if !said => {
                    said = true;
                    remark(format_args!("no connection, and trying again: {}", outage.cause));
                }
                outage => said &= outage.is_some(),
            },
        }
    }
}

/// Prints a line to stderr. If stderr is closed, the line is lost.
fn remark(text: fmt::Arguments<'_>) {
    let _ = writeln!(stderr(), "ackwheel: {text}");
}

/// Prints a line on a blocking thread, because the reader of the output may be slow. The runtime has only one thread,
/// which must stay free to answer the server's Pings.
async fn print(line: String) -> Result<(), Failure> {
    let printing = tokio::task::spawn_blocking(move || {
        let mut out = stdout().lock();
        writeln!(out, "{line}").and_then(|()| out.flush())
    });
    Ok(printing.await.map_err(Failure::run)??)
}

fn json_line(batch: &TimeoutBatch) -> String {
    let TimeoutBatch { id, delivery_count: delivery, age_ms, counts, ref messages, .. } = *batch;
    let ids = messages.iter().map(|timed_out| timed_out.message.msg_id.0.to_string()).collect();
    let clients = messages.iter().map(|timed_out| timed_out.message.client.0.to_string()).collect();
    let attempts = messages.iter().map(|timed_out| timed_out.attempt).collect();
    let line = Line { id, delivery, age_ms, counts, ids, clients, attempts };
    serde_json::to_string(&line).expect("numbers and strings can be written as JSON")
}

/// Formats a batch as one line of at most 80 columns. The line lists as many messages as fit, and says how many more
/// there are. If the list does not fit, the line ends without it: the line already has the number of messages.
fn plain_line(batch: &TimeoutBatch) -> String {
    let mut line = format!("tick {}", batch.id.tick);
    if batch.id.ring > 0 {
        let _ = write!(line, " ring {}", batch.id.ring);
    }
    let _ = write!(line, " {}/{} timed out", batch.messages.len(), batch.counts.timed_out());
    let age = Duration::from_millis(batch.age_ms);
    if age >= OLD {
        let _ = write!(line, " {} old", span(age));
    }
    if batch.delivery_count > 1 {
        let _ = write!(line, " delivery {}", batch.delivery_count);
    }
    for (flag, word) in [(batch.counts.storm, " STORM"), (batch.counts.drained, " drained")] {
        line.push_str(if flag { word } else { "" });
    }
    let mut list = String::from(":");
    for (listed, timed_out) in batch.messages.iter().enumerate() {
        let message = timed_out.message.to_string();
        let left = batch.messages.len() - listed;
        let more = format!(" +{left} more");
        // Leave room for the text that says how many more messages there are.
        let after = if left > 1 { format!(" +{} more", left - 1).len() } else { 0 };
        if line.len() + list.len() + 1 + message.len() + after > COLUMNS {
            list.push_str(&more);
            break;
        }
        let _ = write!(list, " {message}");
    }
    if line.len() + list.len() <= COLUMNS { line + &list } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Message, Tick, TimedOut};

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
        let many = TimeoutBatch { delivery_count: 1, ..batch(4_096) };
        let line = plain_line(&many);
        assert_eq!(line, "tick 1792000015 4096/4096 timed out STORM: 18446744073709551615 +4095 more");
        for (left_out, messages) in [(5, 7), (4, 6), (3, 5), (2, 4), (0, 3), (0, 1)] {
            let short =
                (0..messages).map(|id| TimedOut { message: Message::new(10_000_000 + id, 12), attempt: 1 });
            let line = plain_line(&TimeoutBatch { messages: short.collect(), ..many.clone() });
            assert!(line.len() <= COLUMNS, "{line}");
            let end = if left_out > 0 { format!(" +{left_out} more") } else { String::from(":12") };
            assert!(line.ends_with(&end), "{line}");
        }
    }

    #[test]
    fn the_longest_line_says_how_many_and_lists_none() {
        let mut longest = batch(4_096);
        longest.id.ring = 63;
        longest.id.tick = Tick(179_200_000_100);
        (longest.counts.added, longest.age_ms, longest.delivery_count) = (1_000_000_005, 86_399_999, 12);
        let line = plain_line(&longest);
        assert_eq!(line, "tick 179200000100 ring 63 4096/1000000000 timed out 23h old delivery 12 STORM");
        assert!(line.len() <= COLUMNS, "{line}");
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
