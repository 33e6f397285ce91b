//! The commands that client libraries send when they connect, and the replies that they need.

use crate::support::resp::{Reply, Resp, line, start};

/// The reply that a client library needs.
enum Needs {
    /// It gives up if the reply is an error.
    NoError,
    /// It goes on with RESP2 if the reply is an error, which has these words.
    ErrorWith(&'static [&'static str]),
    /// It ignores an error.
    Nothing,
    /// It needs exactly this.
    Exactly(&'static str),
}

use Needs::{ErrorWith, Exactly, NoError, Nothing};

/// The handshakes by name: of each command the words, and what the library needs.
const HANDSHAKES: &[(&str, &[(&str, Needs)])] = &[
    (
        "redis-py 8",
        &[
            ("HELLO 3 AUTH default password", NoError),
            ("CLIENT MAINT_NOTIFICATIONS ON", Nothing),
            ("CLIENT SETINFO LIB-NAME redis-py", NoError),
            ("CLIENT SETINFO LIB-VER 8.1.0", NoError),
            ("SELECT 0", Exactly("OK")),
        ],
    ),
    ("redis-py 4", &[("AUTH password", Exactly("OK")), ("SELECT 0", Exactly("OK"))]),
    (
        "ioredis 6",
        &[
            ("hello 3", NoError),
            ("client SETINFO LIB-NAME ioredis", NoError),
            ("client SETINFO LIB-VER 6.0.0", NoError),
            ("info", NoError),
        ],
    ),
    (
        "node-redis 6",
        &[
            ("HELLO 3 AUTH default password SETNAME node", NoError),
            ("CLIENT SETINFO LIB-NAME node-redis", NoError),
            ("CLIENT SETINFO LIB-VER 6.3.1", NoError),
            ("CLIENT MAINT_NOTIFICATIONS ON", Nothing),
        ],
    ),
    (
        "go-redis 9",
        &[
            ("hello 3 auth default password", NoError),
            ("client setname node", NoError),
            ("client setinfo LIB-NAME go-redis(,go1.22)", NoError),
            ("client setinfo LIB-VER 9.22.0", NoError),
            ("client maint_notifications on", Nothing),
            ("select 0", NoError),
        ],
    ),
    (
        "Jedis",
        &[
            ("HELLO 3 AUTH default password", NoError),
            ("CLIENT SETNAME node", NoError),
            ("CLIENT SETINFO LIB-NAME jedis", NoError),
            ("CLIENT SETINFO LIB-VER 8.0.0", NoError),
            ("PING", Exactly("PONG")),
        ],
    ),
    (
        "Lettuce",
        &[
            ("HELLO 3 AUTH default password SETNAME node", NoError),
            ("CLIENT SETINFO lib-name Lettuce", Nothing),
            ("CLIENT MAINT_NOTIFICATIONS ON moving-endpoint-type internal-ip", Nothing),
            ("PING", Exactly("PONG")),
        ],
    ),
    (
        "StackExchange.Redis",
        &[
            ("AUTH password", NoError),
            ("HELLO 3", NoError),
            ("CLIENT SETNAME host", NoError),
            ("CLIENT SETINFO LIB-NAME SE.Redis", NoError),
            ("CLIENT SETINFO LIB-VER 2.13", NoError),
            ("CLIENT ID", NoError),
            ("CONFIG GET timeout", NoError),
            ("CONFIG GET replica-read-only", NoError),
            ("CONFIG GET databases", NoError),
            ("SENTINEL MASTERS", ErrorWith(&["ERR", "unknown"])),
            ("INFO replication", NoError),
            ("INFO server", NoError),
            ("CLUSTER NODES", ErrorWith(&["ERR", "unknown"])),
            ("GET __Booksleeve_TieBreak", ErrorWith(&["ERR", "unknown"])),
            ("ECHO 0123456789abcdef", Exactly("0123456789abcdef")),
            ("SUBSCRIBE __Booksleeve_MasterChanged", ErrorWith(&["ERR", "unknown"])),
        ],
    ),
    (
        "fred",
        &[("PING", Exactly("PONG")), ("CLIENT ID", NoError), ("INFO server", NoError), ("QUIT", Exactly("OK"))],
    ),
    ("redis-cli", &[("HELLO 3", NoError), ("COMMAND DOCS", NoError), ("COMMAND", NoError)]),
    ("redis-benchmark", &[("CONFIG GET save", NoError), ("CONFIG GET appendonly", NoError)]),
    ("an old library in front of RESP3", &[("HELLO 4", ErrorWith(&["NOPROTO"])), ("AUTH password", NoError)]),
];

#[test]
fn every_library_gets_the_replies_that_it_needs() {
    let sidecar = start(&[]);
    for (library, commands) in HANDSHAKES {
        let mut client = Resp::to(&sidecar);
        for (command, needs) in *commands {
            let reply = client.ask(command);
            let fits = match needs {
                NoError => !matches!(reply, Reply::Error(_)),
                ErrorWith(words) => {
                    matches!(&reply, Reply::Error(text) if words.iter().all(|word| text.contains(word)))
                }
                Nothing => true,
                Exactly(text) => matches!(&reply, Reply::Simple(found) | Reply::Bulk(found) if found == text),
            };
            assert!(fits, "{library}: {command}: {reply:?}");
        }
    }
}

#[test]
fn a_handshake_that_comes_at_once_is_answered_in_order() {
    let sidecar = start(&[]);
    for (library, commands) in HANDSHAKES {
        let mut client = Resp::to(&sidecar);
        let bytes: Vec<u8> = commands.iter().flat_map(|(command, _)| line(command)).collect();
        client.send(&bytes);
        client.send(&line("ECHO end"));
        let replies: Vec<Reply> = commands.iter().map(|_| client.receive()).collect();
        assert_eq!(replies.len(), commands.len(), "{library}");
        if !commands.iter().any(|(command, _)| *command == "QUIT") {
            assert_eq!(client.receive().text(), "end", "{library}");
        }
    }
}
