//! A connection that may end at any moment, as one to a sidecar does that is killed.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::support::frames::{self, Frame, Request};

/// How long an answer is waited for before a look whether the sidecar is still reached.
pub const LOOK: Duration = Duration::from_millis(200);

/// How long a connection may take to be made, and its Hello to be answered.
pub const GREETING: Duration = Duration::from_secs(2);

pub struct Peer {
    stream: TcpStream,
    input: Vec<u8>,
    correlation: u32,
    /// It was asked to connect again elsewhere, or an answer did not come.
    pub is_over: bool,
}

/// The next event of a connection.
pub enum Came {
    Frame(Frame),
    /// Nothing, until the deadline.
    Nothing,
    /// The end.
    End,
}

impl Peer {
    /// A connection that has said Hello; none where nobody answers, or asks to go elsewhere.
    pub fn greeted(address: SocketAddr) -> Option<Peer> {
        let stream = TcpStream::connect_timeout(&address, GREETING).ok()?;
        stream.set_nodelay(true).ok()?;
        let mut peer = Peer { stream, input: Vec::new(), correlation: 0, is_over: false };
        let welcome = peer.ask(&frames::hello((1, 1), b""), GREETING)?;
        (welcome.kind == frames::WELCOME).then_some(peer)
    }

    /// Sends a request; none where the connection has ended.
    pub fn request(&mut self, request: &Request) -> Option<u32> {
        self.correlation += 1;
        self.stream.write_all(&request.bytes(self.correlation)).ok()?;
        Some(self.correlation)
    }

    /// The answer to a request; none if the connection ends before it comes, or it takes too long.
    pub fn ask(&mut self, request: &Request, patience: Duration) -> Option<Frame> {
        self.ask_while(request, patience, || true)
    }

    /// The same, where waiting ends when the sidecar is no longer reached.
    pub fn ask_while(
        &mut self,
        request: &Request,
        patience: Duration,
        is_reached: impl Fn() -> bool,
    ) -> Option<Frame> {
        let answer = self.answer(request, patience, is_reached);
        self.is_over |= answer.is_none();
        answer
    }

    fn answer(&mut self, request: &Request, patience: Duration, is_reached: impl Fn() -> bool) -> Option<Frame> {
        let correlation = self.request(request)?;
        let deadline = Instant::now() + patience;
        loop {
            let look = (Instant::now() + LOOK).min(deadline);
            match self.receive(look) {
                Came::Nothing if Instant::now() < deadline && is_reached() => {}
                Came::Frame(frame) if frame.kind == frames::GO_AWAY => {}
                // An Error about the connection: it ends.
                Came::Frame(frame) if (frame.kind, frame.correlation) == (frames::ERROR, 0) => return None,
                Came::Frame(frame) => {
                    assert_eq!(frame.correlation, correlation, "an answer that nobody waits for: {frame:?}");
                    return Some(frame);
                }
                Came::Nothing | Came::End => return None,
            }
        }
    }

    /// The next frame that is not a Ping, which is answered.
    pub fn receive(&mut self, deadline: Instant) -> Came {
        loop {
            match Frame::take(&mut self.input) {
                Some(ping) if ping.kind == frames::PING => {
                    let pong = Request::new(frames::PONG, 0, ping.body.clone());
                    // If it has ended, the next read tells.
                    let _ = self.stream.write_all(&pong.bytes(ping.correlation));
                }
                Some(frame) => {
                    self.is_over |= frame.kind == frames::GO_AWAY;
                    return Came::Frame(frame);
                }
                None => match read_until(&mut self.stream, &mut self.input, deadline) {
                    Some(0) => return Came::End,
                    Some(_) => {}
                    None => return Came::Nothing,
                },
            }
        }
    }
}

/// How many bytes came: 0 at the end, none where nothing came until the deadline.
pub fn read_until(stream: &mut TcpStream, input: &mut Vec<u8>, deadline: Instant) -> Option<usize> {
    let mut buffer = vec![0; 65_536];
    let wait = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let read = stream.set_read_timeout(Some(wait)).and_then(|()| stream.read(&mut buffer));
    match read {
        Ok(count) => {
            input.extend(&buffer[..count]);
            Some(count)
        }
        Err(error) => match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => None,
            _ => Some(0),
        },
    }
}
