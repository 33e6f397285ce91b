//! One connection, from the moment it is ready for requests to its end.
//!
//! One task reads and writes: whatever waits is encoded together and written at once, whatever was read is
//! handed to who asked. Nobody is judged late or silent before the socket was read: see [`Connection::judge`].

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::address::Address;
use super::error::ClientError;
use super::handshake::{Established, FIRST_REQUEST, SUBSCRIBE, Stream};
use super::in_flight::{Answered, InFlight};
use super::inbox::{Arrived, Inbox};
use super::link::Lane;
use super::silence::{Silence, Verdict};
use crate::core::batch::BatchId;
use crate::core::refusal::Reason;
use crate::core::stall_aware_clock::{BEAT, STALL};
use crate::protocol::frame::{BatchNack, Body, Error, Frame, FrameType, GoAway, GoAwayReason};
use crate::protocol::{DecodeError, Decoded};

/// Requests are encoded up to this many bytes ahead of what the server takes.
const WRITE_AHEAD: usize = 256 * 1024;

/// Beyond this the server asks for answers and does not read them.
const MAX_UNWRITTEN: usize = 4 * 1024 * 1024;

/// How often the socket is read, at most, before somebody is judged.
const READS_BEFORE_JUDGING: usize = 64;

/// How long saying goodbye may take.
const GOODBYE_MS: u32 = 1_000;

/// For how long a batch is not wanted that there was no room for. Others may have it at once.
const GIVEN_BACK_FOR_MS: u32 = 5_000;

/// How a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// Nobody needs it any more.
    Closed,
    /// It was lost, for this reason.
    Lost(Arc<str>),
}

/// Why it is of no more use.
struct Lost(String);

impl From<std::io::Error> for Lost {
    fn from(error: std::io::Error) -> Lost {
        Lost(error.to_string())
    }
}

/// A connection at work.
pub(super) struct Connection {
    address: Address,
    request_timeout: Duration,
    stream: Stream,
    out: BytesMut,
    inbox: Option<Arc<Inbox>>,
    in_flight: InFlight,
    silence: Silence,
    timer: Pin<Box<Sleep>>,
    /// Whether the last alarm rang too late to judge.
    spared: bool,
    /// The reason that the server gave for the end, before it came.
    farewell: Option<String>,
    /// Acknowledgements that nobody waits for, by their correlation ids: those that are repeated.
    repeated: HashMap<u32, Vec<BatchId>>,
}

impl Connection {
    pub(super) fn new(
        established: Established,
        address: Address,
        request_timeout: Duration,
        inbox: Option<Arc<Inbox>>,
    ) -> Connection {
        let silence = Silence::new(established.welcome.ping_interval_ms, Instant::now());
        Connection {
            in_flight: InFlight::new(address.clone(), FIRST_REQUEST),
            address,
            request_timeout,
            stream: established.stream,
            out: BytesMut::new(),
            inbox,
            timer: Box::pin(sleep_until(silence.next())),
            silence,
            spared: false,
            farewell: None,
            repeated: HashMap::new(),
        }
    }

    /// Serves until the end. Requests in flight then have failed; requests in the queue still wait.
    pub(super) async fn serve(mut self, lane: &mut Lane) -> End {
        match self.work(lane).await {
            Ok(()) => {
                // Only courtesy is lost if that fails.
                let _ = timeout(Duration::from_millis(GOODBYE_MS.into()), self.say_goodbye()).await;
                End::Closed
            }
            Err(Lost(cause)) => {
                let cause: Arc<str> = match self.farewell.take() {
                    Some(farewell) => format!("{farewell}; {cause}").into(),
                    None => cause.into(),
                };
                let address = self.address.clone();
                self.in_flight.fail_all(&ClientError::ConnectionLost { address, cause: Arc::clone(&cause) });
                End::Lost(cause)
            }
        }
    }

    async fn work(&mut self, lane: &mut Lane) -> Result<(), Lost> {
        if let Some(inbox) = self.inbox.clone() {
            self.acknowledge_again(inbox.unanswered());
        }
        // The first batches may have come with the answer to Subscribe.
        self.decode()?;
        loop {
            if !lane.is_empty() {
                // A request whose caller has given up is not sent: so the caller knows that it was not applied.
                lane.fail_expired(Instant::now(), || self.timed_out_unsent());
                self.encode_waiting(lane);
            }
            if lane.is_closed() && lane.is_empty() && self.in_flight.is_idle() {
                return Ok(());
            }
            self.ring_no_later_than(lane);
            let writing = !self.out.is_empty() || !self.stream.outgoing.is_flushed();
            // Not biased: neither much to read nor much to write may starve the other.
            tokio::select! {
                written = self.stream.outgoing.write(&mut self.out), if writing => if let Err(error) = written {
                    // The server may have answered, and said why, before it closed.
                    self.read_what_waits().await?;
                    return Err(error.into());
                },
                read = self.stream.incoming.read() => {
                    read?;
                    self.decode()?;
                    if self.inbox.is_some() {
                        // Its reader, perhaps on this thread, has what came before more is read.
                        tokio::task::yield_now().await;
                    }
                }
                () = lane.take(), if !lane.is_closed() => {}
                () = &mut self.timer => self.ring(lane).await?,
            }
        }
    }

    fn encode_waiting(&mut self, lane: &mut Lane) {
        while self.out.len() < WRITE_AHEAD {
            let Some(request) = lane.next() else { break };
            let frame = self.in_flight.write(request);
            self.stream.codec.encode_frame(&frame, &mut self.out);
        }
    }

    /// Decodes and handles all whole frames of the input.
    fn decode(&mut self) -> Result<(), Lost> {
        self.silence.broken(Instant::now());
        loop {
            match self.stream.codec.decode(&mut self.stream.incoming.bytes) {
                Ok(Some(Decoded::Frame(frame))) => self.handle(frame)?,
                // A later server may have types that this client does not know and did not ask for.
                Ok(Some(Decoded::Refused { refusal, .. })) if refusal.reason == Reason::UnknownType => {}
                Ok(Some(Decoded::Refused { correlation, refusal })) => {
                    let text = format!("{} sent a frame that cannot be read: {}", self.address, refusal.text);
                    self.in_flight.fail(correlation, ClientError::Protocol(text.clone()));
                    return Err(Lost(text));
                }
                Ok(None) => return Ok(()),
                Err(DecodeError { refusal, .. }) => {
                    return Err(Lost(format!("the server sent bytes that are no frame: {}", refusal.text)));
                }
            }
        }
    }

    fn handle(&mut self, frame: Frame) -> Result<(), Lost> {
        let Frame { correlation, body } = frame;
        match body {
            Body::Ping(payload) => {
                if self.out.len() > MAX_UNWRITTEN {
                    return Err(Lost("the server asks for signs of life and does not read them".to_owned()));
                }
                self.stream.codec.encode_frame(&Frame::new(correlation, Body::Pong(payload)), &mut self.out);
                Ok(())
            }
            Body::GoAway(GoAway { reason, .. }) => {
                self.farewell = Some(match reason {
                    GoAwayReason::Draining => "the server is shutting down".to_owned(),
                    GoAwayReason::Done => "the server ends the connection".to_owned(),
                });
                Ok(())
            }
            Body::TimeoutBatch(batch) if self.is_subscription(correlation) => {
                let id = batch.id;
                match self.inbox.as_ref().map(|inbox| inbox.deliver(batch)) {
                    Some(Arrived::NoRoom) => self.give_back(id),
                    Some(Arrived::Unanswered) => self.acknowledge_again(vec![id]),
                    Some(Arrived::Kept | Arrived::Acknowledged) | None => {}
                }
                Ok(())
            }
            Body::Error(error) => {
                self.refused(correlation, error);
                Ok(())
            }
            Body::BatchAckAnswer { .. } if self.repeated.contains_key(&correlation) => {
                let settled = self.repeated.remove(&correlation).unwrap_or_default();
                self.inbox.iter().for_each(|inbox| inbox.settled(&settled));
                Ok(())
            }
            body => {
                let frame_type = body.frame_type();
                match self.in_flight.answer(correlation, body) {
                    Answered::Delivered | Answered::TooLate => Ok(()),
                    // A sign of life all the same, or the answer for a batch that was given back.
                    Answered::Unasked if matches!(frame_type, FrameType::Pong | FrameType::BatchNackAnswer) => {
                        Ok(())
                    }
                    Answered::Unasked | Answered::Wrong => {
                        let frame = frame_type.as_str();
                        Err(Lost(format!("the server sent {frame} without being asked for it")))
                    }
                }
            }
        }
    }

    /// There was no room for a batch. Whatever is answered, it comes again.
    fn give_back(&mut self, batch: BatchId) {
        let body = Body::BatchNack(BatchNack { batch, delay_ms: GIVEN_BACK_FOR_MS });
        let frame = Frame::new(self.in_flight.next_correlation(), body);
        self.stream.codec.encode_frame(&frame, &mut self.out);
    }

    /// Acknowledges what its reader has dealt with, though nobody waits for the answer any more.
    fn acknowledge_again(&mut self, batches: Vec<BatchId>) {
        if batches.is_empty() {
            return;
        }
        let frame = Frame::new(self.in_flight.next_correlation(), Body::BatchAck(batches.clone()));
        self.stream.codec.encode_frame(&frame, &mut self.out);
        self.repeated.insert(frame.correlation, batches);
    }

    /// A refusal goes to who asked. It may also be the last word of the server.
    fn refused(&mut self, correlation: u32, error: Error) {
        if correlation < FIRST_REQUEST || error.reason().is_some_and(Reason::closes) {
            self.farewell = Some(format!("the server said: {}", error.text));
        }
        // The repeat was refused. There is another one when the batch is redelivered.
        self.repeated.remove(&correlation);
        self.in_flight.answer(correlation, Body::Error(error));
    }

    fn is_subscription(&self, correlation: u32) -> bool {
        self.inbox.is_some() && correlation == SUBSCRIBE
    }

    /// Moves the alarm forward where something is due before it. Where nothing is any more, it rings for
    /// nothing: that is cheaper than to move it with every answer.
    fn ring_no_later_than(&mut self, lane: &Lane) {
        let due = [self.in_flight.next_deadline(), lane.next_deadline()];
        if let Some(due) = due.into_iter().flatten().min()
            && due < self.timer.deadline()
            && !self.spared
        {
            self.timer.as_mut().reset(due);
        }
    }

    /// The alarm rang: judges, unless it rang so late that this process must have stood still. Then what
    /// came meanwhile has a moment to be read first, and the server's silence counts from anew.
    async fn ring(&mut self, lane: &mut Lane) -> Result<(), Lost> {
        let now = Instant::now();
        if now.saturating_duration_since(self.timer.deadline()) > STALL {
            self.silence.stalled(now);
            if !self.spared {
                self.spared = true;
                self.timer.as_mut().reset(now + BEAT);
                return Ok(());
            }
        }
        self.spared = false;
        self.read_what_waits().await?;
        self.judge(lane, Instant::now())?;
        self.timer.as_mut().reset(self.silence.next());
        Ok(())
    }

    /// Reads what is in the socket already, and a bounded amount of what comes meanwhile.
    async fn read_what_waits(&mut self) -> Result<(), Lost> {
        for _ in 0..READS_BEFORE_JUDGING {
            tokio::select! {
                biased;
                read = self.stream.incoming.read() => read?,
                () = std::future::ready(()) => break,
            }
            self.decode()?;
        }
        Ok(())
    }

    fn judge(&mut self, lane: &mut Lane, now: Instant) -> Result<(), Lost> {
        let (address, waited) = (&self.address, self.request_timeout);
        let written = || ClientError::Timeout { address: address.clone(), waited, written: true };
        self.in_flight.fail_expired(now, written);
        lane.fail_expired(now, || self.timed_out_unsent());
        match self.silence.judge(now) {
            Verdict::Wait => Ok(()),
            Verdict::Ask => {
                let ping = Frame::new(self.in_flight.next_correlation(), Body::Ping(Vec::new()));
                self.stream.codec.encode_frame(&ping, &mut self.out);
                Ok(())
            }
            Verdict::Lost(silent) => Err(Lost(format!("nothing was heard of the server for {silent:?}"))),
        }
    }

    /// Ends when the server has closed its side too.
    async fn say_goodbye(&mut self) -> std::io::Result<()> {
        let body = Body::GoAway(GoAway { reason: GoAwayReason::Done, grace_ms: GOODBYE_MS });
        let goodbye = Frame::new(self.in_flight.next_correlation(), body);
        self.stream.codec.encode_frame(&goodbye, &mut self.out);
        self.stream.outgoing.finish(&mut self.out).await?;
        // Closing with bytes unread would reset the connection, and the server might lose what it has of us.
        loop {
            self.stream.incoming.bytes.clear();
            self.stream.incoming.read().await?;
        }
    }

    fn timed_out_unsent(&self) -> ClientError {
        ClientError::Timeout { address: self.address.clone(), waited: self.request_timeout, written: false }
    }
}
