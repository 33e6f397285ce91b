//! The verbs `watch` and `consume`: print timeout batches as they arrive, one per line. A timeout batch is a list of
//! messages that were not acknowledged in time.

use std::fmt::{self, Write as _};
use std::io::{Write, stderr, stdout};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::timeout;

use super::Failure;
use super::connect::Connect;
use super::text::{COLUMNS, escaped, span};
use crate::client::{ClientError, Delivered, SubscribeOptions, Subscription};
use crate::core::{BatchId, GroupName, TickCounts};
use crate::protocol::frame::TimeoutBatch;

/// The age from which the line of a batch shows how old the batch is. The clients in such an old batch may be online
/// again.
const OLD: Duration = Duration::from_secs(10);

/// How long to wait for a batch before checking whether the connection is lost.
const LOOK: Duration = Duration::from_millis(500);

/// Print timeout batches as they come, and take none from any consumer
///
/// The command has a group of its own while it runs, so the logic nodes still receive all batches. To receive the
/// batches of a group instead of its other members, use consume.
///
/// A line is at most 80 columns long: the tick (and the ring, unless it is 0), how many of the tick's timeouts are in
/// this batch, and the messages, as many as fit. The line also says if the batch is old, redelivered, of a storm, or
/// drained. After a lost connection, the command reconnects.
#[derive(Args, Debug)]
pub(super) struct Watch {
    #[command(flatten)]
    output: Output,
}

/// Take timeout batches from a group, print them and acknowledge them
///
/// The command joins the group as a logic node does: a batch that it takes does not reach the other members. To look on
/// without taking a batch, use watch, whose help explains the lines.
#[derive(Args, Debug)]
pub(super) struct Consume {
    /// The group to join
    #[arg(long, value_name = "NAME")]
    group: GroupName,
    /// Do not acknowledge batches: they are delivered again, here or to another member of the group, and no new batch
    /// arrives once --credit is used up
    #[arg(long)]
    no_ack: bool,
    /// Maximum number of unacknowledged messages
    #[arg(long, default_value_t = CREDIT, value_name = "MESSAGES", value_parser = clap::value_parser!(u32).range(1..))]
    credit: u32,
    #[command(flatten)]
    output: Output,
}

/// The default maximum number of unacknowledged messages.
const CREDIT: u32 = 16_384;

/// The flags that both verbs have.
#[derive(Args, Debug)]
struct Output {
    /// Print one JSON object per batch, with every message
    #[arg(long)]
    json: bool,
    /// End after this many batches
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
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
        let options = SubscribeOptions { credit: CREDIT, ephemeral: true, ..SubscribeOptions::default() };
        self.output.print_batches(options, true).await
    }
}

impl Consume {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let Consume { group, no_ack, credit, output } = self;
        let settled = if no_ack {
            "does not acknowledge them: they are delivered again"
        } else {
            "acknowledges each one after printing it"
        };
        remark(format_args!("this command takes batches from the group {group} and {settled}"));
        let options = SubscribeOptions { group: Some(group.to_string()), credit, ..SubscribeOptions::default() };
        output.print_batches(options, !no_ack).await
    }
}

impl Output {
    /// Subscribes with `options`, and prints batches until `--count` is reached. Acknowledges each of them if `acks`.
    async fn print_batches(self, options: SubscribeOptions, acks: bool) -> Result<(), Failure> {
        let (ephemeral, address, client_options) =
            (options.ephemeral, &self.connect.addr, self.connect.options()?);
        let open = async || Subscription::open(address.clone(), options.clone(), client_options.clone()).await;
        let mut subscription = self.connect.wait_for_start(open).await?;
        if ephemeral {
            remark(format_args!(
                "connected to {address}, waiting for timeout batches; none is taken from a consumer"
            ));
        } else {
            let group = subscription.group();
            remark(format_args!("connected to {address}, waiting for timeout batches of the group {group}"));
            if subscription.created() {
                remark(format_args!(
                    "the group {group} is new, and begins with the oldest batch that is kept: if its name is wrong, end \
                     this command, and delete the group with: ackwheel group delete {group}"
                ));
            }
        }
        let (mut printed, mut reconnects) = (0, 0);
        while self.count.is_none_or(|count| printed < count) {
            let Some(delivered) = next(&mut subscription).await else { break };
            let delivered = delivered?;
            if subscription.reconnects() > reconnects {
                reconnects = subscription.reconnects();
                let missing =
                    if ephemeral { ", and batches that were delivered during the outage are missing" } else { "" };
                remark(format_args!("the connection was lost and made again{missing}"));
            }
            print(if self.json { json_line(&delivered) } else { plain_line(&delivered) }).await?;
            printed += 1;
            if acks && let Err(error) = delivered.ack().await {
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

/// Prints a line to stderr. If stderr is closed, the line is lost. The text may contain words of a server.
fn remark(text: fmt::Arguments<'_>) {
    let _ = writeln!(stderr(), "ackwheel: {}", escaped(&text.to_string()));
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
    let _ = write!(line, ": {} of {} timeouts", batch.messages.len(), batch.counts.timed_out());
    let age = Duration::from_millis(batch.age_ms);
    if age >= OLD {
        let _ = write!(line, ", {} old", span(age));
    }
    if batch.delivery_count > 1 {
        let _ = write!(line, ", delivery {}", batch.delivery_count);
    }
    for (flag, word) in [(batch.counts.storm, ", STORM"), (batch.counts.drained, ", drained")] {
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
        assert_eq!(
            plain_line(&batch(1)),
            "tick 1792000015: 1 of 1 timeouts, delivery 2, STORM: 18446744073709551615"
        );
        let many = TimeoutBatch { delivery_count: 1, ..batch(4_096) };
        let line = plain_line(&many);
        assert_eq!(line, "tick 1792000015: 4096 of 4096 timeouts, STORM: 18446744073709551615 +4095 more");
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
        longest.id.tick = Tick(1_792_000_100);
        (longest.counts.added, longest.age_ms, longest.delivery_count) = (100_000_005, 86_399_999, 12);
        let line = plain_line(&longest);
        assert_eq!(line, "tick 1792000100 ring 63: 4096 of 100000000 timeouts, 23h old, delivery 12, STORM");
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
