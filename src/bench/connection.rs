//! The connections of a load (one run of the bench). One task per connection works in rounds. In each round it writes
//! requests, reads bytes, and handles the answers in them.

use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::time::{Sleep, sleep};

use super::frames::{next_frame, unsolicited};
use super::load_state::{LoadState, Phase};
use super::records::Counters;
use super::schedule::Schedule;
use super::traffic::{Traffic, WRITE_AHEAD};
use crate::client::OpenConnection;
use crate::ticker::precise_timer::PreciseTimer;

/// The maximum time without bytes from the server while requests are unanswered. It is long, because a server whose
/// store is unreachable answers deletes only when the store is back.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// The number of bytes of buffer that are reserved for a read. The longest answer, to a DelMsg of 32,768 messages, has
/// less than a third of this length.
const READ_LENGTH: usize = 128 * 1024;

/// The report of a connection at the end of a phase of the load: its counters, or the error that ended the connection.
pub(super) type Arrival = Result<Counters, String>;

/// One connection that carries load.
pub(super) struct Connection {
    shared: Arc<LoadState>,
    number: usize,
    /// The socket, with the bytes that were read and are not decoded yet.
    socket: OpenConnection,
    /// The bytes to write. The first `written` bytes are already written.
    output: BytesMut,
    written: usize,
    traffic: Traffic,
    /// The timer that fires when requests are due.
    timer: PreciseTimer,
    /// The time from one firing of `timer` to the next, in ns; 0 if there is no schedule.
    period: u64,
    /// The timer that wakes the task to check how long the server has been silent.
    patience: Pin<Box<Sleep>>,
    heard_at: u64,
}

impl Connection {
    pub(super) fn new(socket: OpenConnection, shared: Arc<LoadState>, number: usize) -> Connection {
        Connection {
            socket,
            output: BytesMut::with_capacity(READ_LENGTH),
            written: 0,
            traffic: Traffic::new(Arc::clone(&shared), number, shared.options.share_of(number)),
            timer: PreciseTimer::precise(),
            period: 0,
            patience: Box::pin(sleep(PATIENCE)),
            heard_at: shared.now(),
            number,
            shared,
        }
    }

    /// Carries out each phase that `phases` announces. After each phase, sends the counters or an error to `arrivals`.
    /// Ends after the last phase or an error.
    pub(super) async fn serve(
        mut self,
        mut phases: watch::Receiver<Phase>,
        arrivals: mpsc::UnboundedSender<Arrival>,
    ) {
        loop {
            let phase = *phases.borrow_and_update();
            let schedule = match phase {
                Phase::Measure { from, .. } => self.shared.options.schedule(self.number, from),
                Phase::Done => return,
                _ => None,
            };
            self.traffic.start(phase, schedule);
            self.start_timer(schedule);
            let outcome = self.work().await.map(|()| self.traffic.counters());
            let lost = outcome.is_err();
            // Sending fails if the coordinator has ended.
            if arrivals.send(outcome).is_err() || lost {
                return;
            }
            self.traffic.start(Phase::Rest, None);
            tokio::select! {
                changed = phases.changed() => if changed.is_err() { return },
                Err(error) = self.rest() => {
                    let _ = arrivals.send(Err(error));
                    return;
                }
            }
        }
    }

    /// Makes requests and handles answers until the phase is done.
    async fn work(&mut self) -> Result<(), String> {
        loop {
            let now = self.shared.now();
            if self.traffic.is_done(now) {
                self.traffic.count_missed(now);
                return Ok(());
            }
            self.traffic.requests(now, &mut self.output);
            self.exchange().await?;
        }
    }

    /// Answers the server's Pings until the connection fails.
    async fn rest(&mut self) -> Result<Infallible, String> {
        loop {
            self.exchange().await?;
        }
    }

    /// Sets the timer to fire whenever the schedule says that requests are due. Turns the timer off if there is no
    /// schedule.
    fn start_timer(&mut self, schedule: Option<Schedule>) {
        let Some(schedule) = schedule else { return self.period = 0 };
        self.period = schedule.period();
        let first = self.shared.moment(schedule.due_at);
        let now = self.shared.moment(self.shared.now());
        self.timer.set_every(now, first, Duration::from_nanos(self.period));
    }

    /// Writes requests and handles answers. Returns after a read, when more requests can be made, or after a check of
    /// how long the server has been silent.
    async fn exchange(&mut self) -> Result<(), String> {
        std::future::poll_fn(|context| self.poll(context)).await?;
        let taken = self.traffic.answers(&self.socket.incoming.bytes, self.shared.now(), &mut self.output)?;
        // Move the bytes that are not decoded yet to the front of the buffer. If each round read into new memory
        // instead, the rounds would use more memory than fits into the caches.
        self.socket.incoming.bytes.copy_within(taken.., 0);
        self.socket.incoming.bytes.truncate(self.socket.incoming.bytes.len() - taken);
        Ok(())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), String>> {
        let was_full = self.output.len() >= WRITE_AHEAD;
        let written = self.poll_write(context).map_err(|error| lost(&error))?;
        if self.poll_read(context).map_err(|error| lost(&error))?.is_ready() || (was_full && written.is_ready()) {
            return Poll::Ready(Ok(()));
        }
        if self.period > 0 && self.timer.poll(context).is_ready() {
            return Poll::Ready(Ok(()));
        }
        ready!(self.patience.as_mut().poll(context));
        let silent = Duration::from_nanos(self.shared.now() - self.heard_at);
        if silent >= PATIENCE && self.traffic.is_waiting() {
            return Poll::Ready(Err(format!("the server answered nothing for {silent:.0?}")));
        }
        let left = PATIENCE.saturating_sub(silent).max(PATIENCE / 2);
        self.patience.set(sleep(left));
        Poll::Ready(Ok(()))
    }

    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let writer = &mut self.socket.outgoing.writer;
        while self.written < self.output.len() {
            match ready!(pin!(writer.write(&self.output[self.written..])).poll(context))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.written += count,
            }
        }
        self.output.clear();
        self.written = 0;
        // TLS may still buffer written bytes.
        pin!(writer.flush()).poll(context)
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let incoming = &mut self.socket.incoming;
        incoming.bytes.reserve(READ_LENGTH);
        if ready!(pin!(incoming.reader.read_buf(&mut incoming.bytes)).poll(context))? == 0 {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed it")));
        }
        self.heard_at = self.shared.now();
        Poll::Ready(Ok(()))
    }
}

fn lost(error: &io::Error) -> String {
    format!("a connection was lost: {error}")
}

/// Answers the server's Pings on a connection without load. Records an error if the connection ends.
pub(super) async fn idle(mut socket: OpenConnection, shared: Arc<LoadState>) {
    let Err(cause) = answer_pings(&mut socket).await;
    shared.errors.record(format!("an idle connection ended: {cause}"));
}

async fn answer_pings(socket: &mut OpenConnection) -> Result<Infallible, String> {
    let OpenConnection { incoming, outgoing, .. } = socket;
    loop {
        while let Some(frame) = next_frame(&incoming.bytes)? {
            let length = frame.len();
            unsolicited(frame, &mut outgoing.bytes)?;
            incoming.bytes.advance(length);
        }
        let exchanged = async {
            outgoing.write_all().await?;
            incoming.read().await
        };
        exchanged.await.map_err(|error| lost(&error))?;
    }
}
