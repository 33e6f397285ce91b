//! The transports of a connection, as one type.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

/// A connection's two directions.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Unix(UnixStream),
}

impl Stream {
    /// Whether bytes wait in the socket at this moment.
    ///
    /// Asks the kernel and not the runtime, which may not have heard of them yet.
    pub(super) fn has_unread(&self) -> bool {
        matches!(SockRef::from(self).peek(&mut [MaybeUninit::uninit()]), Ok(1..))
    }

    /// Bytes that the kernel keeps for it until they are read; 0 if it does not say.
    pub(super) fn receive_buffer(&self) -> usize {
        SockRef::from(self).recv_buffer_size().unwrap_or_default()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Tls(stream) => stream.get_ref().0.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

macro_rules! inner {
    ($stream:expr, $method:ident $(, $argument:expr)*) => {
        match $stream.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).$method($($argument),*),
            Stream::Tls(stream) => Pin::new(stream).$method($($argument),*),
            Stream::Unix(stream) => Pin::new(stream).$method($($argument),*),
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        inner!(self, poll_read, context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        inner!(self, poll_write, context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self, poll_flush, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self, poll_shutdown, context)
    }
}
