//! Opens named connections to a Redis, a Sentinel or a Cluster node.

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, RedisError, RedisResult};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::debug;

/// How long naming a connection may take, and reading why Redis closes one.
const TIMEOUT: Duration = Duration::from_millis(500);

/// The name of this process in `CLIENT LIST`. It has one store.
static CLIENT_NAME: OnceLock<String> = OnceLock::new();

/// Sets the name of all connections of this process: that of the sidecar, without characters that Redis forbids.
pub(crate) fn name_connections(sidecar: &str) {
    let legal = sidecar.chars().filter(char::is_ascii_graphic).take(64).collect();
    let _ = CLIENT_NAME.set(legal);
}

/// Connects, and names the connection by its purpose. The name is missing if the Redis user may not set it.
pub(crate) async fn connect(
    client: &Client,
    config: &AsyncConnectionConfig,
    purpose: &str,
) -> RedisResult<MultiplexedConnection> {
    let mut connection = match open(client, config).await {
        Err(error) if is_at_maxclients(&error, client.get_connection_info().addr()).await => {
            return Err(RedisError::from(io::Error::other(
                "Redis has no room for more connections (maxclients): raise maxclients in Redis, or end unused \
                 connections, which CLIENT LIST names",
            )));
        }
        connected => connected?,
    };
    if let Some(name) = CLIENT_NAME.get() {
        let mut naming = redis::cmd("CLIENT");
        naming.arg("SETNAME").arg(format!("ackwheel:{name}:{purpose}"));
        if let Ok(Err(error)) = timeout(TIMEOUT, naming.exec_async(&mut connection)).await {
            debug!(%error, "a connection to Redis has no name");
        }
    }
    Ok(connection)
}

/// Connects. For TLS, redis-rs reads the certificates of all trusted authorities from files, each time and in the poll
/// of this future, so a blocking thread does that.
async fn open(client: &Client, config: &AsyncConnectionConfig) -> RedisResult<MultiplexedConnection> {
    if !matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. }) {
        return client.get_multiplexed_async_connection_with_config(config).await;
    }
    let (client, config, runtime) = (client.clone(), config.clone(), Handle::current());
    let connecting =
        spawn_blocking(move || runtime.block_on(client.get_multiplexed_async_connection_with_config(&config)));
    connecting.await.unwrap_or_else(|error| Err(io::Error::other(error).into()))
}

/// Whether a connection failed because Redis has `maxclients` of them. Redis writes the reason and closes the
/// connection; a client that has sent something may see a reset instead. So a second connection reads it and sends
/// nothing.
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
    matches!(timeout(TIMEOUT, read).await, Ok(Ok(true)))
}
