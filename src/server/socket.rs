//! The socket of a connection: TCP, with or without TLS, or a Unix socket.

use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};

use prometheus::IntCounter;
use tokio::io::{AsyncReadExt, Empty, Join, Take, empty, join};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

/// An accepted connection.
pub(super) type Socket = Either<TcpStream, UnixStream>;

/// A connection that is ready for frames: with TLS, after the handshake.
pub(super) type Stream = Either<Socket, Box<TlsStream<TlsSocket>>>;

/// The socket of a TLS stream, with a limit of bytes to read. It is `Empty` only while it moves to another runtime.
pub(super) type TlsSocket = Either<Join<Take<OwnedReadHalf>, OwnedWriteHalf>, Empty>;

/// Returns the socket of a TLS stream, from which at most `most` bytes are read.
pub(super) fn tls_socket(tcp: TcpStream, most: u64) -> TlsSocket {
    let (read, write) = tcp.into_split();
    Either::Left(join(read.take(most), write))
}

/// The result of a read or a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IoEvent {
    /// Bytes were read, and this is their number.
    Read(usize),
    /// The peer sends no more.
    Ended,
    /// Bytes were written or flushed.
    Written,
    /// A write failed: the peer takes no more bytes. Bytes that the peer sent earlier may still be read.
    WriteFailed,
    /// The memory budget has chosen this connection to be closed.
    OverBudget,
}

/// The counters of the bytes of a listener.
#[derive(Clone)]
pub(super) struct Traffic {
    pub(super) received: IntCounter,
    pub(super) sent: IntCounter,
}

/// Ends the limit of bytes to read.
pub(super) fn end_limit(stream: &mut Stream) {
    if let Either::Right(tls) = stream
        && let Either::Left(halves) = tls.get_mut().0
    {
        halves.reader_mut().set_limit(u64::MAX);
    }
}

/// Moves a socket from the runtime of another thread to the current runtime. Ends the limit of bytes to read.
pub(super) fn adopt(stream: Stream) -> io::Result<Stream> {
    let moved_tcp = |tcp: TcpStream| TcpStream::from_std(tcp.into_std()?);
    Ok(match stream {
        Either::Left(Either::Left(tcp)) => Either::Left(Either::Left(moved_tcp(tcp)?)),
        Either::Left(Either::Right(unix)) => Either::Left(Either::Right(UnixStream::from_std(unix.into_std()?)?)),
        Either::Right(mut tls) => {
            let socket = tls.get_mut().0;
            if let Either::Left(halves) = mem::replace(socket, Either::Right(empty())) {
                let (read, write) = halves.into_inner();
                let tcp = read.into_inner().reunite(write).map_err(io::Error::other)?;
                *socket = tls_socket(moved_tcp(tcp)?, u64::MAX);
            }
            Either::Right(tls)
        }
    })
}

/// Returns the file descriptor of a connection.
pub(super) fn descriptor(stream: &Stream) -> BorrowedFd<'_> {
    match stream {
        Either::Left(Either::Left(tcp)) => tcp.as_fd(),
        Either::Left(Either::Right(unix)) => unix.as_fd(),
        Either::Right(tls) => match tls.get_ref().0 {
            Either::Left(halves) => halves.writer().as_ref().as_fd(),
            Either::Right(_) => unreachable!("a TLS stream has a socket unless it is just moved"),
        },
    }
}
