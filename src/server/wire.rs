//! A connection's bytes: one buffer a direction, read and written together.
//!
//! Every read takes what is there, up to a bound; everything answered to it goes out in one write. Both
//! buffers are bounded: a peer that does not read what it asked for is not read from either.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_util::codec::Decoder;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::stream::Stream;
use crate::core::batch::{Delivery, MAX_BATCH_MESSAGES};
use crate::core::refusal::Refusal;
use crate::core::request_batch::{Outcome, Request, RequestBatch};
use crate::protocol::codec::Echoed;
use crate::protocol::frame::TIMED_OUT_LENGTH;
use crate::protocol::{Codec, DecodeError, Decoded, Frame};
use crate::ticker::read_barrier::Taking;

/// Bytes asked for in one read: more than a request batch of 256 single-id frames, and 4,000 ids at most.
pub(super) const READ_SIZE: usize = 32 * 1024;

/// An emptied buffer that has grown beyond this is given back. A batch fits: who subscribes gets one after the other.
const KEEP_CAPACITY: usize = 72 * 1024;

const _: () = assert!(MAX_BATCH_MESSAGES * TIMED_OUT_LENGTH + 1024 < KEEP_CAPACITY);

/// Bytes of a refused peer that are read and thrown away, so that it can read why it was refused.
const LINGER_BYTES: usize = 1024 * 1024;

/// What happened on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// So many bytes came.
    Read(usize),
    /// The peer will send no more.
    Ended,
    /// Bytes went out.
    Wrote,
    /// The peer takes nothing any more, but what it sent can still be read.
    Deaf,
}

impl Event {
    pub(super) fn bytes_read(self) -> usize {
        match self {
            Event::Read(count) => count,
            Event::Ended | Event::Wrote | Event::Deaf => 0,
        }
    }
}

thread_local! {
    /// Where all connections of a thread read into, so that one that is idle needs no room.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub(super) struct Wire {
    stream: Stream,
    taking: Taking,
    codec: Codec,
    input: BytesMut,
    /// As long as the input ever was: what was read from it no longer counts in its capacity.
    input_grown: usize,
    output: BytesMut,
    max_queued: usize,
    /// Whether the stream holds bytes back that were written to it, as TLS can.
    unflushed: bool,
    ended: bool,
    /// Whether the peer takes nothing any more. What it sent before still counts.
    deaf: bool,
}

impl Wire {
    pub(super) fn new(stream: Stream, taking: Taking, codec: Codec, max_queued: usize) -> Wire {
        let (input, output) = (BytesMut::new(), BytesMut::new());
        Wire {
            stream,
            taking,
            codec,
            input,
            input_grown: 0,
            output,
            max_queued,
            unflushed: false,
            ended: false,
            deaf: false,
        }
    }

    /// Accepts frames whose length says at most this, from the next one on.
    pub(super) fn accept_frames_of(&mut self, max_length: u32) {
        self.codec = Codec::new(max_length);
    }

    /// Whether the peer takes nothing any more.
    pub(super) fn is_deaf(&self) -> bool {
        self.deaf
    }

    /// Queues a frame.
    pub(super) fn send(&mut self, frame: &Frame) {
        if !self.deaf {
            self.codec.encode_frame(frame, &mut self.output);
        }
    }

    /// Queues an Error.
    pub(super) fn send_refusal(&mut self, correlation: u32, refusal: &Refusal) {
        if !self.deaf {
            self.codec.encode_refusal(correlation, refusal, &mut self.output);
        }
    }

    /// Queues a batch for a subscriber.
    pub(super) fn send_delivery(&mut self, correlation: u32, delivery: &Delivery) {
        if !self.deaf {
            self.codec.encode_delivery(correlation, delivery, &mut self.output);
        }
    }

    /// Answers the Pings at the front of what was read, and passes over the Pongs.
    pub(super) fn echo_pings(&mut self) -> Echoed {
        let before = self.output.len();
        let echoed = self.codec.echo_pings(&self.input, &mut self.output);
        self.input.advance(echoed.bytes);
        if self.deaf {
            self.output.truncate(before);
        }
        echoed
    }

    /// Moves requests from the front of what was read into a request batch, until it has `most` messages.
    pub(super) fn take_requests(&mut self, batch: &mut RequestBatch, most: usize, revolution: u16) {
        let taken = self.codec.take_requests(&self.input, batch, most, revolution);
        self.input.advance(taken);
    }

    /// Queues the answer to a request of a batch.
    pub(super) fn answer(&mut self, request: &Request, outcomes: &[Outcome]) {
        if !self.deaf {
            self.codec.encode_answer(request, outcomes, &mut self.output);
        }
    }

    /// The next frame of what was read.
    pub(super) fn decode(&mut self) -> Result<Option<Decoded>, DecodeError> {
        let decoded = self.codec.decode(&mut self.input)?;
        if decoded.is_none() && self.input.is_empty() && self.input_grown > KEEP_CAPACITY {
            (self.input, self.input_grown) = (BytesMut::new(), 0);
        }
        Ok(decoded)
    }

    /// Whether more may be queued.
    pub(super) fn has_room(&self) -> bool {
        self.output.len() < self.max_queued
    }

    /// Whether a batch may be queued. They have half of the queue: a peer that does not read them for a while can go on
    /// asking, and its Acks are heard.
    pub(super) fn has_room_for_batches(&self) -> bool {
        self.output.len() < self.max_queued.div_ceil(2)
    }

    /// Whether everything queued went out.
    pub(super) fn is_flushed(&self) -> bool {
        self.output.is_empty() && !self.unflushed
    }

    /// Whether bytes of the peer wait in the socket, and may be read.
    pub(super) fn has_unread(&self) -> bool {
        !self.ended && self.has_room() && self.stream.has_unread()
    }

    /// The most that can wait in the socket.
    pub(super) fn most_waiting(&self) -> usize {
        self.stream.receive_buffer().max(READ_SIZE)
    }

    /// Reads or writes, whichever can be done first. Cancel-safe.
    pub(super) async fn progress(&mut self, read: bool) -> io::Result<Event> {
        poll_fn(|context| self.poll_progress(context, read)).await
    }

    /// Reads what waits in the socket; returns at once when nothing does any more, or nothing may be read.
    pub(super) async fn read_waiting(&mut self) -> io::Result<Option<Event>> {
        if self.ended || !self.has_room() {
            return Ok(None);
        }
        poll_fn(|context| match self.poll_read(context) {
            Poll::Pending if !self.has_unread() => Poll::Ready(Ok(None)),
            read => read.map_ok(Some),
        })
        .await
    }

    fn poll_progress(&mut self, context: &mut Context<'_>, read: bool) -> Poll<io::Result<Event>> {
        match self.poll_write(context) {
            Poll::Ready(Ok(true)) => return Poll::Ready(Ok(Event::Wrote)),
            Poll::Ready(Ok(false)) | Poll::Pending => {}
            Poll::Ready(Err(_)) => {
                // The peer is gone, but what it had sent may still wait to be read.
                self.deaf = true;
                self.unflushed = false;
                self.output = BytesMut::new();
                return Poll::Ready(Ok(Event::Deaf));
            }
        }
        if read && !self.ended && self.has_room() { self.poll_read(context) } else { Poll::Pending }
    }

    /// Writes what is queued; whether anything went out.
    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if !self.is_flushed() {
            self.taking.begin();
        }
        if !self.output.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.output))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unflushed = true;
            self.wrote(written);
            return Poll::Ready(Ok(true));
        }
        let flushed = self.unflushed;
        if flushed {
            ready!(Pin::new(&mut self.stream).poll_flush(context))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(flushed))
    }

    /// Whoever reads deals with what came before it reads again.
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Event>> {
        self.taking.begin();
        let event = self.poll_read_some(context);
        if event.is_pending() {
            self.taking.end();
        }
        event
    }

    fn poll_read_some(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Event>> {
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize(READ_SIZE, 0);
            let mut buffer = ReadBuf::new(scratch);
            ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer))?;
            let read = buffer.filled();
            if read.is_empty() {
                self.ended = true;
                return Poll::Ready(Ok(Event::Ended));
            }
            self.input.extend_from_slice(read);
            self.input_grown = self.input_grown.max(self.input.len());
            Poll::Ready(Ok(Event::Read(read.len())))
        })
    }

    fn wrote(&mut self, written: usize) {
        if written < self.output.len() {
            let _ = self.output.split_to(written);
        } else if self.output.capacity() > KEEP_CAPACITY {
            self.output = BytesMut::new();
        } else {
            self.output.clear();
        }
    }

    /// Says all that is queued, then good-bye, and drops `unanswered`; then waits for the peer's: closing with unread
    /// bytes in the socket would take back what was said last.
    pub(super) async fn close(mut self, unanswered: TaskTrackerToken) {
        while !self.is_flushed() && !self.deaf {
            if self.progress(false).await.is_err() {
                return;
            }
        }
        if self.stream.shutdown().await.is_err() {
            return;
        }
        drop(unanswered);
        let mut thrown_away = 0;
        let mut scratch = vec![0; 4096];
        while thrown_away < LINGER_BYTES {
            match self.stream.read(&mut scratch).await {
                Ok(count @ 1..) => thrown_away += count,
                Ok(0) | Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::net::UnixStream;

    use super::*;
    use crate::protocol::frame::{Body, MAX_GREETING_LENGTH};
    use crate::ticker::read_barrier::ReadBarrier;

    #[tokio::test]
    async fn whoever_reads_or_writes_says_so_until_there_is_nothing_to_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let member = ReadBarrier::new().join(None);
        let taking = member.taking();
        let mut wire = Wire::new(Stream::Unix(ours), taking.clone(), Codec::new(MAX_GREETING_LENGTH), 1_024);
        assert!(wire.progress(true).now_or_never().is_none());
        assert!(!taking.is_under_way());

        theirs.write_all(b"x").await.unwrap();
        assert_eq!(wire.progress(true).await.unwrap(), Event::Read(1));
        assert!(taking.is_under_way(), "what was read is not dealt with yet");
        assert!(wire.progress(true).now_or_never().is_none());
        assert!(!taking.is_under_way());

        wire.send(&Frame::new(0, Body::Ping(Vec::new())));
        while let Some(event) = wire.progress(true).now_or_never() {
            assert_eq!(event.unwrap(), Event::Wrote);
            assert!(taking.is_under_way(), "what came while it was written is not seen yet");
        }
        assert!(wire.is_flushed() && !taking.is_under_way());
    }
}
