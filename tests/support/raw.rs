//! A connection that speaks bytes.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use super::PATIENCE;
use super::frames::{self, Frame, Request, u32_at, u64_at};

/// A timeout batch as it came.
#[derive(Clone, Debug)]
pub struct Batch {
    pub id: [u8; 24],
    pub tick: u64,
    pub epoch: u64,
    pub delivery: u32,
    pub age_ms: u64,
    pub added: u64,
    pub acked: u64,
    pub last: bool,
    pub storm: bool,
    pub drained: bool,
    pub messages: Vec<(u64, u64)>,
    pub attempts: Vec<u8>,
    pub arrived: Instant,
}

impl Batch {
    pub fn of(frame: &Frame) -> Batch {
        let body = &frame.body;
        assert_eq!((frame.flags & !7, frame.status), (0, 0), "{frame:?}");
        let count = u32_at(body, 52) as usize;
        assert_eq!(body.len(), 56 + 17 * count, "{frame:?}");
        let number = |list: usize, index: usize| u64_at(body, 56 + 8 * (list * count + index));
        Batch {
            id: body[..24].try_into().expect("24 bytes"),
            epoch: u64_at(body, 8),
            tick: u64_at(body, 16),
            delivery: u32_at(body, 24),
            age_ms: u64_at(body, 28),
            added: u64_at(body, 36),
            acked: u64_at(body, 44),
            last: frame.flags & 1 != 0,
            storm: frame.flags & 2 != 0,
            drained: frame.flags & 4 != 0,
            messages: (0..count).map(|index| (number(0, index), number(1, index))).collect(),
            attempts: body[56 + 16 * count..].to_vec(),
            arrived: Instant::now(),
        }
    }

    /// The ids of its messages, in order.
    pub fn ids(&self) -> Vec<u64> {
        let mut ids: Vec<u64> = self.messages.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection. Pings are answered whenever something else is waited for; batches wait until they are asked for.
pub struct Raw {
    stream: Stream,
    input: Vec<u8>,
    correlation: u32,
    batches: VecDeque<Batch>,
    /// GoAways that came.
    pub went_away: Vec<Frame>,
}

impl Raw {
    /// Takes nothing more, but goes on speaking.
    pub fn close_ears(&self) {
        match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Read),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Read),
        }
        .expect("the connection is open");
    }

    /// Ends the connection as a machine does that has lost it.
    pub fn reset(self) {
        let Stream::Tcp(stream) = &self.stream else { panic!("only TCP can be reset") };
        socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO)).expect("it is a socket");
    }

    /// A TCP connection that has not said Hello.
    pub fn tcp(address: SocketAddr) -> Raw {
        let stream = TcpStream::connect(address).expect("the sidecar accepts");
        stream.set_nodelay(true).expect("TCP can do without delay");
        Raw::over(Stream::Tcp(stream))
    }

    /// A TCP connection made elsewhere.
    pub fn over_tcp(stream: TcpStream) -> Raw {
        Raw::over(Stream::Tcp(stream))
    }

    /// A connection over a Unix socket that has not said Hello.
    pub fn unix(path: &Path) -> Raw {
        Raw::over(Stream::Unix(UnixStream::connect(path).expect("the sidecar accepts")))
    }

    fn over(stream: Stream) -> Raw {
        Raw { stream, input: Vec::new(), correlation: 0, batches: VecDeque::new(), went_away: Vec::new() }
    }

    /// A TCP connection that has said Hello.
    pub fn greeted(address: SocketAddr) -> Raw {
        Raw::tcp(address).greet()
    }

    /// Says Hello without a token.
    pub fn greet(mut self) -> Raw {
        let welcome = self.ask(&frames::hello((1, 1), b""));
        assert_eq!(welcome.kind, frames::WELCOME, "{welcome:?}");
        self
    }

    /// Subscribes to a group with credit for all.
    pub fn subscribed(self, group: &str) -> Raw {
        self.subscribed_with(&frames::subscribe(group, 1_000_000, 0))
    }

    pub fn subscribed_with(mut self, request: &Request) -> Raw {
        let answer = self.ask(request);
        assert_eq!(answer.kind, frames::SUBSCRIBED, "{answer:?}");
        self
    }

    /// Sends bytes. A peer that has closed is no error here: its last frames are read later.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.try_send(bytes);
    }

    pub fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.stream {
            Stream::Tcp(stream) => stream.write_all(bytes),
            Stream::Unix(stream) => stream.write_all(bytes),
        }
    }

    /// Sends a request; returns its correlation id.
    pub fn request(&mut self, request: &Request) -> u32 {
        self.correlation += 1;
        self.send(&request.bytes(self.correlation));
        self.correlation
    }

    /// Sends a request and waits for its answer.
    #[track_caller]
    pub fn ask(&mut self, request: &Request) -> Frame {
        let correlation = self.request(request);
        self.answer(correlation)
    }

    /// The same of a sidecar that may be killed: none if it ended before its answer.
    pub fn ask_until_killed(&mut self, request: &Request) -> Option<Frame> {
        self.correlation += 1;
        self.try_send(&request.bytes(self.correlation)).ok()?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(frame) = Frame::take(&mut self.input) {
                return Some(frame);
            }
            if self.read(deadline) == 0 {
                return None;
            }
        }
    }

    /// The answer to a request sent before, if those to all requests before it were taken.
    #[track_caller]
    pub fn answer(&mut self, correlation: u32) -> Frame {
        let frame = self.next_answer();
        assert_eq!(frame.correlation, correlation, "{frame:?}");
        frame
    }

    /// The next frame that is an answer; batches and GoAways are put aside.
    #[track_caller]
    pub fn next_answer(&mut self) -> Frame {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let frame = self.next(deadline);
            if let Some(frame) = self.put_aside(frame) {
                return frame;
            }
        }
    }

    /// The next batch.
    #[track_caller]
    pub fn batch(&mut self) -> Batch {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(batch) = self.batches.pop_front() {
                return batch;
            }
            let frame = self.next(deadline);
            if let Some(frame) = self.put_aside(frame) {
                panic!("an answer that nobody waits for: {frame:?}");
            }
        }
    }

    /// The batches that came while something else was waited for.
    pub fn batches_so_far(&mut self) -> Vec<Batch> {
        self.batches.drain(..).collect()
    }

    /// How many messages came in batches while something else was waited for.
    pub fn waiting(&self) -> usize {
        self.batches.iter().map(|batch| batch.messages.len()).sum()
    }

    /// Takes the batches that came so far, and acknowledges them.
    pub fn settle_all(&mut self) -> Vec<Batch> {
        let batches = self.batches_so_far();
        if !batches.is_empty() {
            let ids: Vec<[u8; 24]> = batches.iter().map(|batch| batch.id).collect();
            let answer = self.ask(&frames::batch_ack(&ids));
            assert_eq!(answer.kind, frames::BATCH_ACK_ANSWER, "{answer:?}");
        }
        batches
    }

    /// Takes the next batch and acknowledges it.
    #[track_caller]
    pub fn settled_batch(&mut self) -> Batch {
        let batch = self.batch();
        let answer = self.ask(&frames::batch_ack(&[batch.id]));
        assert_eq!((answer.kind, u32_at(&answer.body, 0)), (frames::BATCH_ACK_ANSWER, 1), "{answer:?}");
        batch
    }

    fn put_aside(&mut self, frame: Frame) -> Option<Frame> {
        match frame.kind {
            frames::TIMEOUT_BATCH => self.batches.push_back(Batch::of(&frame)),
            frames::GO_AWAY => self.went_away.push(frame),
            _ => return Some(frame),
        }
        None
    }

    /// The next frame that is not a Ping; the stream must go on.
    #[track_caller]
    fn next(&mut self, deadline: Instant) -> Frame {
        // Batches keep coming, so that something comes does not mean that what is waited for will.
        assert!(Instant::now() < deadline, "only other frames within {PATIENCE:?}");
        self.receive().expect("the sidecar does not close the connection")
    }

    /// The next frame that is not a Ping, which is answered; none at the end of the stream.
    #[track_caller]
    pub fn receive(&mut self) -> Option<Frame> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.receive_any() {
                Some(ping) if ping.kind == frames::PING => self.pong(&ping),
                frame => return frame,
            }
            assert!(Instant::now() < deadline, "only Pings within {PATIENCE:?}");
        }
    }

    /// The next frame, whatever it is; none at the end of the stream.
    #[track_caller]
    pub fn receive_any(&mut self) -> Option<Frame> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(frame) = Frame::take(&mut self.input) {
                return Some(frame);
            }
            if self.read(deadline) == 0 {
                assert!(self.input.is_empty(), "half a frame at the end: {:?}", self.input);
                return None;
            }
        }
    }

    /// Answers a Ping, if it is one.
    pub fn pong(&mut self, ping: &Frame) {
        assert_eq!(ping.kind, frames::PING, "{ping:?}");
        self.send(&Request::new(frames::PONG, 0, ping.body.clone()).bytes(ping.correlation));
    }

    /// Asserts that nothing more comes but the end.
    #[track_caller]
    pub fn assert_closed(&mut self) {
        let more = self.receive();
        assert!(more.is_none(), "not closed, but {more:?}");
    }

    fn read(&mut self, deadline: Instant) -> usize {
        let mut buffer = vec![0; 65_536];
        loop {
            let wait = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let read = match &mut self.stream {
                Stream::Tcp(stream) => stream.set_read_timeout(Some(wait)).and_then(|()| stream.read(&mut buffer)),
                Stream::Unix(stream) => {
                    stream.set_read_timeout(Some(wait)).and_then(|()| stream.read(&mut buffer))
                }
            };
            match read {
                Ok(count) => {
                    self.input.extend(&buffer[..count]);
                    return count;
                }
                // A peer that closes with unread bytes of ours resets: what it said came before.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return 0,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    assert!(Instant::now() < deadline, "nothing came within {PATIENCE:?}");
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("the connection failed: {error}"),
            }
        }
    }
}
