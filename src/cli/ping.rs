//! `ping`: whether logic nodes can come in.

use std::io::{Write, stdout};
use std::time::Duration;

use clap::Args;

use super::Failure;
use super::connect::Connect;
use super::text::plain;
use crate::protocol::frame::Welcome;

/// Ask a sidecar for a sign of life, as a logic node does: over its address, with TLS and token
///
/// No message is added. Exit code 0 says that logic nodes which reach the sidecar from here, with the same certificates
/// and token, are let in. Whether its store answers is another question, for /readyz of its admin address.
#[derive(Args, Debug)]
pub(super) struct Ping {
    #[command(flatten)]
    connect: Connect,
}

impl Ping {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let client = self.connect.client().await?;
        let took = client.ping(b"ackwheel ping").await?;
        let Welcome { server_name, store, slots, tick_ms, .. } = client.welcome();
        let tick = humantime::format_duration(Duration::from_millis(u64::from(tick_ms)));
        // Whatever answers there, its words command no terminal.
        let [server_name, store] = [server_name, store].map(|word| word.chars().map(plain).collect::<String>());
        let (address, ms) = (self.connect.address(), took.as_secs_f64() * 1_000.0);
        Ok(writeln!(
            stdout(),
            "{address} answered in {ms:.2} ms: {server_name}, {store} store, {slots} slots of {tick}"
        )?)
    }
}
