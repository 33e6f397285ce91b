//! Logs in over the RESP protocol, with a client library for Redis.

use std::io;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo, RedisError, cmd};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::client::Tls;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Connects to `address`, logs in with `token`, and sends a PING, each within `limit`. Returns the time that the PING took.
pub(super) async fn resp_login(
    address: &str,
    tls: Option<Tls>,
    token: Option<String>,
    limit: Duration,
    now: impl Fn() -> Instant,
) -> Result<Duration, RedisError> {
    let login = async {
        let tcp = TcpStream::connect(address).await?;
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
        let stream: Box<dyn Stream> = match tls {
            Some(tls) => Box::new(tls.shake_hands(host, tcp).await?),
            None => Box::new(tcp),
        };
        let mut settings = RedisConnectionInfo::default();
        if let Some(token) = token {
            settings = settings.set_password(token);
        }
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(limit));
        let (mut connection, driver) = MultiplexedConnection::new_with_config(&settings, stream, config).await?;
        let driver = tokio::spawn(driver);
        let began = now();
        let pong: Result<String, RedisError> = cmd("PING").query_async(&mut connection).await;
        let took = now() - began;
        driver.abort();
        pong.map(|_| took)
    };
    tokio::time::timeout(limit, login).await.map_err(io::Error::from)?
}
