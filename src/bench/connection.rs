//! The sockets of a load: a task a connection, in rounds of one read and one write.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Sleep, sleep};
use tokio_util::codec::Decoder;

use super::schedule::Schedule;
use super::shared::{Counters, Stopwatch};
use super::traffic::{Goal, Traffic, WRITE_AHEAD};
use crate::client::Greeted;
use crate::protocol::frame::{Body, Frame};
use crate::protocol::{Codec, Decoded};
use crate::ticker::precise_timer::PreciseTimer;

/// How long an answer may take. A server whose store is away holds DelMsgs, and answers them when it is back.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes that are read at once. The longest answer, to a DelMsg of 32,768 messages, fits twice.
const READ_LENGTH: usize = 128 * 1024;

/// Where the whole load stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Connections are made.
    Connect,
    /// The wheel is filled.
    Fill,
    /// It is measured, between these times in ns since the load began.
    Measure { from: u64, until: u64 },
    /// Messages in flight are deleted.
    Clean,
    /// It is over.
    Done,
}

/// A connection has done what the phase asks for, or can no longer.
pub(super) type Arrival = Result<Counters, String>;

/// One connection that carries load.
pub(super) struct Connection {
    reader: Box<dyn AsyncRead + Send + Unpin>,
    writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// The bytes that were read; the first `filled` are not yet decoded.
    input: Box<[u8]>,
    filled: usize,
    /// The bytes to write, from `written` on.
    output: Vec<u8>,
    written: usize,
    traffic: Traffic,
    stopwatch: Stopwatch,
    /// Rings when requests are due.
    timer: PreciseTimer,
    /// From one ringing to the next, in ns; 0 while there is no schedule.
    period: u64,
    /// Comes at the latest when the server has been silent for too long.
    patience: Pin<Box<Sleep>>,
    heard_at: u64,
}

impl Connection {
    pub(super) fn new(greeted: Greeted, traffic: Traffic, stopwatch: Stopwatch) -> Connection {
        let now = stopwatch.now();
        let mut input = vec![0; READ_LENGTH.max(greeted.received.len())].into_boxed_slice();
        input[..greeted.received.len()].copy_from_slice(&greeted.received);
        Connection {
            reader: greeted.reader,
            writer: greeted.writer,
            filled: greeted.received.len(),
            input,
            output: Vec::with_capacity(READ_LENGTH),
            written: 0,
            traffic,
            timer: PreciseTimer::precise(),
            period: 0,
            patience: Box::pin(sleep(PATIENCE)),
            stopwatch,
            heard_at: now,
        }
    }

    /// Does what each phase asks for, and says so, until the load is over. `schedule` makes the schedule of a fixed rate
    /// that begins at a time.
    pub(super) async fn serve(
        mut self,
        mut phases: watch::Receiver<Phase>,
        arrivals: mpsc::UnboundedSender<Arrival>,
        schedule: impl Fn(u64) -> Option<Schedule>,
    ) {
        loop {
            let (goal, schedule) = match *phases.borrow_and_update() {
                Phase::Connect => (Goal::Rest, None),
                Phase::Fill => (Goal::Fill, None),
                Phase::Measure { from, until } => (Goal::Steady { until }, schedule(from)),
                Phase::Clean => (Goal::Clean, None),
                Phase::Done => return,
            };
            self.traffic.set_goal(goal, schedule);
            self.start_timer(schedule);
            let outcome = self.work().await.map(|()| self.traffic.counters());
            let lost = outcome.is_err();
            // The coordinator may have ended.
            if arrivals.send(outcome).is_err() || lost {
                return;
            }
            self.traffic.set_goal(Goal::Rest, None);
            tokio::select! {
                changed = phases.changed() => if changed.is_err() { return },
                Err(error) = self.rest() => {
                    let _ = arrivals.send(Err(error));
                    return;
                }
            }
        }
    }

    /// Asks and is answered, until what is to be done is done.
    async fn work(&mut self) -> Result<(), String> {
        loop {
            let now = self.stopwatch.now();
            if self.traffic.is_done(now) {
                self.traffic.count_missed(now);
                return Ok(());
            }
            self.traffic.requests(now, &mut self.output);
            self.exchanged().await?;
            self.answers()?;
        }
    }

    /// Answers the server's Pings, without end.
    async fn rest(&mut self) -> Result<(), String> {
        loop {
            self.exchanged().await?;
            self.answers()?;
        }
    }

    fn answers(&mut self) -> Result<(), String> {
        let now = self.stopwatch.now();
        let taken = self.traffic.answers(&self.input[..self.filled], now, &mut self.output)?;
        self.input.copy_within(taken..self.filled, 0);
        self.filled -= taken;
        Ok(())
    }

    /// Sets the timer to the times at which requests are due.
    fn start_timer(&mut self, schedule: Option<Schedule>) {
        let Some(schedule) = schedule else { return self.period = 0 };
        self.period = schedule.period();
        let first = self.stopwatch.moment(schedule.next());
        let now = self.stopwatch.moment(self.stopwatch.now());
        self.timer.set_every(now, first, Duration::from_nanos(self.period));
    }

    /// Writes what waits and reads something, or comes back when there is room for more requests.
    async fn exchanged(&mut self) -> Result<(), String> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), String>> {
        let was_full = self.output.len() >= WRITE_AHEAD;
        let written = self.poll_write(context)?;
        if self.poll_read(context)?.is_ready() || (was_full && written.is_ready()) {
            return Poll::Ready(Ok(()));
        }
        if self.period > 0 && self.timer.poll(context).is_ready() {
            return Poll::Ready(Ok(()));
        }
        ready!(self.patience.as_mut().poll(context));
        let silent = Duration::from_nanos(self.stopwatch.now() - self.heard_at);
        if silent >= PATIENCE && self.traffic.is_waiting() {
            return Poll::Ready(Err(format!("the server answered nothing for {silent:.0?}")));
        }
        let left = PATIENCE.saturating_sub(silent).max(PATIENCE / 2);
        self.patience.set(sleep(left));
        Poll::Ready(Ok(()))
    }

    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<Result<(), String>> {
        while self.written < self.output.len() {
            let written = Pin::new(&mut self.writer).poll_write(context, &self.output[self.written..]);
            self.written += match ready!(written).map_err(|error| lost(&error))? {
                0 => return Poll::Ready(Err("the connection takes no more bytes".to_owned())),
                count => count,
            };
        }
        self.output.clear();
        self.written = 0;
        // TLS may hold bytes back.
        Pin::new(&mut self.writer).poll_flush(context).map_err(|error| lost(&error))
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<(), String>> {
        let mut room = ReadBuf::new(&mut self.input[self.filled..]);
        ready!(Pin::new(&mut self.reader).poll_read(context, &mut room)).map_err(|error| lost(&error))?;
        match room.filled().len() {
            0 => Poll::Ready(Err("the server closed the connection".to_owned())),
            count => {
                self.filled += count;
                self.heard_at = self.stopwatch.now();
                Poll::Ready(Ok(()))
            }
        }
    }
}

fn lost(error: &std::io::Error) -> String {
    format!("a connection was lost: {error}")
}

/// A connection that only answers Pings; returns why it ended.
pub(super) async fn idle(mut greeted: Greeted) -> String {
    let codec = &mut Codec::default();
    let (mut received, mut out) = (BytesMut::from(&greeted.received[..]), BytesMut::new());
    loop {
        match codec.decode(&mut received) {
            Ok(Some(Decoded::Frame(Frame { correlation, body: Body::Ping(payload) }))) => {
                codec.encode_frame(&Frame::new(correlation, Body::Pong(payload)), &mut out);
            }
            Ok(Some(Decoded::Frame(Frame { body: Body::Error(error), .. }))) => return error.text,
            Ok(Some(_)) => {}
            Ok(None) => {
                let written = async {
                    greeted.writer.write_all_buf(&mut out).await?;
                    greeted.writer.flush().await
                };
                if let Err(error) = written.await {
                    return lost(&error);
                }
                match greeted.reader.read_buf(&mut received).await {
                    Ok(0) => return "the server closed the connection".to_owned(),
                    Ok(_) => {}
                    Err(error) => return lost(&error),
                }
            }
            Err(error) => return error.to_string(),
        }
    }
}
