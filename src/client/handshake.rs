//! From an address to a connection that is ready for requests: dial, Hello and, for a subscription,
//! Subscribe.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::address::Address;
use super::error::ClientError;
use super::options::ClientOptions;
use crate::protocol::frame::{Body, Error, Frame, Hello, Subscribe, Subscribed, VERSIONS, Welcome};
use crate::protocol::{Codec, DecodeError, Decoded};

/// Bytes that are read at once, if they are there.
const READ_LENGTH: usize = 64 * 1024;

/// The correlation ids of the handshake.
const HELLO: u32 = 1;
pub(super) const SUBSCRIBE: u32 = 2;
/// The first that is free for requests.
pub(super) const FIRST_REQUEST: u32 = 3;

/// Bytes from a server.
pub(super) struct Incoming {
    reader: Box<dyn AsyncRead + Send + Unpin>,
    /// Bytes that were read and not yet decoded.
    pub(super) bytes: BytesMut,
}

impl Incoming {
    /// Reads what there is. Cancel-safe. Nothing more to come is an error.
    pub(super) async fn read(&mut self) -> io::Result<()> {
        if self.bytes.capacity() - self.bytes.len() < READ_LENGTH / 4 {
            self.bytes.reserve(READ_LENGTH);
        }
        match self.reader.read_buf(&mut self.bytes).await? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection")),
            _ => Ok(()),
        }
    }
}

/// Bytes to a server.
pub(super) struct Outgoing {
    writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// Whether the stream holds bytes back that were written to it, as TLS can.
    unflushed: bool,
}

impl Outgoing {
    /// Whether everything written has left.
    pub(super) fn is_flushed(&self) -> bool {
        !self.unflushed
    }

    /// Writes what the server takes of `bytes`; without any, sends on what the stream holds back. Cancel-safe.
    pub(super) async fn write(&mut self, bytes: &mut BytesMut) -> io::Result<()> {
        if bytes.is_empty() {
            self.writer.flush().await?;
            self.unflushed = false;
            return Ok(());
        }
        if self.writer.write_buf(bytes).await? == 0 {
            return Err(io::Error::new(io::ErrorKind::WriteZero, "the connection takes no more bytes"));
        }
        self.unflushed = true;
        Ok(())
    }

    /// Writes all of `bytes`, and nothing more after that.
    pub(super) async fn finish(&mut self, bytes: &mut BytesMut) -> io::Result<()> {
        self.writer.write_all_buf(bytes).await?;
        self.writer.flush().await?;
        self.writer.shutdown().await
    }
}

/// A byte stream to and from a server.
pub(super) struct Stream {
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
    pub(super) codec: Codec,
}

impl Stream {
    async fn read_frame(&mut self) -> io::Result<Frame> {
        loop {
            match self.codec.decode(&mut self.incoming.bytes) {
                Ok(Some(Decoded::Frame(frame))) => return Ok(frame),
                Ok(Some(Decoded::Refused { refusal, .. })) | Err(DecodeError { refusal, .. }) => {
                    return Err(malformed(refusal.text));
                }
                Ok(None) => self.incoming.read().await?,
            }
        }
    }

    async fn write_frame(&mut self, frame: &Frame) -> io::Result<()> {
        let mut out = BytesMut::new();
        self.codec.encode_frame(frame, &mut out);
        self.outgoing.writer.write_all(&out).await?;
        self.outgoing.writer.flush().await
    }

    /// Sends a request and waits for its answer. Pings and a GoAway may come meanwhile.
    async fn ask(&mut self, correlation: u32, body: Body) -> Result<Body, HandshakeError> {
        let written = self.write_frame(&Frame::new(correlation, body)).await;
        // A server that closes before it has read may have sent its reason.
        let mut unwritten = written.err();
        loop {
            let read = self.read_frame().await;
            let frame = read.map_err(|error| unwritten.take().unwrap_or(error))?;
            match frame.body {
                Body::Error(error) => return Err(HandshakeError::Refused(error)),
                Body::Ping(payload) => {
                    self.write_frame(&Frame::new(frame.correlation, Body::Pong(payload))).await?;
                }
                Body::GoAway(_) => {}
                body if frame.correlation == correlation => return Ok(body),
                body => return Err(unexpected(&body)),
            }
        }
    }
}

/// A connection that is ready for requests.
pub(super) struct Established {
    pub(super) stream: Stream,
    pub(super) welcome: Welcome,
    pub(super) subscribed: Option<Subscribed>,
}

/// A connection that has said Hello, for those who speak on it themselves.
#[cfg(feature = "sidecar")]
pub(crate) struct Greeted {
    pub(crate) reader: Box<dyn AsyncRead + Send + Unpin>,
    pub(crate) writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// The bytes behind Welcome.
    pub(crate) received: BytesMut,
    pub(crate) welcome: Welcome,
}

/// Connects and says Hello, and leaves all else to the caller.
#[cfg(feature = "sidecar")]
pub(crate) async fn greet(address: &Address, options: &ClientOptions) -> Result<Greeted, ClientError> {
    let Established { stream: Stream { incoming, outgoing, .. }, welcome, .. } =
        Dialer::new(address.clone(), options.clone(), None)?.dial().await?;
    Ok(Greeted { reader: incoming.reader, writer: outgoing.writer, received: incoming.bytes, welcome })
}

enum HandshakeError {
    Io(io::Error),
    Refused(Error),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> HandshakeError {
        HandshakeError::Io(error)
    }
}

fn malformed(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

fn unexpected(body: &Body) -> HandshakeError {
    let frame = body.frame_type().as_str();
    HandshakeError::Io(malformed(format!("the server began with {frame}, which it may not")))
}

/// Makes connections, one like the other.
pub(super) struct Dialer {
    pub(super) address: Address,
    pub(super) options: ClientOptions,
    hello: Hello,
    subscribe: Option<Subscribe>,
}

impl Dialer {
    /// For connections to `address`, with a subscription if one is given.
    pub(super) fn new(
        address: Address,
        options: ClientOptions,
        subscribe: Option<Subscribe>,
    ) -> Result<Dialer, ClientError> {
        let hello = options.hello()?;
        Ok(Dialer { address, options, hello, subscribe })
    }

    /// Makes a connection: refused, or not to be had, or ready for requests.
    pub(super) async fn dial(&self) -> Result<Established, ClientError> {
        let limit = self.options.connect_timeout;
        let too_slow = || {
            let text = format!("it did not answer within {limit:?}");
            HandshakeError::Io(io::Error::new(io::ErrorKind::TimedOut, text))
        };
        let dialed = timeout(limit, self.dial_slowly()).await.unwrap_or_else(|_| Err(too_slow()));
        dialed.map_err(|error| match error {
            HandshakeError::Io(cause) => ClientError::connect(&self.address, cause),
            HandshakeError::Refused(error) => ClientError::Refused(error),
        })
    }

    async fn dial_slowly(&self) -> Result<Established, HandshakeError> {
        let mut stream = self.connect().await?;
        let welcome = match stream.ask(HELLO, Body::Hello(self.hello.clone())).await? {
            Body::Welcome(welcome) => welcome,
            body => return Err(unexpected(&body)),
        };
        if !VERSIONS.contains(&welcome.version) {
            let version = welcome.version;
            return Err(malformed(format!("the server chose version {version}, which was not offered")).into());
        }
        let subscribed = match &self.subscribe {
            None => None,
            Some(subscribe) => match stream.ask(SUBSCRIBE, Body::Subscribe(subscribe.clone())).await? {
                Body::Subscribed(subscribed) => Some(subscribed),
                body => return Err(unexpected(&body)),
            },
        };
        Ok(Established { stream, welcome, subscribed })
    }

    async fn connect(&self) -> io::Result<Stream> {
        let (reader, writer): (Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncWrite + Send + Unpin>) =
            match &self.address {
                Address::Tcp { host, port } => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    // Frames are put together here; the kernel need not wait for more.
                    stream.set_nodelay(true)?;
                    match &self.options.tls {
                        None => {
                            let (reader, writer) = stream.into_split();
                            (Box::new(reader), Box::new(writer))
                        }
                        #[cfg(not(feature = "tls"))]
                        Some(tls) => match *tls {},
                        #[cfg(feature = "tls")]
                        Some(tls) => {
                            let (reader, writer) = tokio::io::split(tls.shake_hands(host, stream).await?);
                            (Box::new(reader), Box::new(writer))
                        }
                    }
                }
                #[cfg(unix)]
                Address::Unix(path) => {
                    let (reader, writer) = tokio::net::UnixStream::connect(path).await?.into_split();
                    (Box::new(reader), Box::new(writer))
                }
                #[cfg(not(unix))]
                Address::Unix(_) => return Err(io::Error::from(io::ErrorKind::Unsupported)),
            };
        let incoming = Incoming { reader, bytes: BytesMut::new() };
        let outgoing = Outgoing { writer, unflushed: false };
        Ok(Stream { incoming, outgoing, codec: Codec::default() })
    }
}
