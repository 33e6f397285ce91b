//! Buffers the bytes of a connection: one buffer for input and one for output.
//!
//! A read takes the bytes that have arrived, up to a limit. The answers to all requests in these bytes are then written
//! together. Both buffers are bounded: if a peer does not read its answers, its requests are not read.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::runtime::Handle;
use tokio_util::either::Either;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::buffer::Buffer;
use super::memory_budget::{Charge, MemoryBudget};
use super::socket::{self, IoEvent, Stream, Traffic, descriptor};
use crate::core::RequestBatch;
use crate::protocol::codec::EchoedPings;
use crate::protocol::{Codec, DecodeError, Decoded};
use crate::ticker::read_barrier::{Member, ReadBarrier, UnprocessedInput};

/// The maximum number of bytes of one read: room for about 4,000 message ids, which have 8 bytes each.
pub(super) const READ_SIZE: usize = 32 * 1024;

/// The maximum number of bytes that are read and dropped when a connection closes. If unread bytes remained, the kernel
/// would reset the connection, and the peer could not read the last Error frame.
const LINGER_BYTES: usize = 1024 * 1024;

thread_local! {
    /// The buffer into which all connections of a thread read, so that an idle connection needs no memory for input.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub(super) struct BufferedStream {
    stream: Stream,
    /// The mark for the read barrier. It is set while the connection may have bytes that it has not processed. Before a
    /// tick expires, the barrier asks marked connections to read and process their bytes.
    unprocessed_input: UnprocessedInput,
    pub(super) codec: Codec,
    input: Buffer,
    output: Buffer,
    /// Charges the memory of `input` and `output`.
    charge: Charge,
    /// Bytes that are charged beside the buffers.
    pub(super) also_charged: usize,
    /// The bytes that the stream has taken so far, and how many of them it has passed on to the kernel.
    taken: u64,
    written: u64,
    traffic: Traffic,
    /// The length of `output` at which the connection stops reading.
    max_queued: usize,
    /// Whether the stream may still buffer bytes that were written to it, as a TLS stream does.
    is_unflushed: bool,
    /// Whether the peer has ended its side of the stream.
    has_ended: bool,
    /// Whether a write has failed. Requests that the peer sent earlier are still handled.
    pub(super) write_failed: bool,
}

impl BufferedStream {
    pub(super) fn new(
        stream: Stream,
        codec: Codec,
        max_queued: usize,
        charge: Charge,
        traffic: Traffic,
    ) -> BufferedStream {
        BufferedStream {
            stream,
            unprocessed_input: UnprocessedInput::default(),
            codec,
            input: Buffer::default(),
            output: Buffer::default(),
            also_charged: charge.last,
            charge,
            taken: 0,
            written: 0,
            traffic,
            max_queued,
            is_unflushed: false,
            has_ended: false,
            write_failed: false,
        }
    }

    /// Moves the connection of an admitted client from the runtime of this thread to another runtime, and its charge to
    /// another budget. The next reads and writes must happen in that runtime.
    pub(super) fn move_to(self, runtime: &Handle, budget: &Arc<MemoryBudget>) -> io::Result<BufferedStream> {
        let _entered = runtime.enter();
        let stream = socket::adopt(self.stream)?;
        Ok(BufferedStream { stream, charge: budget.open(), also_charged: 0, ..self })
    }

    /// Accepts frames of this length, and reads as many bytes as the peer sends.
    pub(super) fn end_limits(&mut self, max_frame_length: u32) {
        self.codec = Codec::new(max_frame_length);
        socket::end_limit(&mut self.stream);
    }

    /// Adds the connection to the read barrier. Until the session has processed its input, the barrier counts this
    /// input as unprocessed.
    pub(super) fn join(&mut self, read_barrier: &Arc<ReadBarrier>) -> Member {
        let member = read_barrier.join(Some(descriptor(&self.stream)));
        self.unprocessed_input = member.unprocessed_input();
        member
    }

    /// Queues the bytes that `encode` appends. Does nothing if a write has failed.
    #[inline]
    pub(super) fn write(&mut self, encode: impl FnOnce(&Codec, &mut BytesMut)) {
        if !self.write_failed {
            encode(&self.codec, &mut self.output.bytes);
        }
    }

    /// Answers the Pings at the front of the input, and skips the Pongs. Stops at any other frame.
    pub(super) fn echo_pings(&mut self) -> EchoedPings {
        let before = self.output.bytes.len();
        let echoed = self.codec.echo_pings(&self.input.bytes, &mut self.output.bytes);
        self.input.bytes.advance(echoed.bytes);
        if self.write_failed {
            self.output.bytes.truncate(before);
        }
        echoed
    }

    /// Moves AddNewMsg and DelMsg frames from the front of the input into `batch`. Stops at any other frame, or when
    /// the batch has `most` messages or more. `revolution` is the default ack timeout in ticks.
    pub(super) fn take_requests(&mut self, batch: &mut RequestBatch, most: usize, revolution: u16) {
        let taken = self.codec.take_requests(&self.input.bytes, batch, most, revolution);
        self.input.bytes.advance(taken);
    }

    /// Takes the next frame from the input. Returns `None` if the input contains no complete frame.
    pub(super) fn decode(&mut self) -> Result<Option<Decoded>, DecodeError> {
        let decoded = self.codec.decode(&mut self.input.bytes)?;
        if decoded.is_none() {
            self.input.free_if_unused(&self.charge);
        }
        Ok(decoded)
    }

    /// Returns whether the output is shorter than its limit. Otherwise nothing may be read, because the answers would
    /// make the output longer.
    pub(super) fn has_room(&self) -> bool {
        self.output.bytes.len() < self.max_queued
    }

    /// Returns whether a batch may be queued. Batches may use only half of the output. So a peer that does not read its
    /// batches for a while can still send requests and Acks.
    pub(super) fn has_room_for_batches(&self) -> bool {
        self.output.bytes.len() < self.max_queued.div_ceil(2)
    }

    /// Returns whether the socket has taken all queued bytes.
    pub(super) fn is_flushed(&self) -> bool {
        self.output.bytes.is_empty() && !self.is_unflushed
    }

    /// Returns whether the peer sends no more.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns the place in the stream of output behind all queued bytes.
    pub(super) fn end_of_output(&self) -> u64 {
        self.taken + self.output.bytes.len() as u64
    }

    /// Returns the place in the stream of output up to which the kernel has taken it.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Returns whether bytes of the peer wait in the socket and may be read. Asks the kernel, because Tokio learns of
    /// new bytes with a delay.
    pub(super) fn has_unread(&self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        !self.has_ended
            && self.has_room()
            && matches!(SockRef::from(&descriptor(&self.stream)).peek(&mut byte), Ok(1..))
    }

    /// Returns how many received bytes the socket can hold, but at least [`READ_SIZE`].
    pub(super) fn most_unread(&self) -> usize {
        SockRef::from(&descriptor(&self.stream)).recv_buffer_size().unwrap_or_default().max(READ_SIZE)
    }

    /// Drops all bytes that were read or queued. Returns whether the peer has taken all frames whose writing had begun,
    /// so that a further frame can follow.
    pub(super) fn discard(&mut self) -> bool {
        let was_flushed = self.is_flushed();
        (self.input, self.output) = (Buffer::default(), Buffer::default());
        was_flushed
    }

    /// Returns the input that was read and not taken yet.
    pub(super) fn input(&mut self) -> &mut BytesMut {
        &mut self.input.bytes
    }

    /// Returns input that was taken out of [`BufferedStream::input`]. Frees its memory if it is large and empty.
    pub(super) fn return_input(&mut self, input: BytesMut) {
        self.input.bytes = input;
        self.input.free_if_unused(&self.charge);
    }

    /// Charges the memory of both buffers.
    fn charge(&mut self) {
        let bytes = self.input.allocated() + self.output.allocated() + self.also_charged;
        self.charge.set(bytes);
    }

    /// Writes queued bytes. If nothing can be written now and `read` is set, reads. Cancel-safe.
    pub(super) async fn read_or_write(&mut self, read: bool) -> io::Result<IoEvent> {
        self.charge();
        poll_fn(|context| {
            if self.charge.take_closed() {
                return Poll::Ready(Ok(IoEvent::OverBudget));
            }
            match self.poll_write(context) {
                Poll::Ready(Ok(true)) => return Poll::Ready(Ok(IoEvent::Written)),
                Poll::Ready(Ok(false)) | Poll::Pending => {}
                Poll::Ready(Err(_)) => {
                    // Return no error, because bytes that the peer sent earlier may still be unread.
                    (self.write_failed, self.is_unflushed, self.output) = (true, false, Buffer::default());
                    return Poll::Ready(Ok(IoEvent::WriteFailed));
                }
            }
            if read
                && !self.has_ended
                && self.has_room()
                && let Poll::Ready(read) = self.poll_read(context)
            {
                return Poll::Ready(read);
            }
            self.charge.wake_when_closed(context);
            if self.charge.take_closed() { Poll::Ready(Ok(IoEvent::OverBudget)) } else { Poll::Pending }
        })
        .await
    }

    /// Reads bytes that wait in the socket. Returns `None` at once if no bytes wait, or if none may be read.
    pub(super) async fn read_waiting(&mut self) -> io::Result<Option<IoEvent>> {
        if self.has_ended || !self.has_room() {
            return Ok(None);
        }
        poll_fn(|context| match self.poll_read(context) {
            Poll::Pending if !self.has_unread() => Poll::Ready(Ok(None)),
            read => read.map_ok(Some),
        })
        .await
    }

    /// Writes or flushes queued bytes. Returns whether there were any. Marks the input as unprocessed, because bytes
    /// may arrive during the write.
    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if self.is_flushed() {
            return Poll::Ready(Ok(false));
        }
        self.unprocessed_input.set();
        if self.output.bytes.is_empty() {
            ready!(Pin::new(&mut self.stream).poll_flush(context))?;
            (self.is_unflushed, self.written) = (false, self.taken);
            return Poll::Ready(Ok(true));
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.output.bytes))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.is_unflushed = true;
        self.taken += written as u64;
        if matches!(self.stream, Either::Left(_)) {
            // Only TLS buffers what it takes.
            self.written = self.taken;
        }
        self.traffic.sent.inc_by(written as u64);
        if written < self.output.bytes.len() {
            self.output.bytes.advance(written);
        } else {
            self.output.bytes.clear();
            self.output.free_if_unused(&self.charge);
        }
        Poll::Ready(Ok(true))
    }

    /// Reads bytes into `input`. The caller must process them before it reads again. Marks the input as unprocessed,
    /// and removes this mark once nothing is left to read.
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<IoEvent>> {
        self.unprocessed_input.set();
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize(READ_SIZE, 0);
            let longest = self.codec.longest_frame();
            // Before Hello, frames are short. Then the input never takes more memory than one frame.
            let most = if longest < READ_SIZE {
                let room = longest.saturating_sub(self.input.bytes.len()).max(1);
                self.input.bytes.reserve(room);
                room
            } else {
                READ_SIZE
            };
            let mut buffer = ReadBuf::new(&mut scratch[..most]);
            if Pin::new(&mut self.stream).poll_read(context, &mut buffer)?.is_pending() {
                self.unprocessed_input.clear();
                return Poll::Pending;
            }
            let read = buffer.filled();
            self.has_ended = read.is_empty();
            self.traffic.received.inc_by(read.len() as u64);
            self.input.bytes.extend_from_slice(read);
            self.charge();
            Poll::Ready(Ok(if read.is_empty() { IoEvent::Ended } else { IoEvent::Read(read.len()) }))
        })
    }

    /// Writes all queued bytes, shuts down the stream, and drops `unanswered`. Then reads until the peer closes the
    /// stream too, but at most [`LINGER_BYTES`]: closing a socket with unread bytes would discard the bytes that were
    /// written last. `unanswered` is the token of a connection whose last answers are not written yet.
    pub(super) async fn close(mut self, unanswered: TaskTrackerToken) {
        self.input = Buffer::default();
        while !self.is_flushed() && !self.write_failed {
            if !matches!(self.read_or_write(false).await, Ok(IoEvent::Written | IoEvent::WriteFailed)) {
                return;
            }
        }
        if self.stream.shutdown().await.is_err() {
            return;
        }
        drop(unanswered);
        self.output = Buffer::default();
        self.charge();
        let mut dropped = 0;
        let mut scratch = vec![0; 4096];
        while dropped < LINGER_BYTES
            && let Ok(count @ 1..) = self.stream.read(&mut scratch).await
        {
            dropped += count;
            // Let the other connections of this thread make progress.
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use prometheus::IntCounter;
    use tokio::net::UnixStream;

    use super::*;
    use crate::protocol::frame::{Body, Frame, MAX_GREETING_LENGTH};

    fn stream_of(ours: UnixStream, max_frame_length: u32, budget: &Arc<MemoryBudget>) -> BufferedStream {
        let (stream, codec) = (Either::Left(Either::Right(ours)), Codec::new(max_frame_length));
        BufferedStream::new(stream, codec, 1_024, budget.open(), traffic())
    }

    fn traffic() -> Traffic {
        Traffic { received: IntCounter::new("a", "a").unwrap(), sent: IntCounter::new("b", "b").unwrap() }
    }

    #[tokio::test]
    async fn the_input_before_hello_takes_the_memory_of_one_frame() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let budget = Arc::new(MemoryBudget::new(usize::MAX));
        let mut stream = stream_of(ours, MAX_GREETING_LENGTH, &budget);
        let (mut read, most) = (0, 4 + MAX_GREETING_LENGTH as usize);
        for part in [3_000, 1_099, 20_000] {
            theirs.write_all(&vec![0; part]).await.unwrap();
            let IoEvent::Read(count) = stream.read_or_write(true).await.unwrap() else {
                panic!("nothing was read")
            };
            read += count;
            assert_eq!((read, stream.input.allocated()), ((3_000 + 1_099).min(read).max(read.min(most)), most));
        }
        assert_eq!(read, most);
    }

    #[tokio::test]
    async fn a_connection_that_closes_keeps_no_buffers_while_the_peer_stays() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let budget = Arc::new(MemoryBudget::new(usize::MAX));
        let mut stream = stream_of(ours, 1024 * 1024, &budget);
        theirs.write_all(&vec![0; 20_000]).await.unwrap();
        assert_eq!(stream.read_or_write(true).await.unwrap(), IoEvent::Read(20_000));
        let ping = Frame::new(0, Body::Ping(vec![0; 60]));
        stream.write(|codec, out| codec.encode_frame(&ping, out));
        assert!(budget.charged() >= 20_000);
        let mut closing = Box::pin(stream.close(tokio_util::task::TaskTracker::new().token()));
        assert!(closing.as_mut().now_or_never().is_none(), "the peer has not closed its side");
        assert_eq!(budget.charged(), 0);
        let mut last = Vec::new();
        theirs.read_to_end(&mut last).await.unwrap();
        assert!(last.len() > 60, "the last frame is written");
    }

    #[tokio::test]
    async fn input_counts_as_unprocessed_from_a_read_or_write_until_nothing_is_left_to_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let member = ReadBarrier::new().join(None);
        let unprocessed_input = member.unprocessed_input();
        let mut stream = BufferedStream::new(
            Either::Left(Either::Right(ours)),
            Codec::new(MAX_GREETING_LENGTH),
            1_024,
            Arc::new(MemoryBudget::new(usize::MAX)).open(),
            traffic(),
        );
        stream.unprocessed_input = unprocessed_input.clone();
        assert!(stream.read_or_write(true).now_or_never().is_none());
        assert!(!unprocessed_input.is_set());

        theirs.write_all(b"x").await.unwrap();
        assert_eq!(stream.read_or_write(true).await.unwrap(), IoEvent::Read(1));
        assert!(unprocessed_input.is_set(), "the bytes that were read are not processed yet");
        assert!(stream.read_or_write(true).now_or_never().is_none());
        assert!(!unprocessed_input.is_set());

        let ping = Frame::new(0, Body::Ping(Vec::new()));
        stream.write(|codec, out| codec.encode_frame(&ping, out));
        while let Some(event) = stream.read_or_write(true).now_or_never() {
            assert_eq!(event.unwrap(), IoEvent::Written);
            assert!(unprocessed_input.is_set(), "bytes may have arrived during the write");
        }
        assert!(stream.is_flushed() && !unprocessed_input.is_set());
    }
}
