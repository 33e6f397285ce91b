//! Connects to Redis servers, Sentinels and Cluster nodes, and sends commands to many nodes at the same time.

use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{fmt, io};

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use redis::{ConnectionAddr, Pipeline, RedisError, RedisResult, Value};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tracing::debug;

use crate::redis::connection::errors::{Fault, NO_ROOM};
use crate::redis::topology::dial::RedisConnection;
use crate::redis::topology::endpoint::Endpoint;

/// How long opening a connection to Redis may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a node may take to accept a connection, and to answer a short command.
const NODE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long `answers` waits for further nodes after the answer of the first node.
const OTHERS_TIMEOUT: Duration = Duration::from_millis(200);

/// The name of this sidecar, as Redis shows it in `CLIENT LIST`. One name is enough, because a process has only one
/// store.
static CLIENT_NAME: OnceLock<String> = OnceLock::new();

/// A Sentinel, or a node of a Cluster.
pub(crate) struct Node {
    pub(super) endpoint: Endpoint,
    /// The connection that the next call uses. If there is none, the next call opens a connection.
    connection: Mutex<Option<RedisConnection>>,
    /// The id that the node reports for itself. Until the node has answered, its address.
    pub(crate) id: Mutex<String>,
}

impl Node {
    pub(crate) fn new(endpoint: Endpoint) -> Arc<Node> {
        let id = Mutex::new(endpoint.address().to_string());
        Arc::new(Node { endpoint, connection: Mutex::default(), id })
    }

    pub(crate) fn address(&self) -> &ConnectionAddr {
        self.endpoint.address()
    }

    /// Sends several commands to the node, and returns the answer or the error of each command. Returns a single error
    /// if the connection fails.
    pub(crate) async fn ask(&self, commands: &Pipeline) -> RedisResult<Vec<RedisResult<Value>>> {
        let kept = self.connection.lock().clone();
        if let Some(mut connection) = kept {
            match commands.query_async(&mut connection).await {
                Err(error) if error.is_io_error() || error.is_connection_dropped() || error.is_timeout() => {
                    *self.connection.lock() = None;
                }
                answered => return answered,
            }
        }
        let mut connection = connect(&self.endpoint, "place", NODE_TIMEOUT, Some(NODE_TIMEOUT)).await?;
        let answers = commands.query_async(&mut connection).await?;
        *self.connection.lock() = Some(connection);
        Ok(answers)
    }
}

/// A Redis server that a search has found.
#[derive(Clone)]
pub(crate) struct Found {
    pub(crate) endpoint: Endpoint,
    /// The config epoch of this Redis, as a Sentinel or Cluster node reports it. A failover gives the new primary a
    /// higher number. 0 if Redis has a fixed address.
    pub(crate) config_epoch: u64,
    /// The id of the node in the Cluster. It stays the same when the address changes. `None` without a Cluster.
    pub(crate) node: Option<String>,
}

impl Found {
    /// Opens a connection. Its name in Redis contains `purpose`. Without `response_timeout`, an answer may take any
    /// time.
    pub(crate) async fn connect(
        &self,
        purpose: &str,
        response_timeout: Option<Duration>,
    ) -> RedisResult<RedisConnection> {
        connect(&self.endpoint, purpose, CONNECT_TIMEOUT, response_timeout).await
    }

    fn address(&self) -> &ConnectionAddr {
        self.endpoint.address()
    }

    /// Returns whether both are the same Redis. In a Cluster the ids of the nodes are compared, because nodes may
    /// report different addresses of one Redis.
    pub(crate) fn is(&self, other: &Found) -> bool {
        match (&self.node, &other.node) {
            (Some(one), Some(other)) => one == other,
            _ => self.address() == other.address(),
        }
    }

    /// Returns whether `other` has replaced this Redis: `other` is another Redis, and its config epoch is not lower.
    /// The epochs are compared because a node that was cut off may still report an earlier primary, with a lower epoch.
    pub(crate) fn is_followed_by(&self, other: &Found) -> bool {
        other.config_epoch >= self.config_epoch && !self.is(other)
    }
}

/// Writes the address, without user and password.
impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address().fmt(f)
    }
}

/// Waits for the answers of several nodes, but at most [`OTHERS_TIMEOUT`] after the first answer. Returns the faults if
/// no node answers.
///
/// The first answer alone is not enough. It may come from a node that is cut off from the others and names a Redis that
/// was replaced.
pub(crate) async fn answers<T>(
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
    // Nodes that have not answered within this time are ignored.
    let _ = tokio::time::timeout(OTHERS_TIMEOUT, others).await;
    Ok(answers)
}

/// Sets the name that all later connections of this process have in Redis: the name of the sidecar, without characters
/// that Redis forbids, and at most 64 characters long.
pub(crate) fn name_connections(sidecar: &str) {
    let legal = sidecar.chars().filter(char::is_ascii_graphic).take(64).collect();
    let _ = CLIENT_NAME.set(legal);
}

/// Opens a connection, and names it after the sidecar and the purpose. If the Redis user lacks the permission to set a
/// name, the connection has no name.
async fn connect(
    endpoint: &Endpoint,
    purpose: &str,
    connection_timeout: Duration,
    response_timeout: Option<Duration>,
) -> RedisResult<RedisConnection> {
    let mut connection = match RedisConnection::open(endpoint, connection_timeout, response_timeout).await {
        Err(error) if is_at_maxclients(&error, endpoint.address()).await => {
            return Err(RedisError::from(io::Error::other(format!(
                "{NO_ROOM}: raise maxclients in Redis, or end unused connections, which CLIENT LIST names"
            ))));
        }
        connected => connected?,
    };
    if let Some(name) = CLIENT_NAME.get() {
        let mut naming = redis::cmd("CLIENT");
        naming.arg("SETNAME").arg(format!("ackwheel:{name}:{purpose}"));
        if let Ok(Err(error)) = timeout(NODE_TIMEOUT, naming.exec_async(&mut connection)).await {
            debug!(%error, "a connection to Redis has no name");
        }
    }
    Ok(connection)
}

/// Returns whether Redis closed a connection because it has reached `maxclients`. Redis sends this reason and closes
/// the connection. But a client that has already sent data may see a reset, and no reason. So if `error` lacks the
/// reason, this function opens a second connection without TLS, sends nothing, and reads the reason.
async fn is_at_maxclients(error: &RedisError, address: &ConnectionAddr) -> bool {
    const REASON: &str = "max number of clients";
    if error.to_string().contains(REASON) {
        return true;
    }
    let ConnectionAddr::Tcp(host, port) = address else { return false };
    if !error.is_connection_dropped() || error.is_connection_refusal() {
        return false;
    }
    let read = async {
        let mut stream = TcpStream::connect((host.as_str(), *port)).await?;
        let mut text = [0; 64];
        let length = stream.read(&mut text).await?;
        io::Result::Ok(String::from_utf8_lossy(&text[..length]).contains(REASON))
    };
    matches!(timeout(NODE_TIMEOUT, read).await, Ok(Ok(true)))
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;
    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::redis::connection::errors::FaultKind;

    /// Waits for `ms` milliseconds. Returns `answer`, or a fault if `answer` is `None`.
    async fn after(ms: u64, answer: Option<u8>) -> Result<u8, Fault> {
        sleep(Duration::from_millis(ms)).await;
        answer.ok_or_else(|| Fault::new(FaultKind::Timeout, format!("no answer within {ms}ms")))
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_that_are_much_slower_than_the_first_are_not_waited_for() {
        let begun = Instant::now();
        let asked =
            [after(900, Some(1)), after(300, None), after(400, Some(3)), after(450, Some(4)), after(500, None)];
        assert_eq!(answers(asked).await, Ok(vec![3, 4]));
        assert_eq!(begun.elapsed(), Duration::from_millis(600));
        let begun = Instant::now();
        assert_eq!(answers([after(7, Some(1)), after(5, Some(2))]).await, Ok(vec![2, 1]));
        assert_eq!(begun.elapsed(), Duration::from_millis(7), "all nodes have answered");
        let faults = answers([after(20, None), after(10, None)]).await.unwrap_err();
        assert_eq!(
            faults.iter().map(|fault| fault.text.as_str()).collect::<Vec<_>>(),
            ["no answer within 10ms", "no answer within 20ms"]
        );
    }

    #[test]
    fn a_redis_is_followed_by_another_address_of_the_same_or_a_later_epoch() {
        let template = Endpoint::new("redis://somewhere/".into_connection_info().unwrap());
        let node = |name: Option<&str>, port, config_epoch| {
            let endpoint = template.at("10.0.0.1", port);
            Found { endpoint, config_epoch, node: name.map(str::to_owned) }
        };
        let found = |port, config_epoch| node(None, port, config_epoch);
        assert!(!found(1, 3).is_followed_by(&found(1, 4)));
        assert!(found(1, 3).is_followed_by(&found(2, 3)));
        assert!(found(1, 3).is_followed_by(&found(2, 4)));
        assert!(!found(1, 3).is_followed_by(&found(2, 2)), "the other node does not know the last failover");
        assert!(
            !node(Some("a"), 1, 3).is_followed_by(&node(Some("a"), 2, 3)),
            "both addresses belong to one node"
        );
        assert!(node(Some("a"), 1, 3).is_followed_by(&node(Some("b"), 2, 3)));
    }
}
