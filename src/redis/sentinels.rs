//! Sentinels: who of several Redis is the primary, asked before each connection and once a second.
//!
//! All are asked at the same time, since one that was cut off from the others would go on naming a primary that was
//! replaced: the answer with the highest configuration epoch counts. Before a connection to a replica does harm, every
//! script that writes is refused there (READONLY), and the link asks again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisResult, ServerErrorKind,
};

use super::fault::{Fault, FaultKind};
use super::link::Link;
use super::place::{Found, Kind, Place};

/// How long a Sentinel may take to be connected to, and for an answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// How much longer than the first answer the others are waited for.
const OTHERS: Duration = Duration::from_millis(200);

/// How often the Sentinels are asked while all is well.
const POLL: Duration = Duration::from_secs(1);

/// The Sentinels that `--store` names, and what they are asked.
pub(super) struct Sentinels {
    nodes: Vec<Node>,
    /// The name of the primary, as they have it.
    master: String,
    /// How it is spoken to, wherever it is.
    manner: ConnectionInfo,
}

struct Node {
    client: Client,
    /// What is left of the last time, if it was of use.
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl Sentinels {
    pub(super) fn new(
        addresses: Vec<ConnectionInfo>,
        master: String,
        manner: ConnectionInfo,
    ) -> RedisResult<Sentinels> {
        let node = |address| Ok(Node { client: Client::open(address)?, connection: Mutex::default() });
        let nodes = addresses.into_iter().map(node).collect::<RedisResult<Vec<Node>>>()?;
        Ok(Sentinels { nodes, master, manner })
    }

    /// Their addresses.
    #[cfg(test)]
    pub(super) fn names(&self) -> String {
        let names: Vec<String> = self.nodes.iter().map(Node::name).collect();
        names.join(", ")
    }

    /// The primary, as the one of them says who has heard of the latest failover.
    pub(super) async fn primary(&self) -> Result<Found, Fault> {
        let mut asked: FuturesUnordered<_> = self.nodes.iter().map(|node| self.ask(node)).collect();
        let mut faults = Vec::new();
        let mut latest = loop {
            match asked.next().await {
                Some(Ok(found)) => break found,
                Some(Err(fault)) => faults.push(fault),
                None => return Err(self.nowhere(&faults)),
            }
        };
        let others = async {
            while let Some(answer) = asked.next().await {
                if let Ok(found) = answer
                    && found.config_epoch > latest.config_epoch
                {
                    latest = found;
                }
            }
        };
        // Whoever says nothing is no reason to wait.
        let _ = tokio::time::timeout(OTHERS, others).await;
        Ok(latest)
    }

    async fn ask(&self, node: &Node) -> Result<Found, Fault> {
        let answered = node.master(&self.master).await;
        let told = answered.map_err(|error| {
            let unknown = error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError)
                && error.detail().is_some_and(|detail| detail.contains("No such master"));
            let Fault { kind, text } = Fault::from(error);
            let text = if unknown { format!("knows no primary {:?}", self.master) } else { text };
            Fault { kind, text: format!("{}: {text}", node.name()) }
        })?;
        let number = |name: &str| told.get(name).and_then(|value| value.parse::<u64>().ok());
        let port = number("port").and_then(|port| u16::try_from(port).ok());
        let found = told.get("ip").zip(port).and_then(|(host, port)| self.named(host, port).ok());
        let client = found.ok_or_else(|| Fault {
            kind: FaultKind::Other,
            text: format!("{}: its answer to SENTINEL MASTER is not understood", node.name()),
        })?;
        Ok(Found { client, config_epoch: number("config-epoch").unwrap_or_default() })
    }

    /// The way to the primary at this address.
    pub(super) fn named(&self, host: &str, port: u16) -> RedisResult<Client> {
        let mut address = self.manner.addr().clone();
        match &mut address {
            ConnectionAddr::Tcp(of, at) | ConnectionAddr::TcpTls { host: of, port: at, .. } => {
                (*of, *at) = (host.to_owned(), port);
            }
            _ => {}
        }
        Client::open(self.manner.clone().set_addr(address))
    }

    /// Why no primary was found. A wrong password does not become right by asking again, if it is that of all.
    fn nowhere(&self, faults: &[Fault]) -> Fault {
        let forbidden = !faults.is_empty() && faults.iter().all(|fault| fault.kind == FaultKind::Forbidden);
        let kind = if forbidden { FaultKind::Forbidden } else { FaultKind::Disconnected };
        let texts: Vec<&str> = faults.iter().map(|fault| fault.text.as_str()).collect();
        let texts = texts.join("; ");
        let whose = if forbidden { "; theirs are sentinel_user and sentinel_password in --store" } else { "" };
        Fault { kind, text: format!("no Sentinel names the primary {:?} ({texts}){whose}", self.master) }
    }
}

impl Node {
    fn name(&self) -> String {
        self.client.get_connection_info().addr().to_string()
    }

    /// What it knows of a primary.
    async fn master(&self, name: &str) -> RedisResult<HashMap<String, String>> {
        let ask = async |mut connection: MultiplexedConnection| {
            redis::cmd("SENTINEL").arg("MASTER").arg(name).query_async(&mut connection).await
        };
        let kept = self.connection.lock().clone();
        if let Some(connection) = kept {
            match ask(connection).await {
                Err(error) if error.is_io_error() || error.is_connection_dropped() || error.is_timeout() => {
                    *self.connection.lock() = None;
                }
                answered => return answered,
            }
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        let connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        let told = ask(connection.clone()).await?;
        *self.connection.lock() = Some(connection);
        Ok(told)
    }
}

/// Has links leave a Redis that is the primary no longer, though it still answers: one that the Sentinels cannot reach.
pub(super) async fn watch(place: Arc<Place>, links: Vec<Arc<Link>>) {
    let Kind::Watched(sentinels) = &place.0 else { return };
    loop {
        tokio::time::sleep(POLL).await;
        // Where none of them answers, the primary does, or the links have noticed.
        let Ok(now) = sentinels.primary().await else { continue };
        for link in &links {
            if let Ok(session) = link.session()
                && session.found.is_followed_by(&now)
            {
                let text = format!("the Sentinels name another primary, {now}, in place of {}", session.found);
                link.give_up(&session, &Fault { kind: FaultKind::ReadOnly, text });
            }
        }
    }
}
