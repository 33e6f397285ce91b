//! Reads the commands of a client that is not admitted yet: it must present a token.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf, BytesMut};
use tracing::warn;

use super::connection::{Action, Connection, Figures, unknown_command};
use super::reply;
use crate::core::{Reason, Refusal};
use crate::protocol::Codec;
use crate::protocol::resp::command::{Arguments, Usage};
use crate::protocol::resp::parser::{Limits, Parser, ProtocolError};
use crate::server::admission::{Admission, Admitted};
use crate::server::buffered_stream::BufferedStream;

/// How often a connection may present a wrong token before it is closed.
const MAX_FAILURES: u32 = 3;

/// The state of a client until it is admitted.
pub(in crate::server) struct Greeting {
    pub(super) parser: Parser,
    pub(super) connection: Connection,
    /// The token of a client that is to be admitted once the store is open; empty if it needs none.
    pub(super) accepted: Option<Vec<u8>>,
}

/// The result of the commands that were read so far.
pub(in crate::server) enum Greeted {
    /// The client has not presented a token yet.
    Waiting,
    Admitted(Admitted),
    /// The connection is to be closed once its replies are written.
    Closed,
}

impl Greeting {
    /// Creates the state of a new connection from this address.
    pub(in crate::server) fn new(address: String) -> Greeting {
        /// The number of the last connection.
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let connection = Connection { id, address, ..Connection::default() };
        Greeting { parser: Parser::new(Limits::GREETING), connection, accepted: None }
    }

    /// Lets a client with the right token wait for the store. Its commands may be as long as those of an admitted one.
    pub(super) fn accept(&mut self, stream: &mut BufferedStream, admission: &Admission, token: &[u8]) {
        self.accepted = Some(token.to_vec());
        self.parser.set_limits(Limits::ADMITTED);
        stream.codec = Codec::new(admission.options.max_frame_length);
    }

    /// Handles the complete commands in the input, until the client is admitted. `admit` checks a token.
    pub(in crate::server) fn read(
        &mut self,
        stream: &mut BufferedStream,
        admission: &Admission,
        mut admit: impl FnMut(&[u8]) -> Result<Admitted, Refusal>,
    ) -> Greeted {
        let mut input = std::mem::take(stream.input());
        let mut greeted = Greeted::Waiting;
        while matches!(greeted, Greeted::Waiting) {
            if admission.shared().is_some()
                && let Some(token) = &self.accepted
            {
                greeted = match admit(token) {
                    Ok(admitted) => Greeted::Admitted(admitted),
                    Err(refusal) => {
                        stream.write(|_, out| drop(self.connection.refuse_login(out, &refusal)));
                        Greeted::Closed
                    }
                };
                break;
            }
            let length = match self.parser.parse(&input) {
                Ok(Some(length)) => length,
                Ok(None) => break,
                Err(error) => {
                    stream.write(|_, out| refuse_bytes(out, &error));
                    greeted = Greeted::Closed;
                    break;
                }
            };
            let ranges = self.parser.take_arguments();
            let arguments = Arguments { bytes: &input[..length], ranges: &ranges };
            if !ranges.is_empty() {
                greeted = self.run(arguments, stream, admission, &mut admit);
            }
            input.advance(length);
        }
        *stream.input() = input;
        greeted
    }

    fn run(
        &mut self,
        arguments: Arguments<'_>,
        stream: &mut BufferedStream,
        admission: &Admission,
        admit: &mut impl FnMut(&[u8]) -> Result<Admitted, Refusal>,
    ) -> Greeted {
        if is_http(arguments) {
            warn!("{HTTP_REFUSED}");
            return Greeted::Closed;
        }
        let is_accepted = self.accepted.is_some();
        if !is_accepted && !["AUTH", "HELLO", "QUIT", "RESET"].iter().any(|name| arguments.is(0, name)) {
            stream.write(|_, out| reply::error(out, NO_AUTH));
            return Greeted::Waiting;
        }
        if is_accepted && (arguments.is(0, "PING") || arguments.get(0).and_then(Usage::find).is_some()) {
            admission.metrics.refusals.of(Reason::Starting).inc();
            stream.write(|_, out| reply::error(out, LOADING));
            return Greeted::Waiting;
        }
        let mut out = BytesMut::new();
        let action = self.connection.run(arguments, || Figures::of(admission), &mut out);
        let greeted = match action {
            Action::Login(login) => match admit(login.token) {
                Ok(admitted) => {
                    self.connection.logged_in(login, &mut out);
                    Greeted::Admitted(admitted)
                }
                Err(refusal) if refusal.reason == Reason::Starting => {
                    self.accept(stream, admission, login.token);
                    self.connection.logged_in(login, &mut out);
                    Greeted::Waiting
                }
                Err(refusal) => self.connection.refuse_login(&mut out, &refusal),
            },
            Action::Quit => Greeted::Closed,
            Action::Reset => {
                self.connection.reset();
                reply::simple(&mut out, "RESET");
                Greeted::Waiting
            }
            Action::Replied => {
                // A HELLO without AUTH changes nothing.
                if !is_accepted && !out.starts_with(b"-") {
                    self.connection.reset();
                    out.clear();
                    reply::error(&mut out, NO_AUTH);
                }
                Greeted::Waiting
            }
            Action::Unknown => {
                reply::error(&mut out, &unknown_command(arguments));
                if self.parser.is_inline() { Greeted::Closed } else { Greeted::Waiting }
            }
        };
        stream.write(|_, to| to.extend_from_slice(&out));
        greeted
    }
}

/// The error for a command of a client that is not admitted. Client libraries look for its first word.
const NO_AUTH: &str =
    "NOAUTH not applied: this server asks for a token: send AUTH token, or HELLO 3 AUTH default token";

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
        if may_try_again { Greeted::Waiting } else { Greeted::Closed }
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
