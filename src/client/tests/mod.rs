//! Tests the client against a scripted peer, with the faults of servers and networks.
//!
//! Tests of timeouts use real sockets but a paused clock, which only the test moves ([`HeldClock`]). So no test sleeps,
//! and no result depends on the speed of the machine.

mod faults;
mod reconnecting;
mod requests;
mod subscriptions;

use std::future::Future;
use std::task::Poll;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::core::{AddOutcome, Promise, Reason, SHORTEST_STALL};
use crate::protocol::frame::{Error, Frame, GoAwayReason, Hello};
use crate::protocol::{Codec, Decoded};

/// Returns the Welcome that the peer sends.
fn welcome() -> Welcome {
    Welcome {
        version: 1,
        slots: 15,
        tick_ms: 1_000,
        max_frame_length: 1024 * 1024,
        max_messages: 32_768,
        max_credit: 1_000_000,
        ping_interval_ms: 5_000,
        store: "memory".to_owned(),
        server_name: "peer".to_owned(),
    }
}

/// Returns options with almost no pause before a reconnection.
fn quick() -> ClientOptions {
    ClientOptions::default().backoff(Duration::from_millis(1), Duration::from_millis(1))
}

fn refusal(reason: Reason) -> Body {
    let (code, promise, retryable) = (reason.code(), reason.promise(), reason.retryable());
    Body::Error(Error { code, promise, retryable, text: "because".to_owned() })
}

fn messages(count: u64) -> Vec<Message> {
    (0..count).map(|msg_id| Message::new(msg_id, 7)).collect()
}

fn added(count: usize) -> Body {
    Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline: Tick(115), outcomes: vec![AddOutcome::Added; count] })
}

fn acked(count: usize) -> Body {
    Body::DelMsgAnswer(vec![DelOutcome::Acked; count])
}

/// A server that does only what the test tells it to do.
struct Peer {
    listener: TcpListener,
}

impl Peer {
    async fn new() -> Peer {
        Peer { listener: TcpListener::bind("127.0.0.1:0").await.unwrap() }
    }

    fn address(&self) -> Address {
        self.listener.local_addr().unwrap().into()
    }

    async fn accept(&self) -> Session {
        Session::new(self.listener.accept().await.unwrap().0)
    }

    /// Accepts a connection and answers its Hello.
    async fn greet(&self, welcome: Welcome) -> Session {
        let mut session = self.accept().await;
        session.hello().await;
        session.send(1, Body::Welcome(welcome)).await;
        session
    }

    async fn connect(&self) -> (Client, Session) {
        self.connect_with(quick(), welcome()).await
    }

    async fn connect_with(&self, options: ClientOptions, welcome: Welcome) -> (Client, Session) {
        let (client, session) = tokio::join!(Client::connect(self.address(), options), self.greet(welcome));
        (client.unwrap(), session)
    }
}

/// The peer's side of a connection.
struct Session {
    stream: TcpStream,
    codec: Codec,
    input: BytesMut,
}

impl Session {
    fn new(stream: TcpStream) -> Session {
        Session { stream, codec: Codec::default(), input: BytesMut::new() }
    }

    /// Reads the next frame; returns `None` at the end of the stream.
    async fn read(&mut self) -> Option<Frame> {
        loop {
            match self.codec.decode(&mut self.input).unwrap() {
                Some(Decoded::Frame(frame)) => return Some(frame),
                Some(Decoded::Refused { refusal, .. }) => panic!("the client sent nonsense: {refusal}"),
                None if self.stream.read_buf(&mut self.input).await.unwrap() == 0 => return None,
                None => {}
            }
        }
    }

    async fn frame(&mut self) -> Frame {
        self.read().await.expect("the client closed the connection")
    }

    async fn hello(&mut self) -> Hello {
        match self.frame().await {
            Frame { correlation: 1, body: Body::Hello(hello) } => hello,
            frame => panic!("{frame:?}"),
        }
    }

    async fn send(&mut self, correlation: u32, body: Body) {
        let mut out = BytesMut::new();
        self.codec.encode_frame(&Frame::new(correlation, body), &mut out);
        self.stream.write_all(&out).await.unwrap();
    }

    /// Reads a request, answers it, and returns it.
    async fn answer(&mut self, answer: Body) -> Body {
        let Frame { correlation, body } = self.frame().await;
        self.send(correlation, answer).await;
        body
    }

    /// Answers a Ping of the client.
    async fn pong(&mut self) {
        match self.frame().await {
            Frame { correlation, body: Body::Ping(payload) } => self.send(correlation, Body::Pong(payload)).await,
            frame => panic!("{frame:?}"),
        }
    }

    /// Expects a GoAway from the client, then the end of the connection.
    async fn expect_goodbye(mut self) {
        let frame = self.frame().await;
        let done = matches!(frame.body, Body::GoAway { reason: GoAwayReason::Done, .. });
        assert!(done, "{frame:?}");
        assert_eq!(self.read().await, None);
    }
}

/// A step of the clock that is too short to count as a stall.
const STEP: Duration = Duration::from_millis(10);

const _: () = assert!(STEP.as_millis() < SHORTEST_STALL.as_millis());

/// A guard that keeps a paused clock from jumping to the next timer while all tasks wait for a socket.
struct HeldClock {
    _held: std::sync::mpsc::Sender<()>,
}

impl HeldClock {
    /// Stops the clock. Needs `#[tokio::test(start_paused = true)]`.
    fn new() -> HeldClock {
        let (held, released) = std::sync::mpsc::channel::<()>();
        // The clock does not move by itself while a blocking task runs.
        tokio::task::spawn_blocking(move || released.recv());
        HeldClock { _held: held }
    }

    /// Lets time pass in small steps, as for a process that is not stalled. Timers are exact to a millisecond, so one
    /// extra step makes sure that all timers up to `duration` have fired.
    async fn pass(&self, duration: Duration) {
        let steps = duration.as_millis().div_ceil(STEP.as_millis()) + 1;
        for _ in 0..steps {
            self.step().await;
        }
    }

    /// Lets time pass until `something` completes.
    async fn until<T>(&self, something: impl Future<Output = T>) -> T {
        let mut something = std::pin::pin!(something);
        loop {
            if let Poll::Ready(done) = futures_util::poll!(something.as_mut()) {
                return done;
            }
            self.step().await;
        }
    }

    async fn step(&self) {
        tokio::time::advance(STEP).await;
        settle().await;
    }

    /// Stalls the process: the clock jumps by `duration`.
    async fn stall(&self, duration: Duration) {
        tokio::time::advance(duration).await;
        settle().await;
    }
}

/// Lets all tasks run until they wait.
async fn settle() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

/// Starts a call and lets it queue its request.
async fn start<T: Send + 'static>(call: impl Future<Output = T> + Send + 'static) -> tokio::task::JoinHandle<T> {
    let call = tokio::spawn(call);
    settle().await;
    call
}

fn assert_not_applied<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ClientError {
    let error = result.expect_err("it cannot have succeeded");
    assert_eq!(error.promise(), Promise::NotApplied, "{error}");
    error
}

fn assert_outcome_unknown<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ClientError {
    let error = result.expect_err("it cannot have succeeded");
    assert_eq!(error.promise(), Promise::OutcomeUnknown, "{error}");
    error
}
