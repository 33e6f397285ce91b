//! Serves one connection from the end of its handshake until it is closed or lost.
//!
//! One task reads and writes the socket. It writes all waiting requests together (up to [`WRITE_AHEAD`] bytes), and
//! passes each answer to its caller. Before the task lets a request time out, or gives up a silent server, it reads the
//! socket: the answer may have arrived. See [`Connection::timer_fired`].

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::error::ClientError;
use super::handshake::{Dialer, FIRST_REQUEST, Incoming, OpenConnection, Outgoing, SUBSCRIBE};
use super::keep_alive::{Action, KeepAlive};
use super::pending_requests::PendingRequests;
use super::received_batches::{AckState, DeliverOutcome, ReceivedBatches};
use crate::core::{BatchId, CLOCK_BEAT, Reason, SHORTEST_STALL};
use crate::protocol::frame::{Body, Frame, GoAwayReason};
use crate::protocol::{Codec, DecodeError, Decoded};

/// The maximum number of encoded bytes that wait to be written. At this limit, the task encodes no more requests until
/// some bytes are written. A single request may exceed the limit.
const WRITE_AHEAD: usize = 256 * 1024;

/// The maximum number of bytes that wait to be written when a Ping arrives. With more bytes, the connection fails: the
/// server sends Pings and does not read the Pongs.
const MAX_UNWRITTEN: usize = 4 * 1024 * 1024;

/// The maximum number of reads before requests time out. Without a maximum, a server that sends constantly could keep
/// requests from timing out.
const READS_BEFORE_EXPIRY: usize = 64;

/// The time limit, in ms, for closing a connection with GoAway, the frame that announces the end.
const GOODBYE_MS: u32 = 1_000;

/// The delay, in ms, before the server may redeliver a batch that this subscriber returned for lack of room. Other
/// subscribers can get the batch at once.
const RETURN_DELAY_MS: u32 = 5_000;

/// A connection that is being served.
struct Connection<'a> {
    dialer: &'a Dialer,
    requests: &'a mut PendingRequests,
    received: Option<&'a ReceivedBatches>,
    incoming: Incoming,
    outgoing: Outgoing,
    keep_alive: KeepAlive,
    timer: Pin<Box<Sleep>>,
    /// Whether the timer last fired so late that the timeouts of requests were postponed.
    is_postponed: bool,
    /// The reason that the server gave for the end of the connection, if it gave one.
    farewell: Option<String>,
    /// The batches of each acknowledgement that was sent again, by the correlation id of the request. No caller waits
    /// for the answers.
    repeated: HashMap<u32, Vec<BatchId>>,
}

/// Serves a connection until no caller needs it or the connection is lost. After a loss, fails the requests in flight
/// (encoded, but not answered) and returns the cause. Requests that are not encoded yet wait for the next connection.
pub(super) async fn serve(
    open: OpenConnection,
    dialer: &Dialer,
    requests: &mut PendingRequests,
    received: Option<&ReceivedBatches>,
) -> Result<(), Arc<str>> {
    let keep_alive = KeepAlive::new(open.welcome.ping_interval_ms, Instant::now());
    let mut connection = Connection {
        dialer,
        requests,
        received,
        incoming: open.incoming,
        outgoing: open.outgoing,
        timer: Box::pin(sleep_until(keep_alive.next_check())),
        keep_alive,
        is_postponed: false,
        farewell: None,
        repeated: HashMap::new(),
    };
    let Err(error) = connection.work().await else {
        // A failure here changes nothing for the callers.
        let _ = timeout(Duration::from_millis(GOODBYE_MS.into()), connection.say_goodbye()).await;
        return Ok(());
    };
    let farewell = connection.farewell.map(|farewell| format!("{farewell}; ")).unwrap_or_default();
    let cause: Arc<str> = format!("{farewell}{error}").into();
    let address = dialer.address.clone();
    requests.fail_in_flight(&ClientError::ConnectionLost { address, cause: Arc::clone(&cause) });
    Err(cause)
}

impl Connection<'_> {
    async fn work(&mut self) -> io::Result<()> {
        if let Some(received) = self.received {
            self.repeat_acks(received.unanswered());
        }
        // The first batches may have arrived together with the answer to Subscribe.
        self.decode()?;
        loop {
            // Do not send requests that have timed out: their callers learn that these requests were not applied.
            self.requests.expire_waiting(Instant::now(), None);
            while self.outgoing.bytes.len() < WRITE_AHEAD
                && let Some(Frame { correlation, body }) = self.requests.next_frame()
            {
                self.outgoing.encode(correlation, body);
            }
            if self.requests.is_done() {
                return Ok(());
            }
            self.advance_timer();
            // `select!` is not biased here: a constant stream of reads must not starve writes, nor the reverse.
            tokio::select! {
                written = self.outgoing.write(), if self.outgoing.has_unwritten() => if let Err(error) = written {
                    // The server may have sent answers and an Error before it closed the connection.
                    self.read_received().await?;
                    return Err(error);
                },
                read = self.incoming.read() => {
                    read?;
                    self.decode()?;
                    if self.received.is_some() {
                        // The caller that reads the subscription may share this thread. Let it take these batches
                        // before more are read.
                        tokio::task::yield_now().await;
                    }
                }
                () = self.requests.take(), if !self.requests.is_closed() => {}
                () = &mut self.timer => self.timer_fired().await?,
            }
        }
    }

    /// Decodes and handles all complete frames of the input.
    fn decode(&mut self) -> io::Result<()> {
        self.keep_alive.received(Instant::now());
        loop {
            match Codec::default().decode(&mut self.incoming.bytes) {
                Ok(Some(Decoded::Frame(frame))) => self.handle(frame)?,
                // Ignore frame types that only a later server knows.
                Ok(Some(Decoded::Refused { refusal, .. })) if refusal.reason == Reason::UnknownType => {}
                Ok(Some(Decoded::Refused { correlation, refusal })) => {
                    let address = &self.dialer.address;
                    let text = format!("{address} sent a frame that cannot be read: {}", refusal.text);
                    self.requests.answer(correlation, Err(ClientError::Protocol(text.clone())));
                    return Err(io::Error::other(text));
                }
                Ok(None) => return Ok(()),
                Err(DecodeError { refusal, .. }) => {
                    let text = format!("the server sent bytes that are no frame: {}", refusal.text);
                    return Err(io::Error::other(text));
                }
            }
        }
    }

    fn handle(&mut self, Frame { correlation, body }: Frame) -> io::Result<()> {
        match body {
            Body::Ping(_) if self.outgoing.bytes.len() > MAX_UNWRITTEN => {
                return Err(io::Error::other("the server sends Pings and does not read the Pongs"));
            }
            Body::Ping(payload) => self.outgoing.encode(correlation, Body::Pong(payload)),
            Body::GoAway { reason, .. } => {
                self.farewell = Some(match reason {
                    GoAwayReason::Draining => "the server is shutting down".to_owned(),
                    GoAwayReason::Done => "the server ends the connection".to_owned(),
                });
            }
            Body::TimeoutBatch(batch) if correlation == SUBSCRIBE && self.received.is_some() => {
                let id = batch.id;
                match self.received.map(|received| received.deliver(batch)) {
                    Some(DeliverOutcome::NoRoom) => {
                        self.send(Body::BatchNack { batch: id, delay_ms: RETURN_DELAY_MS });
                    }
                    Some(DeliverOutcome::Acknowledged(AckState::Unanswered)) => self.repeat_acks(vec![id]),
                    _ => {}
                }
            }
            Body::BatchAckAnswer { .. } if self.repeated.contains_key(&correlation) => {
                let settled = self.repeated.remove(&correlation).unwrap_or_default();
                self.received.iter().for_each(|received| received.settled(&settled));
            }
            Body::Error(error) => {
                if correlation < FIRST_REQUEST || error.reason().is_some_and(Reason::closes) {
                    self.farewell = Some(format!("the server said: {}", error.text));
                }
                // If the server refused a repeated acknowledgement, the client sends it again when the batch is
                // redelivered.
                self.repeated.remove(&correlation);
                self.requests.answer(correlation, Err(ClientError::Refused(error)));
            }
            body => {
                let frame = body.frame_type().as_str();
                if !self.requests.answer(correlation, Ok(body)) {
                    let text = format!("the server sent {frame} without being asked for it");
                    return Err(io::Error::other(text));
                }
            }
        }
        Ok(())
    }

    /// Sends a request whose answer no caller waits for. Returns its correlation id.
    fn send(&mut self, body: Body) -> u32 {
        let correlation = self.requests.next_correlation();
        self.outgoing.encode(correlation, body);
        correlation
    }

    /// Acknowledges batches again, because their earlier acknowledgement was not answered.
    fn repeat_acks(&mut self, batches: Vec<BatchId>) {
        if !batches.is_empty() {
            let correlation = self.send(Body::BatchAck(batches.clone()));
            self.repeated.insert(correlation, batches);
        }
    }

    /// Sets the timer to the deadline of the next request that times out, if the timer would fire later. Does nothing
    /// while timeouts are postponed. When the request is answered, the timer keeps its time: a needless wake-up is
    /// cheaper than a change with every answer.
    fn advance_timer(&mut self) {
        if let Some(deadline) = self.requests.next_deadline()
            && deadline < self.timer.deadline()
            && !self.is_postponed
        {
            self.timer.as_mut().reset(deadline);
        }
    }

    /// Fails requests that have timed out, and checks the keep-alive, which pings a silent server. If the timer fired
    /// more than [`SHORTEST_STALL`] late, this process was stalled. In this case, postpones the timeouts and the
    /// check by [`CLOCK_BEAT`], but not twice in a row. The delay lets the task first read data that arrived during the
    /// stall. After a stall, the server has one whole ping interval to answer.
    async fn timer_fired(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if now.saturating_duration_since(self.timer.deadline()) > SHORTEST_STALL {
            self.keep_alive.stalled(now);
            if !self.is_postponed {
                self.is_postponed = true;
                self.timer.as_mut().reset(now + CLOCK_BEAT);
                return Ok(());
            }
        }
        self.is_postponed = false;
        self.read_received().await?;
        let now = Instant::now();
        self.requests.expire_in_flight(now);
        self.requests.expire_waiting(now, None);
        match self.keep_alive.check(now) {
            Action::Wait => {}
            Action::Ping => {
                self.send(Body::Ping(Vec::new()));
            }
            Action::GiveUp(silent) => {
                return Err(io::Error::other(format!("nothing was heard of the server for {silent:?}")));
            }
        }
        self.timer.as_mut().reset(self.keep_alive.next_check());
        Ok(())
    }

    /// Reads and handles the bytes that are already in the socket, with at most [`READS_BEFORE_EXPIRY`] reads.
    async fn read_received(&mut self) -> io::Result<()> {
        for _ in 0..READS_BEFORE_EXPIRY {
            tokio::select! {
                biased;
                read = self.incoming.read() => read?,
                () = std::future::ready(()) => break,
            }
            self.decode()?;
        }
        Ok(())
    }

    /// Sends GoAway, closes the sending side, and waits until the server closes its side.
    async fn say_goodbye(&mut self) -> io::Result<()> {
        self.send(Body::GoAway { reason: GoAwayReason::Done, grace_ms: GOODBYE_MS });
        self.outgoing.write_all().await?;
        self.outgoing.writer.shutdown().await?;
        // Closing a socket with unread bytes would reset the connection. Then the server could lose frames that it has
        // not read yet.
        loop {
            self.incoming.bytes.clear();
            self.incoming.read().await?;
        }
    }
}
