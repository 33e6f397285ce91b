//! A client of the RESP protocol that writes and reads bytes.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::PATIENCE;
use super::sidecar::{Sidecar, serve};

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Simple(String),
    Error(String),
    Integer(i64),
    Bulk(String),
    Verbatim(String),
    Array(Vec<Reply>),
    Set(Vec<Reply>),
    Map(Vec<(Reply, Reply)>),
    Null,
}

impl Reply {
    #[track_caller]
    pub fn array(&self) -> &[Reply] {
        match self {
            Reply::Array(elements) => elements,
            other => panic!("no array: {other:?}"),
        }
    }

    #[track_caller]
    pub fn integer(&self) -> i64 {
        match self {
            Reply::Integer(number) => *number,
            other => panic!("no integer: {other:?}"),
        }
    }

    #[track_caller]
    pub fn text(&self) -> &str {
        match self {
            Reply::Simple(text) | Reply::Bulk(text) | Reply::Verbatim(text) => text,
            other => panic!("no text: {other:?}"),
        }
    }

    /// The texts of an array of bulk strings.
    #[track_caller]
    pub fn texts(&self) -> Vec<&str> {
        self.array().iter().map(Reply::text).collect()
    }

    /// Asserts that it is an error that begins so.
    #[track_caller]
    pub fn assert_error(&self, beginning: &str) {
        match self {
            Reply::Error(text) if text.starts_with(beginning) => {}
            other => panic!("not the error {beginning}: {other:?}"),
        }
    }

    /// The batches of a reply to AW.TAKE.
    #[track_caller]
    pub fn batches(&self) -> Vec<Taken> {
        let batch = |reply: &Reply| {
            let [batch, delivery, messages, attempts, age_ms, added, acked, flags] = reply.array() else {
                panic!("no batch: {reply:?}")
            };
            Taken {
                batch: batch.text().to_owned(),
                delivery: delivery.integer(),
                messages: messages.texts().into_iter().map(String::from).collect(),
                attempts: attempts.array().iter().map(Reply::integer).collect(),
                age_ms: age_ms.integer(),
                added: added.integer(),
                acked: acked.integer(),
                flags: flags.text().to_owned(),
            }
        };
        self.array().iter().map(batch).collect()
    }
}

/// A batch that AW.TAKE returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    pub batch: String,
    pub delivery: i64,
    pub messages: Vec<String>,
    pub attempts: Vec<i64>,
    pub age_ms: i64,
    pub added: i64,
    pub acked: i64,
    pub flags: String,
}

/// The bytes of a command.
pub fn command(arguments: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        bytes.extend(format!("${}\r\n{argument}\r\n", argument.len()).into_bytes());
    }
    bytes
}

/// The bytes of a command whose arguments are separated by spaces.
pub fn line(line: &str) -> Vec<u8> {
    command(&line.split(' ').collect::<Vec<_>>())
}

pub struct Resp<S = TcpStream> {
    pub stream: S,
    input: Vec<u8>,
}

impl Resp {
    pub fn connect(address: SocketAddr) -> Resp {
        let stream = TcpStream::connect(address).expect("the sidecar accepts");
        stream.set_nodelay(true).expect("TCP can do without delay");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        Resp::over(stream)
    }

    /// Connects to a sidecar that serves the protocol.
    pub fn to(sidecar: &Sidecar) -> Resp {
        Resp::connect(sidecar.resp.expect("it was started with --resp"))
    }

    /// Whether no byte comes for so long.
    pub fn is_silent_for(&mut self, time: Duration) -> bool {
        assert!(self.input.is_empty());
        self.stream.set_read_timeout(Some(time)).expect("a timeout can be set");
        let read = self.stream.read(&mut [0]);
        self.stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        matches!(read, Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    }
}

impl<S: Read + Write> Resp<S> {
    pub fn over(stream: S) -> Resp<S> {
        Resp { stream, input: Vec::new() }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the sidecar reads");
    }

    /// Sends a command whose arguments are separated by spaces, and returns its reply.
    #[track_caller]
    pub fn ask(&mut self, text: &str) -> Reply {
        self.send(&line(text));
        self.receive()
    }

    /// Sends commands at once, and returns their replies.
    #[track_caller]
    pub fn ask_all<const N: usize>(&mut self, texts: [&str; N]) -> [Reply; N] {
        self.send(&texts.map(line).concat());
        texts.map(|_| self.receive())
    }

    #[track_caller]
    pub fn receive(&mut self) -> Reply {
        parse(&mut self.receive_bytes().as_bytes()).expect("a whole reply")
    }

    /// Receives the bytes of a reply.
    #[track_caller]
    pub fn receive_bytes(&mut self) -> String {
        loop {
            let mut rest = &self.input[..];
            if parse(&mut rest).is_some() {
                let length = self.input.len() - rest.len();
                return String::from_utf8(self.input.drain(..length).collect()).expect("replies are text");
            }
            let mut bytes = vec![0; 65_536];
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    panic!("the connection ended; of a reply came {:?}", self.input.escape_ascii().to_string())
                }
                Ok(count) => self.input.extend_from_slice(&bytes[..count]),
                Err(error) => panic!("no reply came: {error}"),
            }
        }
    }

    /// Reads all bytes until the connection ends.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.input);
        match self.stream.read_to_end(&mut bytes) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("the connection did not end: {error}"),
        }
        bytes
    }
}

/// Starts a sidecar that serves the protocol.
pub fn start(flags: &[&str]) -> Sidecar {
    Sidecar::spawn(serve(flags).args(["--resp", "127.0.0.1:0"]))
}

/// Takes a reply from the beginning of some bytes; none where it is not there as a whole.
pub fn parse(input: &mut &[u8]) -> Option<Reply> {
    let end = input.windows(2).position(|bytes| bytes == b"\r\n")?;
    let head = std::str::from_utf8(&input[1..end]).expect("replies are text");
    let first = input[0];
    *input = &input[end + 2..];
    let number = || head.parse::<i64>().expect("a number");
    Some(match first {
        b'+' => Reply::Simple(head.to_owned()),
        b'-' => Reply::Error(head.to_owned()),
        b':' => Reply::Integer(number()),
        b'_' => Reply::Null,
        b'$' if number() < 0 => Reply::Null,
        b'$' | b'=' => {
            let length = usize::try_from(number()).expect("a length");
            let text = input.get(..length)?;
            *input = input.get(length + 2..)?;
            let text = String::from_utf8(text.to_vec()).expect("replies are text");
            match (first, text.strip_prefix("txt:")) {
                (b'=', Some(text)) => Reply::Verbatim(text.to_owned()),
                _ => Reply::Bulk(text),
            }
        }
        b'*' => Reply::Array((0..number()).map(|_| parse(input)).collect::<Option<_>>()?),
        b'~' => Reply::Set((0..number()).map(|_| parse(input)).collect::<Option<_>>()?),
        b'%' => Reply::Map((0..number()).map(|_| Some((parse(input)?, parse(input)?))).collect::<Option<_>>()?),
        other => panic!("no reply begins with {:?}", char::from(other)),
    })
}
