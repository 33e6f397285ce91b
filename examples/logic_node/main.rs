//! A small but whole logic node: it pushes messages to simulated phones and knows which of them are online.
//!
//! It shows what a logic node does with each answer of ackwheel:
//!
//! - *add before push*, so that an Ack always finds its message;
//! - *withdraw* a push that failed at once;
//! - *push a second time* when the batch with attempt 1 arrives, and give up at attempt 2: the message stays in the
//!   store, and the session is offline unless it was heard of since that push;
//! - *late*: the phone answered after all, and its session is online again;
//! - *batches* are dealt with once each, with caution where they say little about phones, and acknowledged
//!   after that, not before.
//!
//! It ends by itself after some ten seconds. The sidecar runs inside it, unless `--addr` names another.
//!
//! ```text
//! cargo run --example logic_node
//! cargo run --example logic_node -- --addr 127.0.0.1:7415 --seed 7
//! ```

mod node;
mod phones;
mod records;

use std::sync::Arc;
use std::time::Duration;

use ackwheel::app::Sidecar;
use ackwheel::client::{Address, Client, ClientOptions, SubscribeOptions};
use ackwheel::config::Settings;
use ackwheel::core::Message;
use clap::Parser;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep};

use node::LogicNode;
use phones::{Patience, Phones};

const SESSIONS: u64 = 60;
const MESSAGES: u64 = 500;
/// A message every so often.
const PACE: Duration = Duration::from_millis(10);
/// A message that is not settled this long after the last one never will be.
const SETTLING_PATIENCE: Duration = Duration::from_secs(30);

/// A small but whole logic node
#[derive(Debug, Parser)]
#[command(name = "logic_node")]
struct Arguments {
    /// A sidecar that runs, HOST:PORT or unix:PATH [default: one inside this program]
    #[arg(long, value_name = "ADDRESS")]
    addr: Option<Address>,
    /// The seed from which the behaviour of the phones and the messages are drawn
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let embedded = if arguments.addr.is_none() { Some(start_sidecar().await?) } else { None };
    let own_address = embedded.as_ref().map(|sidecar| sidecar.address.into());
    let address = arguments.addr.or(own_address).expect("without an address a sidecar was started");
    let client = Client::connect(address, ClientOptions::default().client_name("logic_node")).await?;
    let patience = Patience::of(&client.welcome());
    println!("an Ack has {:?}, and so has that to the second push", patience.ack_timeout());

    let (phones, acks) = Phones::new(SESSIONS, patience, arguments.seed);
    let node = Arc::new(LogicNode::new(client, phones, patience));
    let acknowledging = tokio::spawn(Arc::clone(&node).acknowledge(acks));
    let listening = tokio::spawn(Arc::clone(&node).listen(SubscribeOptions::default().group("default")));

    // Message ids must not repeat while a phone may still answer an old one: a real node's are unique for
    // ever. Here the time makes them so, should this run twice against one sidecar.
    let first_id = u64::try_from(std::time::UNIX_EPOCH.elapsed()?.as_micros())?;
    let mut random = StdRng::seed_from_u64(arguments.seed);
    let mut pace = interval(PACE);
    let mut sending = JoinSet::new();
    for msg_id in first_id..first_id + MESSAGES {
        pace.tick().await;
        let message = Message::new(msg_id, random.random_range(1..=SESSIONS));
        let node = Arc::clone(&node);
        // No message waits for another: a sidecar that is away would hold up all of them.
        sending.spawn(async move { node.send(message).await });
    }
    sending.join_all().await;

    let give_up = Instant::now() + SETTLING_PATIENCE;
    while !node.is_settled() && Instant::now() < give_up {
        sleep(Duration::from_millis(50)).await;
    }
    listening.abort();
    acknowledging.abort();
    node.print_summary();
    if let Some(sidecar) = embedded {
        sidecar.drain().await?;
    }
    Ok(())
}

async fn start_sidecar() -> anyhow::Result<Sidecar> {
    let free_port = Some("127.0.0.1:0".to_owned());
    let tick = Some(Duration::from_millis(100));
    let settings = Settings { listen: free_port.clone(), admin: free_port, tick, ..Settings::default() };
    Ok(Sidecar::start(settings.check()?).await?)
}
