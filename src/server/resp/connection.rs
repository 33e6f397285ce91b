//! The commands that client libraries send by themselves: HELLO, AUTH, CLIENT, COMMAND, INFO and others.

use std::mem;

use bytes::BytesMut;

use super::command_info;
use super::reply::{self, Version};
use crate::protocol::resp::command::{Arguments, COMMANDS, Usage, quoted};
use crate::protocol::resp::parser::Limits;
use crate::server::admission::Admission;

/// The version of Redis whose behaviour client libraries may expect.
const REDIS_VERSION: &str = "7.2.4";

/// The number of arguments, with the name, from which on a command is refused: some commands compare each argument.
const TOO_MANY: usize = 65;

/// The maximum length of a name that CLIENT SETNAME sets.
const MAX_NAME_LENGTH: usize = 255;

/// The state that the connection commands read and change.
#[derive(Debug, Default)]
pub(in crate::server) struct Connection {
    /// The number of the connection.
    pub(super) id: u64,
    /// The address of the peer.
    pub(super) address: String,
    pub(super) version: Version,
    /// The name that the client gave itself; empty without one.
    pub(super) name: String,
    /// How often the client presented a wrong token.
    pub(super) failures: u32,
    /// Whether a MULTI was refused, so that AW commands are refused too until the transaction ends.
    pub(super) refuses_transaction: bool,
}

/// The figures of a sidecar that INFO shows.
#[derive(Clone, Debug, Default)]
pub(super) struct Figures {
    pub(super) uptime_seconds: u64,
    pub(super) connections: u64,
    /// The kind of the store, or `None` while it is being opened.
    pub(super) store: Option<&'static str>,
}

impl Figures {
    pub(super) fn of(admission: &Admission) -> Figures {
        Figures {
            uptime_seconds: admission.clock.now().saturating_duration_since(admission.started).as_secs(),
            connections: admission.admitted(),
            store: admission.shared().map(|shared| shared.store.kind()),
        }
    }
}

/// A request to be authenticated.
#[derive(Clone, Copy)]
pub(super) struct Login<'a> {
    pub(super) token: &'a [u8],
    /// The rest of a HELLO, which is applied if the token is right.
    hello: Option<Hello<'a>>,
}

#[derive(Clone, Copy)]
struct Hello<'a> {
    version: Version,
    name: Option<&'a [u8]>,
}

/// The step that follows a connection command.
pub(super) enum Action<'a> {
    /// The reply was written.
    Replied,
    /// The token must be checked.
    Login(Login<'a>),
    /// The reply was written, and the connection ends after it.
    Quit,
    /// The state of the connection is to be reset; then the reply is `+RESET`.
    Reset,
    /// This is no connection command.
    Unknown,
}

impl Connection {
    /// Handles a connection command, and writes its reply.
    pub(super) fn run<'a>(
        &mut self,
        arguments: Arguments<'a>,
        figures: impl FnOnce() -> Figures,
        out: &mut BytesMut,
    ) -> Action<'a> {
        let name = arguments.get(0).unwrap_or_default().to_ascii_uppercase();
        match (&name[..], arguments.count()) {
            (_, TOO_MANY..) if Usage::find(&name).is_none() => {
                reply::error(out, "ERR too many arguments: at most 63 are accepted here");
            }
            (b"PING", 1) => reply::simple(out, "PONG"),
            (b"PING" | b"ECHO", 2) => reply::bulk(out, arguments.get(1).unwrap_or_default()),
            (b"HELLO", _) => return self.hello(arguments, out),
            (b"AUTH", 2 | 3) => {
                let token = arguments.get(arguments.count() - 1).unwrap_or_default();
                return Action::Login(Login { token, hello: None });
            }
            (b"SELECT", 2) if arguments.is(1, "0") => reply::simple(out, "OK"),
            (b"SELECT", 2) => reply::error(out, "ERR DB index is out of range"),
            (b"QUIT", _) => {
                reply::simple(out, "OK");
                return Action::Quit;
            }
            (b"RESET", 1) => return Action::Reset,
            (b"MULTI" | b"WATCH", _) => {
                self.refuses_transaction |= &name[..] == b"MULTI";
                reply::error(out, NO_TRANSACTIONS);
            }
            (b"EXEC", _) if mem::take(&mut self.refuses_transaction) => {
                reply::error(out, "EXECABORT not applied: MULTI was refused");
            }
            (b"EXEC", _) => reply::error(out, "ERR EXEC without MULTI"),
            (b"DISCARD" | b"UNWATCH", _) => {
                self.refuses_transaction &= &name[..] != b"DISCARD";
                reply::simple(out, "OK");
            }
            (b"ROLE", _) => out.extend_from_slice(b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"),
            (b"CLIENT", 2..) => self.client(arguments, out),
            (b"COMMAND", _) => command_info::command(arguments, self.version, out),
            (b"INFO", _) => reply::verbatim(out, self.version, &info(arguments, &figures())),
            (b"CONFIG", 3..) if arguments.is(1, "GET") => reply::map(out, self.version, 0),
            _ if self.refuses_transaction && Usage::find(&name).is_some() => {
                reply::error(out, "NO_TRANSACTIONS not applied: MULTI was refused");
            }
            (b"PING" | b"ECHO" | b"AUTH" | b"SELECT" | b"RESET" | b"CLIENT", _) => {
                let name = String::from_utf8_lossy(&name).to_ascii_lowercase();
                reply::error(out, &format!("ERR wrong number of arguments for '{name}' command"));
            }
            _ => return Action::Unknown,
        }
        Action::Replied
    }

    /// Applies the rest of a login whose token was right, and writes its reply.
    pub(super) fn logged_in(&mut self, login: Login<'_>, out: &mut BytesMut) {
        match login.hello {
            None => reply::simple(out, "OK"),
            Some(hello) => self.greet(hello, out),
        }
    }

    /// Resets the version of the protocol and the name, and ends a refused transaction, for RESET.
    pub(super) fn reset(&mut self) {
        (self.version, self.name, self.refuses_transaction) = (Version::default(), String::new(), false);
    }

    fn hello<'a>(&mut self, arguments: Arguments<'a>, out: &mut BytesMut) -> Action<'a> {
        let mut hello = Hello { version: self.version, name: None };
        let (mut token, mut next) = (None, 2);
        match arguments.get(1) {
            None | Some(b"2") if arguments.count() == 1 => {}
            Some(b"2") => hello.version = Version::Resp2,
            Some(b"3") => hello.version = Version::Resp3,
            _ => {
                reply::error(out, "NOPROTO unsupported protocol version: this server speaks 2 and 3");
                return Action::Replied;
            }
        }
        while next < arguments.count() {
            if arguments.is(next, "AUTH") && next + 2 < arguments.count() {
                token = arguments.get(next + 2);
                next += 3;
            } else if arguments.is(next, "SETNAME") && next + 1 < arguments.count() {
                hello.name = arguments.get(next + 1);
                next += 2;
            } else {
                let option = quoted(arguments.get(next).unwrap_or_default());
                reply::error(out, &format!("ERR syntax error in HELLO option {option}"));
                return Action::Replied;
            }
        }
        if let Some(name) = hello.name
            && let Err(text) = check_name(name)
        {
            reply::error(out, text);
            return Action::Replied;
        }
        match token {
            Some(token) => return Action::Login(Login { token, hello: Some(hello) }),
            None => self.greet(hello, out),
        }
        Action::Replied
    }

    fn greet(&mut self, hello: Hello<'_>, out: &mut BytesMut) {
        self.version = hello.version;
        if let Some(name) = hello.name {
            self.name = String::from_utf8_lossy(name).into_owned();
        }
        reply::map(out, self.version, 7);
        reply::pairs(out, &[("server", "ackwheel"), ("version", REDIS_VERSION)]);
        for (key, value) in [("proto", self.version as u64), ("id", self.id)] {
            reply::bulk(out, key.as_bytes());
            reply::integer(out, value);
        }
        reply::pairs(out, &[("mode", "standalone"), ("role", "master")]);
        reply::bulk(out, b"modules");
        reply::array(out, 0);
    }

    fn client(&mut self, arguments: Arguments<'_>, out: &mut BytesMut) {
        let subcommand = arguments.get(1).unwrap_or_default().to_ascii_uppercase();
        match (&subcommand[..], arguments.get(2)) {
            (b"SETNAME", Some(name)) => match check_name(name) {
                Ok(()) => {
                    self.name = String::from_utf8_lossy(name).into_owned();
                    reply::simple(out, "OK");
                }
                Err(text) => reply::error(out, text),
            },
            (b"SETINFO" | b"NO-EVICT" | b"NO-TOUCH", Some(_)) => reply::simple(out, "OK"),
            (b"REPLY", Some(_)) if arguments.is(2, "ON") => reply::simple(out, "OK"),
            // No other connection is ever unblocked.
            (b"UNBLOCK", Some(_)) => reply::integer(out, 0),
            (b"GETNAME", None) if self.name.is_empty() => reply::null(out, self.version),
            (b"GETNAME", None) => reply::bulk(out, self.name.as_bytes()),
            (b"ID", None) => reply::integer(out, self.id),
            (b"INFO", None) => {
                let Connection { id, address, name, version, .. } = self;
                let text = format!("id={id} addr={address} name={name} db=0 resp={}\n", *version as u8);
                reply::verbatim(out, *version, &text);
            }
            _ => reply::unknown_subcommand(out, arguments),
        }
    }
}

/// The error for MULTI. Most client libraries can send a pipeline without it.
const NO_TRANSACTIONS: &str = "NO_TRANSACTIONS not applied: there are no transactions, and everything up to EXEC is \
    refused: use a pipeline without MULTI (in redis-py, pipeline(transaction=False))";

fn check_name(name: &[u8]) -> Result<(), &'static str> {
    let is_legal = name.len() <= MAX_NAME_LENGTH && name.iter().all(u8::is_ascii_graphic);
    if is_legal { Ok(()) } else { Err("ERR Client names cannot contain spaces, newlines or special characters.") }
}

/// Returns the sections of INFO that were asked for.
fn info(arguments: Arguments<'_>, figures: &Figures) -> String {
    let Figures { uptime_seconds, connections, store } = figures;
    let loading = if store.is_some() { "loading:0\r\n" } else { "loading:1\r\nloading_eta_seconds:1\r\n" };
    let version = env!("CARGO_PKG_VERSION");
    let sections = [
        (
            "Server",
            format!(
                "redis_version:{REDIS_VERSION}\r\nserver_name:ackwheel\r\nackwheel_version:{version}\r\n\
                 redis_mode:standalone\r\nuptime_in_seconds:{uptime_seconds}\r\n"
            ),
        ),
        ("Clients", format!("connected_clients:{connections}\r\n")),
        ("Persistence", String::from(loading)),
        ("Replication", String::from("role:master\r\nconnected_slaves:0\r\n")),
        ("Ackwheel", format!("store:{}\r\n", store.unwrap_or("opening"))),
    ];
    let all = ["all", "default", "everything"];
    let is_wanted = |section: &str| {
        arguments.count() == 1
            || arguments.from(1).any(|wanted| {
                let wanted = String::from_utf8_lossy(wanted).to_ascii_lowercase();
                wanted == section.to_ascii_lowercase() || all.contains(&&*wanted)
            })
    };
    let wanted = sections.iter().filter(|(section, _)| is_wanted(section));
    wanted.flat_map(|(section, lines)| ["# ", section, "\r\n", lines, "\r\n"]).collect()
}

/// Returns the text of the error for a command that does not exist. Client libraries look for its beginning.
pub(super) fn unknown_command(arguments: Arguments<'_>) -> String {
    let name = quoted(arguments.get(0).unwrap_or_default());
    let shown: String = arguments.from(1).take(4).map(|argument| quoted(argument) + " ").collect();
    let text = format!("ERR unknown command {name}, with args beginning with: {shown}");
    if !arguments.get(0).unwrap_or_default().to_ascii_uppercase().starts_with(b"AW.") {
        return text;
    }
    let names: Vec<&str> = COMMANDS.iter().map(|usage| usage.name).collect();
    format!("{text}- ackwheel has {}", names.join(", "))
}

const _: () = assert!(Limits::GREETING.argument > crate::protocol::frame::MAX_TOKEN_LENGTH);

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a command, and returns its reply as text.
    fn run(connection: &mut Connection, line: &str) -> String {
        let words: Vec<&str> = line.split(' ').collect();
        let bytes = words.concat();
        let mut ranges = Vec::new();
        for word in words {
            let begin = ranges.last().map_or(0, |last: &std::ops::Range<usize>| last.end);
            ranges.push(begin..begin + word.len());
        }
        let arguments = Arguments { bytes: bytes.as_bytes(), ranges: &ranges };
        let mut out = BytesMut::new();
        let figures = || Figures { store: Some("memory"), ..Figures::default() };
        match connection.run(arguments, figures, &mut out) {
            Action::Replied | Action::Quit => {}
            Action::Login(login) => {
                assert_eq!(login.token, b"secret");
                connection.logged_in(login, &mut out);
            }
            Action::Reset => reply::simple(&mut out, "RESET"),
            Action::Unknown => reply::error(&mut out, &unknown_command(arguments)),
        }
        String::from_utf8(out.to_vec()).unwrap()
    }

    #[test]
    fn hello_switches_the_version_and_answers_a_map_in_resp3_only() {
        let mut connection = Connection { id: 9, ..Connection::default() };
        assert!(
            run(&mut connection, "HELLO")
                .starts_with("*14\r\n$6\r\nserver\r\n$8\r\nackwheel\r\n$7\r\nversion\r\n")
        );
        let map = run(&mut connection, "hello 3 AUTH default secret SETNAME node-1");
        assert!(map.starts_with("%7\r\n") && map.contains("$5\r\nproto\r\n:3\r\n$2\r\nid\r\n:9\r\n"), "{map}");
        assert_eq!(run(&mut connection, "CLIENT GETNAME"), "$6\r\nnode-1\r\n");
        assert_eq!(run(&mut connection, "CONFIG GET save"), "%0\r\n");
        assert!(run(&mut connection, "HELLO 4").starts_with("-NOPROTO "));
        assert_eq!(run(&mut connection, "HELLO 2 FOO"), "-ERR syntax error in HELLO option 'FOO'\r\n");
        assert!(run(&mut connection, "HELLO 2").starts_with("*14\r\n"));
        assert_eq!(run(&mut connection, "CONFIG GET save"), "*0\r\n");
    }

    #[test]
    fn replies_are_those_that_client_libraries_expect() {
        let mut connection = Connection { id: 9, address: String::from("127.0.0.1:5"), ..Connection::default() };
        for (line, reply) in [
            ("PING", "+PONG\r\n"),
            ("ping x", "$1\r\nx\r\n"),
            ("ECHO tracer", "$6\r\ntracer\r\n"),
            ("AUTH secret", "+OK\r\n"),
            ("AUTH anybody secret", "+OK\r\n"),
            ("SELECT 0", "+OK\r\n"),
            ("SELECT 1", "-ERR DB index is out of range\r\n"),
            ("CLIENT GETNAME", "$-1\r\n"),
            ("CLIENT SETNAME node-1", "+OK\r\n"),
            (
                "CLIENT SETNAME a\u{7}b",
                "-ERR Client names cannot contain spaces, newlines or special characters.\r\n",
            ),
            ("client setinfo LIB-NAME redis-py", "+OK\r\n"),
            ("CLIENT ID", ":9\r\n"),
            ("CLIENT INFO", "$46\r\nid=9 addr=127.0.0.1:5 name=node-1 db=0 resp=2\n\r\n"),
            ("CLIENT NO-EVICT on", "+OK\r\n"),
            ("CLIENT REPLY ON", "+OK\r\n"),
            ("CLIENT REPLY OFF", "-ERR unknown subcommand or wrong number of arguments for 'REPLY'\r\n"),
            ("CLIENT UNBLOCK 8", ":0\r\n"),
            ("CLIENT KILL x", "-ERR unknown subcommand or wrong number of arguments for 'KILL'\r\n"),
            ("QUIT", "+OK\r\n"),
            ("RESET", "+RESET\r\n"),
            ("COMMAND COUNT", ":7\r\n"),
            (
                "COMMAND INFO aw.take",
                "*1\r\n*10\r\n$7\r\naw.take\r\n:-2\r\n*0\r\n:0\r\n:0\r\n:0\r\n*0\r\n*0\r\n*0\r\n*0\r\n",
            ),
            ("COMMAND NONE", "-ERR unknown subcommand or wrong number of arguments for 'NONE'\r\n"),
            ("ECHO", "-ERR wrong number of arguments for 'echo' command\r\n"),
            ("SUBSCRIBE a b", "-ERR unknown command 'SUBSCRIBE', with args beginning with: 'a' 'b' \r\n"),
        ] {
            assert_eq!(run(&mut connection, line), reply, "{line}");
        }
        assert!(run(&mut connection, "AW.PUT 1").contains("- ackwheel has AW.ADD, AW.DEL, "));
        assert!(run(&mut connection, "INFO").contains("\r\nloading:0\r\n"));
        let server = run(&mut connection, "INFO server replication");
        assert!(
            server.contains("redis_version:7.2.4\r\nserver_name:ackwheel\r\n") && server.contains("role:master")
        );
        assert!(!server.contains("loading"), "{server}");
        assert!(
            run(&mut connection, "COMMAND DOCS aw.ack")
                .starts_with("*2\r\n$6\r\naw.ack\r\n*8\r\n$7\r\nsummary\r\n")
        );
    }
}
