//! Opens a connection to a Redis, a Sentinel or a Cluster node.
//!
//! The `redis` crate can connect too, but its lookups of names have no limit, and it reads the files of TLS only once.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_ok;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, ConnectionAddr, Pipeline, RedisFuture, RedisResult, Value};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::task::AbortOnDropHandle;

use crate::redis::topology::endpoint::Endpoint;
use crate::redis::topology::lookup;

/// A connection. Clones share it. Once the last clone is dropped, it is closed, also if requests are not answered.
#[derive(Clone)]
pub(crate) struct RedisConnection {
    inner: MultiplexedConnection,
    _driver: Arc<AbortOnDropHandle<()>>,
}

impl RedisConnection {
    /// Connects and logs in, within `limit`. Without `response_timeout`, an answer may take any time.
    pub(super) async fn open(
        endpoint: &Endpoint,
        limit: Duration,
        response_timeout: Option<Duration>,
    ) -> RedisResult<RedisConnection> {
        timeout(limit, connect(endpoint, response_timeout)).await.map_err(io::Error::from)?
    }

    /// Sends a command and waits for its answer.
    pub(crate) async fn send_packed_command(&mut self, command: &Cmd) -> RedisResult<Value> {
        self.inner.send_packed_command(command).await
    }
}

impl ConnectionLike for RedisConnection {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        self.inner.req_packed_command(command)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.inner.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.inner.get_db()
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

async fn connect(endpoint: &Endpoint, response_timeout: Option<Duration>) -> RedisResult<RedisConnection> {
    let (settings, tls) = if endpoint.has_files() {
        let endpoint = endpoint.clone();
        spawn_blocking(move || endpoint.read()).await.map_err(io::Error::other)??
    } else {
        endpoint.read()?
    };
    let stream: Box<dyn Stream> = match (endpoint.address(), tls) {
        (ConnectionAddr::TcpTls { host, port, .. }, Some(tls)) => {
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            Box::new(tls.connect(name, connect_tcp(host, *port).await?).await?)
        }
        (ConnectionAddr::Tcp(host, port), None) => Box::new(connect_tcp(host, *port).await?),
        (ConnectionAddr::Unix(path), _) => Box::new(UnixStream::connect(path).await?),
        _ => return Err(io::Error::from(io::ErrorKind::Unsupported).into()),
    };
    let config = AsyncConnectionConfig::new().set_response_timeout(response_timeout);
    let (inner, driver) = MultiplexedConnection::new_with_config(&settings, stream, config).await?;
    Ok(RedisConnection { inner, _driver: Arc::new(AbortOnDropHandle::new(tokio::spawn(driver))) })
}

/// Connects to the first address of a host that accepts. The connection sends commands without delay and detects a dead
/// peer.
async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = lookup::addresses(host).await?;
    let attempts: Vec<_> =
        addresses.into_iter().map(|address| Box::pin(TcpStream::connect((address, port)))).collect();
    if attempts.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the name of the host has no address"));
    }
    let (stream, _) = select_ok(attempts).await?;
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(1))
        .with_retries(3);
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}
