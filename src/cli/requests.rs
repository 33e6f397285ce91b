//! The verbs that send one request: `add`, `del`, `get`, `ping`, `group list`, `group delete`.

use std::io::{BufWriter, Write, stdout};
use std::time::Duration;

use clap::{Args, Subcommand};

use super::Failure;
use super::admin_address::AdminAddress;
use super::connect::Connect;
use super::status::group_table;
use super::text::escaped;
use crate::client::AddOptions;
use crate::core::{AddOutcome, GroupName, Message, MessageState};
use crate::protocol::frame::Welcome;

/// Add messages, before they are pushed
///
/// Each line has the time after which the message times out, unless it is deleted before. It times out at most one tick
/// later.
#[derive(Args, Debug)]
pub(super) struct Add {
    /// Messages, as ID or ID:CLIENT
    #[arg(required = true, value_name = "ID[:CLIENT]")]
    messages: Vec<Message>,
    /// Ticks that the messages may stay in flight [default: one revolution]
    #[arg(long, value_name = "TICKS", value_parser = clap::value_parser!(u16).range(1..))]
    ack_timeout_ticks: Option<u16>,
    /// Number of this attempt to push the messages; a timeout batch repeats it
    #[arg(long, default_value_t = 1, value_name = "N")]
    attempt: u8,
    #[command(flatten)]
    connect: Connect,
}

/// Delete messages, when their Ack arrives
#[derive(Args, Debug)]
pub(super) struct Del {
    /// Messages, as ID or ID:CLIENT
    #[arg(required = true, value_name = "ID[:CLIENT]")]
    messages: Vec<Message>,
    /// Withdraw the messages, because their push failed
    #[arg(long)]
    withdraw: bool,
    #[command(flatten)]
    connect: Connect,
}

/// Show the state of messages: in flight with the time that is left, late, or unknown
///
/// It changes nothing.
#[derive(Args, Debug)]
pub(super) struct Get {
    /// Messages, as ID or ID:CLIENT
    #[arg(required = true, value_name = "ID[:CLIENT]")]
    messages: Vec<Message>,
    #[command(flatten)]
    connect: Connect,
}

/// Check that a sidecar answers a logic node: with this address, token and certificates
///
/// No message is added. Exit code 0 says that logic nodes on this host, with the same token and certificates, can
/// connect. Ask /readyz of the admin address whether the store answers.
#[derive(Args, Debug)]
pub(super) struct Ping {
    #[command(flatten)]
    connect: Connect,
}

/// List and delete groups of subscribers
#[derive(Debug, Subcommand)]
pub(super) enum Group {
    /// List the groups, with their subscribers at this sidecar, their batches that wait, and the age of the oldest
    List {
        #[command(flatten)]
        admin: AdminAddress,
    },
    /// Delete a group without subscribers, and the batches that it has not acknowledged
    Delete {
        /// The name of the group
        name: GroupName,
        #[command(flatten)]
        connect: Connect,
    },
}

impl Add {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let options = AddOptions { ack_timeout_ticks: self.ack_timeout_ticks, attempt: self.attempt };
        let client = self.connect.client().await?;
        let answer = client.add_new_msg(&self.messages, options).await?;
        let Welcome { slots, tick_ms, .. } = client.welcome();
        let ticks = self.ack_timeout_ticks.unwrap_or(slots);
        let time = humantime::format_duration(Duration::from_millis(u64::from(tick_ms)) * ticks.into());
        print_lines(self.messages.iter().zip(answer.outcomes).map(|(message, outcome)| {
            let word = match outcome {
                AddOutcome::Added => "added",
                AddOutcome::Rearmed => "rearmed",
            };
            format!("{message} {word}, times out in {time}")
        }))
    }
}

impl Del {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let client = self.connect.client().await?;
        let outcomes = if self.withdraw {
            client.withdraw(&self.messages).await?
        } else {
            client.del_msg(&self.messages).await?
        };
        print_lines(self.messages.iter().zip(outcomes).map(|(message, outcome)| format!("{message} {outcome}")))
    }
}

impl Get {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let client = self.connect.client().await?;
        let states = client.get_msg(&self.messages).await?;
        print_lines(self.messages.iter().zip(states).map(|(message, state)| match state {
            MessageState::InFlight { deadline, remaining_ms, attempt } => {
                let time = humantime::format_duration(Duration::from_millis(remaining_ms.into()));
                format!("{message} in_flight, attempt {attempt}, times out in {time}, deadline tick {deadline}")
            }
            state => format!("{message} {}", state.as_str()),
        }))
    }
}

fn print_lines(lines: impl Iterator<Item = String>) -> Result<(), Failure> {
    let mut out = BufWriter::new(stdout().lock());
    for line in lines {
        writeln!(out, "{line}")?;
    }
    Ok(out.flush()?)
}

impl Ping {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let client = self.connect.client().await?;
        let took = client.ping(b"ackwheel ping").await?;
        let Welcome { server_name, store, slots, tick_ms, .. } = client.welcome();
        let tick = humantime::format_duration(Duration::from_millis(u64::from(tick_ms)));
        let [server_name, store] = [server_name, store].map(|word| escaped(&word));
        let (address, ms) = (&self.connect.addr, took.as_secs_f64() * 1_000.0);
        Ok(writeln!(
            stdout(),
            "{address} answered in {ms:.2} ms: {server_name}, {store} store, {slots} slots of {tick}"
        )?)
    }
}

impl Group {
    pub(super) async fn run(self) -> Result<(), Failure> {
        match self {
            Group::List { admin } => {
                let (report, _) = admin.report(admin.timeout)?;
                Ok(write!(stdout(), "{}", group_table(&report.groups))?)
            }
            Group::Delete { name, connect } => {
                connect.client().await?.group_delete(name.as_str()).await?;
                Ok(writeln!(stdout(), "{name} deleted")?)
            }
        }
    }
}
