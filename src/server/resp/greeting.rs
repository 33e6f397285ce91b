//! Reads the commands of a client that is not admitted yet: it must present a token.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf, BytesMut};
use tracing::warn;

use super::connection::{Action, Connection, Figures};
use super::reply;
use crate::core::{Reason, Refusal};
use crate::protocol::resp::command::Arguments;
use crate::protocol::resp::parser::{Limits, Parser, ProtocolError};
use crate::server::admission::Admitted;
use crate::server::buffered_stream::BufferedStream;

/// How often a connection may present a wrong token before it is closed.
const MAX_FAILURES: u32 = 3;

/// The state of a client until it is admitted.
pub(in crate::server) struct Greeting {
    pub(super) parser: Parser,
    pub(super) connection: Connection,
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
        Greeting { parser: Parser::new(Limits::GREETING), connection }
    }

    /// Admits a client that needs no token.
    pub(in crate::server) fn admit_without_token(
        &mut self,
        stream: &mut BufferedStream,
        admitted: Result<Admitted, Refusal>,
    ) -> Greeted {
        match admitted {
            Ok(admitted) => Greeted::Admitted(admitted),
            Err(refusal) => {
                stream.write(|_, out| drop(self.connection.refuse_login(out, &refusal)));
                Greeted::Closed
            }
        }
    }

    /// Handles the complete commands in the input, until the client is admitted. `admit` checks a token.
    pub(in crate::server) fn read(
        &mut self,
        stream: &mut BufferedStream,
        mut admit: impl FnMut(&[u8]) -> Result<Admitted, Refusal>,
    ) -> Greeted {
        let mut input = std::mem::take(stream.input());
        let mut greeted = Greeted::Waiting;
        while matches!(greeted, Greeted::Waiting) {
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
                greeted = self.run(arguments, stream, &mut admit);
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
        admit: &mut impl FnMut(&[u8]) -> Result<Admitted, Refusal>,
    ) -> Greeted {
        if is_http(arguments) {
            warn!("{HTTP_REFUSED}");
            return Greeted::Closed;
        }
        if !["AUTH", "HELLO", "QUIT", "RESET"].iter().any(|name| arguments.is(0, name)) {
            stream.write(|_, out| reply::error(out, NO_AUTH));
            return Greeted::Waiting;
        }
        let mut out = BytesMut::new();
        let action = self.connection.run(arguments, Figures::default, &mut out);
        let greeted = match action {
            Action::Login(login) => match admit(login.token) {
                Ok(admitted) => {
                    self.connection.logged_in(login, &mut out);
                    Greeted::Admitted(admitted)
                }
                Err(refusal) => self.connection.refuse_login(&mut out, &refusal),
            },
            Action::Quit => Greeted::Closed,
            Action::Reset => {
                reply::simple(&mut out, "RESET");
                Greeted::Waiting
            }
            // A HELLO without AUTH.
            Action::Replied | Action::Unknown => {
                let is_greeting = !out.starts_with(b"-");
                if is_greeting {
                    out.clear();
                    reply::error(&mut out, NO_AUTH);
                }
                Greeted::Waiting
            }
        };
        stream.write(|_, to| to.extend_from_slice(&out));
        greeted
    }
}

/// The error for a command of a client that is not admitted. Client libraries look for its first word.
const NO_AUTH: &str =
    "NOAUTH not applied: this server asks for a token: send AUTH token, or HELLO 3 AUTH default token";

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
