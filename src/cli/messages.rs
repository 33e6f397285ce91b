//! `add` and `del`: a line a message.

use std::io::{BufWriter, Write, stdout};

use clap::Args;

use super::Failure;
use super::connect::Connect;
use crate::client::AddOptions;
use crate::core::message::{AddOutcome, Message};

/// Take messages into flight: before they are pushed
#[derive(Args, Debug)]
pub(super) struct Add {
    /// Messages, as ID or ID:CLIENT
    #[arg(required = true, value_name = "ID[:CLIENT]")]
    messages: Vec<Message>,
    /// Ticks that they may stay in flight [default: one revolution]
    #[arg(long, value_name = "TICKS", value_parser = clap::value_parser!(u16).range(1..))]
    ack_timeout_ticks: Option<u16>,
    /// The attempt, which comes back with the timeout
    #[arg(long, default_value_t = 1, value_name = "N")]
    attempt: u8,
    #[command(flatten)]
    connect: Connect,
}

/// Take messages out of flight: when their Ack arrives
#[derive(Args, Debug)]
pub(super) struct Del {
    /// Messages, as ID or ID:CLIENT
    #[arg(required = true, value_name = "ID[:CLIENT]")]
    messages: Vec<Message>,
    /// Take them back: their push failed at once
    #[arg(long)]
    withdraw: bool,
    #[command(flatten)]
    connect: Connect,
}

impl Add {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let options = AddOptions { ack_timeout_ticks: self.ack_timeout_ticks, attempt: self.attempt };
        let answer = self.connect.client().await?.add_new_msg(&self.messages, options).await?;
        print_lines(self.messages.iter().zip(answer.outcomes).map(|(message, outcome)| {
            let word = match outcome {
                AddOutcome::Added => "added",
                AddOutcome::Rearmed => "rearmed",
            };
            format!("{message} {word}")
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

fn print_lines(lines: impl Iterator<Item = String>) -> Result<(), Failure> {
    let mut out = BufWriter::new(stdout().lock());
    for line in lines {
        writeln!(out, "{line}")?;
    }
    Ok(out.flush()?)
}
