//! Makes a connection to a Redis, a Sentinel or a node, with a name; and says so if there is no room for it.

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

/// How long is waited for the answer that a connection has its name, and for the reason why there is none.
const PATIENCE: Duration = Duration::from_millis(500);

/// What the connections of this process are called in `CLIENT LIST`. It has one store.
static CLIENT_NAME: OnceLock<String> = OnceLock::new();

/// Has all connections of this process bear the name of the sidecar, as far as Redis allows its characters.
pub(crate) fn name_connections(sidecar: &str) {
    let legal = sidecar.chars().filter(char::is_ascii_graphic).take(64).collect();
    let _ = CLIENT_NAME.set(legal);
}

/// Connects, and names the connection by its purpose. A user that may not do that has connections without a name.
pub(crate) async fn connect(
    client: &Client,
    config: &AsyncConnectionConfig,
    purpose: &str,
) -> RedisResult<MultiplexedConnection> {
    let mut connection = match open(client, config).await {
        Err(error) if is_for_want_of_room(&error, client.get_connection_info().addr()).await => {
            return Err(RedisError::from(io::Error::other(
                "Redis has no room for more connections (maxclients): raise maxclients in Redis, or end connections \
                 that nobody needs, which CLIENT LIST names",
            )));
        }
        connected => connected?,
    };
    if let Some(name) = CLIENT_NAME.get() {
        let mut naming = redis::cmd("CLIENT");
        naming.arg("SETNAME").arg(format!("ackwheel:{name}:{purpose}"));
        if let Ok(Err(error)) = timeout(PATIENCE, naming.exec_async(&mut connection)).await {
            debug!(%error, "a connection to Redis has no name");
        }
    }
    Ok(connection)
}

/// Connects. For TLS, redis-rs reads the certificates of all trusted authorities from files, each time and in the poll of
/// this future: that is done on a thread which nobody waits for.
async fn open(client: &Client, config: &AsyncConnectionConfig) -> RedisResult<MultiplexedConnection> {
    if !matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. }) {
        return client.get_multiplexed_async_connection_with_config(config).await;
    }
    let (client, config, runtime) = (client.clone(), config.clone(), Handle::current());
    let connecting =
        spawn_blocking(move || runtime.block_on(client.get_multiplexed_async_connection_with_config(&config)));
    connecting.await.unwrap_or_else(|error| Err(io::Error::other(error).into()))
}

/// Whether a connection failed because Redis has as many as it may have. Redis gives the reason and closes the connection;
/// a client that has sent something may see a reset instead. So another one asks that sends nothing.
async fn is_for_want_of_room(error: &RedisError, address: &ConnectionAddr) -> bool {
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
    matches!(timeout(PATIENCE, read).await, Ok(Ok(true)))
}
