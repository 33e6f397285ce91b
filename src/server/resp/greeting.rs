//! Reads the commands of a client that is not admitted yet: it must present a token.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf, BytesMut};
use tracing::warn;

use super::connection::{Action, Connection, Figures, unknown_command};
use super::reply;
use crate::core::{Reason, Refusal};
use crate::protocol::resp::command::{Arguments, Usage};
use crate::protocol::resp::parser::{Limits, Parser, ProtocolError};
use crate::server::admission::{Admission, Admitted};
use crate::server::buffered_stream::BufferedStream;

/// How often a connection may present a wrong token before it is closed.
const MAX_FAILURES: u32 = 3;

/// How many commands a connection may send before it is admitted.
const MAX_COMMANDS: u32 = 10;

/// The maximum length of all replies to a connection that is not admitted: 1 KiB with the refusal behind them.
const MAX_REPLIES: usize = 1_024 - 128;

/// The state of a client until it is admitted.
pub(in crate::server) struct Greeting {
    pub(super) parser: Parser,
    pub(super) connection: Connection,
    /// The token of a client that is to be admitted once the store is open; empty if it needs none.
    pub(super) accepted: Option<Vec<u8>>,
    /// The number of commands so far, and the bytes of their replies.
    commands: u32,
    replied: usize,
    /// The memory of the arguments that is charged to the stream.
    charged: usize,
}

/// The result of the commands that were read so far.
pub(in crate::server) enum Greeted {
    /// The client has not presented a token yet.
    Waiting,
    Admitted(Admitted),
    /// The connection is to be closed once its replies are written. With a refusal, this is the last reply.
    Closed(Option<Refusal>),
}

impl Greeting {
    /// Creates the state of a new connection from this address.
    pub(in crate::server) fn new(address: String) -> Greeting {
        /// The number of the last connection.
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let connection = Connection { id, address, ..Connection::default() };
        Greeting {
            parser: Parser::new(Limits::GREETING),
            connection,
            accepted: None,
            commands: 0,
            replied: 0,
            charged: 0,
        }
    }

    /// Lets a client with the right token wait for the store. Its commands may be as long as those of an admitted one.
    pub(super) fn accept(&mut self, stream: &mut BufferedStream, admission: &Admission, token: &[u8]) {
        self.accepted = Some(token.to_vec());
        self.parser.set_limits(Limits::ADMITTED);
        stream.end_limits(admission.options.max_frame_length);
    }

    /// Handles the complete commands in the input, until the client is admitted. `admit` checks a token.
    pub(in crate::server) fn read(
        &mut self,
        stream: &mut BufferedStream,
        admission: &Admission,
        mut admit: impl FnMut(&[u8]) -> Result<Admitted, Refusal>,
    ) -> Greeted {
        let (mut input, mut out) = (std::mem::take(stream.input()), BytesMut::new());
        let mut greeted = Greeted::Waiting;
        while matches!(greeted, Greeted::Waiting) {
            if admission.shared().is_some()
                && let Some(token) = &self.accepted
            {
                greeted = match admit(token) {
                    Ok(admitted) => Greeted::Admitted(admitted),
                    Err(refusal) => {
                        self.connection.refuse_login(&mut out, &refusal);
                        Greeted::Closed(None)
                    }
                };
                break;
            }
            let length = match self.parser.parse(&input) {
                Ok(Some(length)) => length,
                Ok(None) => break,
                Err(error) => {
                    refuse_bytes(&mut out, &error);
                    greeted = Greeted::Closed(None);
                    break;
                }
            };
            let ranges = self.parser.take_arguments();
            let arguments = Arguments { bytes: &input[..length], ranges: &ranges };
            let before = out.len();
            if !ranges.is_empty() && self.commands < MAX_COMMANDS {
                greeted = self.run(arguments, stream, &mut out, admission, &mut admit);
            }
            if self.accepted.is_none() {
                self.commands += 1;
            }
            input.advance(length);
            if matches!(greeted, Greeted::Waiting)
                && self.accepted.is_none()
                && (self.commands > MAX_COMMANDS || self.replied + out.len() > MAX_REPLIES)
            {
                out.truncate(before);
                greeted = Greeted::Closed(Some(Refusal::new(Reason::HelloExpected, TOO_MANY)));
            }
        }
        *stream.input() = input;
        stream.also_charged = stream.also_charged - self.charged + self.parser.bytes();
        self.charged = self.parser.bytes();
        self.replied += out.len();
        stream.write(|_, to| to.extend_from_slice(&out));
        greeted
    }

    fn run(
        &mut self,
        arguments: Arguments<'_>,
        stream: &mut BufferedStream,
        out: &mut BytesMut,
        admission: &Admission,
        admit: &mut impl FnMut(&[u8]) -> Result<Admitted, Refusal>,
    ) -> Greeted {
        if is_http(arguments) {
            warn!("{HTTP_REFUSED}");
            return Greeted::Closed(None);
        }
        let is_accepted = self.accepted.is_some();
        if !is_accepted && !["AUTH", "HELLO", "QUIT", "RESET"].iter().any(|name| arguments.is(0, name)) {
            reply::error(out, NO_AUTH);
            return Greeted::Waiting;
        }
        if is_accepted && (arguments.is(0, "PING") || arguments.get(0).and_then(Usage::find).is_some()) {
            admission.metrics.refusals.of(Reason::Starting).inc();
            reply::error(out, LOADING);
            return Greeted::Waiting;
        }
        let before = out.len();
        match self.connection.run(arguments, || Figures::of(admission), out) {
            Action::Login(login) => match admit(login.token) {
                Ok(admitted) => {
                    self.connection.logged_in(login, out);
                    return Greeted::Admitted(admitted);
                }
                Err(refusal) if refusal.reason == Reason::Starting => {
                    self.accept(stream, admission, login.token);
                    self.connection.logged_in(login, out);
                }
                Err(refusal) => return self.connection.refuse_login(out, &refusal),
            },
            Action::Quit => return Greeted::Closed(None),
            Action::Reset => {
                self.connection.reset();
                reply::simple(out, "RESET");
            }
            // A HELLO without AUTH changes nothing.
            Action::Replied if !is_accepted && !out[before..].starts_with(b"-") => {
                self.connection.reset();
                out.truncate(before);
                reply::error(out, NO_AUTH);
            }
            Action::Replied => {}
            Action::Unknown => {
                reply::error(out, &unknown_command(arguments));
                if self.parser.is_inline() {
                    return Greeted::Closed(None);
                }
            }
        }
        Greeted::Waiting
    }
}

/// The error for a command of a client that is not admitted. Client libraries look for its first word.
const NO_AUTH: &str = "NOAUTH not applied: send AUTH token, or HELLO 3 AUTH default token";

/// The text of the refusal of further commands before a token.
const TOO_MANY: &str = "too many commands or replies before a token: send AUTH first";

/// The error for a command while the store is being opened. Client libraries look for its first word, and wait.
const LOADING: &str =
    "LOADING not applied: this sidecar is starting, and its store is being opened: wait a second";

impl Connection {
    /// Writes the error for a refused token. Returns whether the connection is to be closed.
    pub(super) fn refuse_login(&mut self, out: &mut BytesMut, refusal: &Refusal) -> Greeted {
        self.failures += 1;
        match refusal.reason {
            Reason::Unauthorized => reply::error(out, &format!("WRONGPASS not applied: {}", refusal.text)),
            // Client libraries look for this text, and connect again later.
            Reason::TooManyConnections => reply::error(out, "ERR max number of clients reached"),
            _ => reply::refusal(out, refusal),
        }
        let may_try_again = refusal.reason == Reason::Unauthorized && self.failures < MAX_FAILURES;
        if may_try_again { Greeted::Waiting } else { Greeted::Closed(None) }
    }
}

/// The warning about an HTTP request.
pub(super) const HTTP_REFUSED: &str =
    "an HTTP request came to --resp, and its connection is closed: HTTP is for --admin";

/// Returns whether the command is the beginning of an HTTP request with a body, or a header of one. A web page could
/// send such a request; its body must not be read as commands.
pub(super) fn is_http(arguments: Arguments<'_>) -> bool {
    arguments.is(0, "POST") || arguments.is(0, "Host:")
}

/// Answers bytes that are not a command, or logs which listener they were meant for.
pub(super) fn refuse_bytes(out: &mut BytesMut, error: &ProtocolError) {
    match error {
        ProtocolError::Tls => {
            warn!("a TLS handshake came to --resp, which speaks no TLS: give --tls-cert, or connect without TLS");
        }
        ProtocolError::Native => {
            warn!("a client of the native protocol came to --resp, and is closed: connect it to --listen");
        }
        ProtocolError::Other(_) => reply::error(out, &format!("ERR {error}")),
    }
}
