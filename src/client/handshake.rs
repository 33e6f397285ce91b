//! Opens connections: connects, exchanges the frames Hello and Welcome and, for a subscription, sends the request
//! Subscribe.

use std::io;
use std::sync::Arc;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::address::Address;
use super::error::ClientError;
use super::options::ClientOptions;
use crate::protocol::frame::{Body, Error, Frame, Subscribe, VERSIONS, Welcome};
use crate::protocol::{Codec, DecodeError, Decoded};

/// The number of bytes by which the receive buffer grows.
const READ_LENGTH: usize = 64 * 1024;

/// The correlation id of Hello. A correlation id links an answer to its request.
const HELLO: u32 = 1;
/// The correlation id of Subscribe, which the server repeats in every TimeoutBatch.
pub(super) const SUBSCRIBE: u32 = 2;
/// The first correlation id after those of the handshake.
pub(super) const FIRST_REQUEST: u32 = 3;

/// The receiving half of a connection, with its buffer.
pub(crate) struct Incoming {
    pub(crate) reader: Box<dyn AsyncRead + Send + Unpin>,
    /// Bytes that were read and are not decoded yet.
    pub(crate) bytes: BytesMut,
}

impl Incoming {
    /// Waits for bytes and appends them to the buffer. The end of the stream is an error. Cancel-safe.
    pub(crate) async fn read(&mut self) -> io::Result<()> {
        if self.bytes.capacity() - self.bytes.len() < READ_LENGTH / 4 {
            self.bytes.reserve(READ_LENGTH);
        }
        match self.reader.read_buf(&mut self.bytes).await? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection")),
            _ => Ok(()),
        }
    }

    async fn read_frame(&mut self) -> io::Result<Frame> {
        loop {
            match Codec::default().decode(&mut self.bytes) {
                Ok(Some(Decoded::Frame(frame))) => return Ok(frame),
                Ok(Some(Decoded::Refused { refusal, .. })) | Err(DecodeError { refusal, .. }) => {
                    return Err(malformed(refusal.text));
                }
                Ok(None) => self.read().await?,
            }
        }
    }
}

/// The sending half of a connection, with its buffer.
pub(crate) struct Outgoing {
    pub(crate) writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// Bytes that are not written yet.
    pub(crate) bytes: BytesMut,
    /// Whether the stream may still buffer written bytes, as TLS does.
    is_unflushed: bool,
}

impl Outgoing {
    pub(super) fn encode(&mut self, correlation: u32, body: Body) {
        Codec::default().encode_frame(&Frame::new(correlation, body), &mut self.bytes);
    }

    /// Returns whether bytes wait to be written or flushed.
    pub(super) fn has_unwritten(&self) -> bool {
        !self.bytes.is_empty() || self.is_unflushed
    }

    /// Writes as many waiting bytes as the stream accepts. If no bytes wait, flushes the stream. Cancel-safe.
    pub(super) async fn write(&mut self) -> io::Result<()> {
        if self.bytes.is_empty() {
            self.writer.flush().await?;
            self.is_unflushed = false;
            return Ok(());
        }
        if self.writer.write_buf(&mut self.bytes).await? == 0 {
            return Err(io::Error::new(io::ErrorKind::WriteZero, "the connection takes no more bytes"));
        }
        self.is_unflushed = true;
        Ok(())
    }

    pub(crate) async fn write_all(&mut self) -> io::Result<()> {
        while self.has_unwritten() {
            self.write().await?;
        }
        Ok(())
    }
}

/// A connection after its handshake, ready for requests.
pub(crate) struct OpenConnection {
    pub(crate) incoming: Incoming,
    pub(crate) outgoing: Outgoing,
    pub(crate) welcome: Welcome,
    /// The group that the subscription joined; empty if there is no subscription.
    pub(super) group: String,
    /// Whether the subscription created the group.
    pub(super) created: bool,
}

/// A factory of connections with the same address, options and subscription.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) address: Address,
    pub(super) options: ClientOptions,
    pub(super) subscribe: Option<Subscribe>,
}

impl Dialer {
    /// Opens a connection within the connect timeout.
    pub(super) async fn dial(&self) -> Result<OpenConnection, ClientError> {
        let options = self.options.clone();
        // In Tokio's blocking pool, because the token file may be on a file system that hangs.
        let read = || spawn_blocking(move || options.hello());
        let hello = match self.options.token_file {
            None => self.options.hello()?,
            Some(_) => read().await.unwrap_or_else(|error| Err(ClientError::TokenFile(Arc::new(error.into()))))?,
        };
        let hello = Body::Hello(hello);
        let limit = self.options.connect_timeout;
        let too_slow = |_| {
            let text = format!("it did not answer within {limit:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        };
        let dialed = timeout(limit, self.dial_untimed(hello)).await.unwrap_or_else(too_slow);
        let failed = |cause| ClientError::Connect { address: self.address.clone(), cause: Arc::new(cause) };
        #[cfg(feature = "tls")]
        let dialed = dialed.map_err(super::tls::explain_refused_certificate);
        dialed.map_err(failed)?.map_err(ClientError::Refused)
    }

    async fn dial_untimed(&self, hello: Body) -> io::Result<Result<OpenConnection, Error>> {
        let (mut incoming, mut outgoing) = self.connect().await?;
        let welcome = match ask(&mut incoming, &mut outgoing, HELLO, hello).await? {
            Body::Welcome(welcome) => welcome,
            Body::Error(error) => return Ok(Err(error)),
            body => return Err(unexpected(&body)),
        };
        if !VERSIONS.contains(&welcome.version) {
            let version = welcome.version;
            return Err(malformed(format!("the server chose version {version}, which was not offered")));
        }
        let (mut group, mut created) = (String::new(), false);
        if let Some(subscribe) = &self.subscribe {
            let subscribe = Body::Subscribe(subscribe.clone());
            match ask(&mut incoming, &mut outgoing, SUBSCRIBE, subscribe).await? {
                Body::Subscribed { group: joined, created: is_new } => (group, created) = (joined, is_new),
                Body::Error(error) => return Ok(Err(error)),
                body => return Err(unexpected(&body)),
            }
        }
        Ok(Ok(OpenConnection { incoming, outgoing, welcome, group, created }))
    }

    async fn connect(&self) -> io::Result<(Incoming, Outgoing)> {
        match &self.address {
            Address::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                // Frames are already collected in `Outgoing`, so Nagle's algorithm would only delay them.
                stream.set_nodelay(true)?;
                match &self.options.tls {
                    None => Ok(boxed(stream.into_split())),
                    #[cfg(not(feature = "tls"))]
                    Some(tls) => match *tls {},
                    #[cfg(feature = "tls")]
                    Some(tls) => Ok(boxed(tokio::io::split(tls.shake_hands(host, stream).await?))),
                }
            }
            #[cfg(unix)]
            Address::Unix(path) => Ok(boxed(tokio::net::UnixStream::connect(path).await?.into_split())),
            #[cfg(not(unix))]
            Address::Unix(_) => Err(io::Error::from(io::ErrorKind::Unsupported)),
        }
    }
}

fn boxed<R, W>((reader, writer): (R, W)) -> (Incoming, Outgoing)
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let incoming = Incoming { reader: Box::new(reader), bytes: BytesMut::new() };
    (incoming, Outgoing { writer: Box::new(writer), bytes: BytesMut::new(), is_unflushed: false })
}

/// Opens a connection for a caller that reads and writes frames itself.
#[cfg(feature = "sidecar")]
pub(crate) async fn open(address: &Address, options: &ClientOptions) -> Result<OpenConnection, ClientError> {
    let dialer = Dialer { address: address.clone(), options: options.clone(), subscribe: None };
    dialer.dial().await
}

/// Sends a request and waits for its answer or for an Error. While waiting, answers Pings and ignores GoAways, the
/// announcements that the server will close the connection.
async fn ask(incoming: &mut Incoming, outgoing: &mut Outgoing, correlation: u32, body: Body) -> io::Result<Body> {
    outgoing.encode(correlation, body);
    // If the write fails, the server may have sent an Error before it closed the connection. So read first, and report
    // the write error only if reading fails too.
    let mut unwritten = outgoing.write_all().await.err();
    loop {
        let frame = incoming.read_frame().await.map_err(|error| unwritten.take().unwrap_or(error))?;
        match frame.body {
            Body::Ping(payload) => {
                outgoing.encode(frame.correlation, Body::Pong(payload));
                outgoing.write_all().await?;
            }
            Body::GoAway { .. } => {}
            Body::Error(_) => return Ok(frame.body),
            body if frame.correlation == correlation => return Ok(body),
            body => return Err(unexpected(&body)),
        }
    }
}

fn unexpected(body: &Body) -> io::Error {
    malformed(format!("the server began with {}, which is not allowed there", body.frame_type().as_str()))
}

fn malformed(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}
