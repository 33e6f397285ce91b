//! Nodes that say where a Redis is: all are asked at the same time, and how those are spoken to that they name.

use std::fmt;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, FromRedisValue, RedisResult};

use super::fault::{Fault, FaultKind};

/// How long a node may take to be connected to, and for an answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// How much longer than the first answer the others are waited for.
const OTHERS: Duration = Duration::from_millis(200);

/// A node that is asked now and then.
pub(super) struct Node {
    client: Client,
    /// What is left of the last time, if it was of use.
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl Node {
    pub(super) fn new(client: Client) -> Node {
        Node { client, connection: Mutex::default() }
    }

    pub(super) fn address(&self) -> &ConnectionAddr {
        self.client.get_connection_info().addr()
    }

    /// The answer to a command.
    pub(super) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> RedisResult<T> {
        let kept = self.connection.lock().clone();
        if let Some(mut connection) = kept {
            match command.query_async(&mut connection).await {
                Err(error) if error.is_io_error() || error.is_connection_dropped() || error.is_timeout() => {
                    *self.connection.lock() = None;
                }
                answered => return answered,
            }
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        let mut connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        let answer = command.query_async(&mut connection).await?;
        *self.connection.lock() = Some(connection);
        Ok(answer)
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address().fmt(f)
    }
}

/// How a Redis is spoken to, wherever it is.
#[derive(Clone)]
pub(super) struct Manner(pub(super) ConnectionInfo);

impl Manner {
    /// The way to the one at this address.
    pub(super) fn at(&self, host: &str, port: u16) -> RedisResult<Client> {
        let mut address = self.0.addr().clone();
        match &mut address {
            ConnectionAddr::Tcp(of, at) | ConnectionAddr::TcpTls { host: of, port: at, .. } => {
                (*of, *at) = (host.to_owned(), port);
            }
            // Only addresses of a host and a port are made into a manner.
            _ => {}
        }
        Client::open(self.0.clone().set_addr(address))
    }
}

/// Awaits the answers of several nodes: whoever is much slower than the first is left out. Where nobody has one, what is
/// wrong with each.
///
/// One that was cut off from the others may be the first, and would go on naming what was replaced.
pub(super) async fn answers<T>(
    asked: impl IntoIterator<Item = impl Future<Output = Result<T, Fault>>>,
) -> Result<Vec<T>, Vec<Fault>> {
    let mut asked: FuturesUnordered<_> = asked.into_iter().collect();
    let (mut answers, mut faults) = (Vec::new(), Vec::new());
    while answers.is_empty() {
        match asked.next().await {
            Some(Ok(answer)) => answers.push(answer),
            Some(Err(fault)) => faults.push(fault),
            None => return Err(faults),
        }
    }
    let others = async {
        while let Some(answer) = asked.next().await {
            answers.extend(answer);
        }
    };
    // Whoever says nothing is no reason to wait.
    let _ = tokio::time::timeout(OTHERS, others).await;
    Ok(answers)
}

/// What is wrong with all of them. A wrong password does not become right by asking again, if it is that of all.
pub(super) fn together(faults: &[Fault], what: &str) -> Fault {
    let forbidden = !faults.is_empty() && faults.iter().all(|fault| fault.kind == FaultKind::Forbidden);
    let kind = if forbidden { FaultKind::Forbidden } else { FaultKind::Disconnected };
    let texts: Vec<&str> = faults.iter().map(|fault| fault.text.as_str()).collect();
    Fault { kind, text: format!("{what} ({})", texts.join("; ")) }
}
