//! The sidecars that a replay goes through: those it is told, or one of its own.

use std::fmt;
use std::time::Duration;

use ackwheel::app::Sidecar;
use ackwheel::client::{Address, Client, ClientOptions, SubscribeOptions, Subscription};
use ackwheel::config::Settings;
use ackwheel::protocol::frame::Welcome;
use anyhow::{Context, ensure};

use crate::replay::Node;

/// The group that every store has from its start.
const GROUP: &str = "default";
/// At least so many subscribers share the group, so that sharing is part of what is tested.
const MIN_SUBSCRIBERS: usize = 2;

/// One or more sidecars with the same ring.
pub struct Sidecars {
    addresses: Vec<Address>,
    welcome: Welcome,
    embedded: Option<Sidecar>,
}

impl Sidecars {
    /// Asks the sidecars who they are; without an address, starts one on free ports.
    ///
    /// # Errors
    ///
    /// When one cannot be reached or started, or they have different rings.
    pub async fn reach(mut addresses: Vec<Address>, tick: Duration) -> anyhow::Result<Sidecars> {
        let mut embedded = None;
        if addresses.is_empty() {
            let sidecar = start(tick).await?;
            addresses.push(sidecar.address.into());
            embedded = Some(sidecar);
        }
        let welcome = connect(&addresses[0]).await?.welcome();
        for address in &addresses[1..] {
            let other = connect(address).await?.welcome();
            ensure!(
                ring(&other) == ring(&welcome),
                "{} has {} and {address} has {}: replay through sidecars of one kind",
                addresses[0],
                ring(&welcome),
                ring(&other)
            );
        }
        Ok(Sidecars { addresses, welcome, embedded })
    }

    /// How long a message may stay in flight: one revolution.
    pub fn ack_timeout(&self) -> Duration {
        self.tick() * u32::from(self.welcome.slots)
    }

    /// Length of a tick.
    pub fn tick(&self) -> Duration {
        Duration::from_millis(u64::from(self.welcome.tick_ms))
    }

    /// Connections that push, spread over the sidecars.
    ///
    /// A phone may answer to another node than the one that pushed, so each node hands its Acks to the next
    /// one. Several memory stores are several wheels, though: there an Ack must go where its message is.
    ///
    /// # Errors
    ///
    /// When a sidecar cannot be reached.
    pub async fn nodes(&self, connections: usize) -> anyhow::Result<Vec<Node>> {
        let mut clients = Vec::with_capacity(connections);
        for address in self.addresses.iter().cycle().take(connections) {
            clients.push(connect(address).await?);
        }
        let one_wheel = self.addresses.len() == 1 || self.welcome.store != "memory";
        let mut acks = clients.clone();
        if one_wheel {
            acks.rotate_left(1);
        }
        Ok(clients.into_iter().zip(acks).map(|(adds, acks)| Node { adds, acks }).collect())
    }

    /// Members of the group, on every sidecar.
    ///
    /// # Errors
    ///
    /// When a sidecar cannot be reached.
    pub async fn subscribe(&self) -> anyhow::Result<Vec<Subscription>> {
        let subscribers = self.addresses.len().max(MIN_SUBSCRIBERS);
        let mut subscriptions = Vec::with_capacity(subscribers);
        for address in self.addresses.iter().cycle().take(subscribers) {
            let group = SubscribeOptions::default().group(GROUP);
            let subscription = Subscription::open(address.clone(), group, options()).await;
            subscriptions.push(subscription.with_context(|| format!("cannot subscribe at {address}"))?);
        }
        Ok(subscriptions)
    }

    /// Ends the sidecar of this program, if there is one.
    ///
    /// # Errors
    ///
    /// When it could not drain.
    pub async fn leave(self) -> anyhow::Result<()> {
        match self.embedded {
            Some(sidecar) => sidecar.drain().await.context("the sidecar of this program could not drain"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Sidecars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.embedded.is_some() {
            f.write_str("a sidecar of its own at ")?;
        }
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        write!(f, "{}, {}", addresses.join(" "), ring(&self.welcome))
    }
}

fn ring(Welcome { slots, tick_ms, store, .. }: &Welcome) -> String {
    format!("{slots} slots of {tick_ms} ms in {store}")
}

async fn start(tick: Duration) -> anyhow::Result<Sidecar> {
    let free_port = Some("127.0.0.1:0".to_owned());
    let settings =
        Settings { listen: free_port.clone(), admin: free_port, tick: Some(tick), ..Settings::default() };
    Sidecar::start(settings.check()?).await.context("the sidecar of this program could not start")
}

async fn connect(address: &Address) -> anyhow::Result<Client> {
    Client::connect(address.clone(), options()).await.with_context(|| format!("cannot replay through {address}"))
}

fn options() -> ClientOptions {
    ClientOptions::default().client_name("im_replay")
}
