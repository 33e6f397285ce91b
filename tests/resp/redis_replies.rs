//! Connection commands whose replies are those of Redis, in RESP2 and RESP3.

use crate::support::redis::Redis;
use crate::support::resp::{Reply, Resp, line, start};

/// Commands whose replies have the same bytes.
const SAME_BYTES: [&str; 26] = [
    "PING",
    "PING x",
    "ECHO x",
    "PING a b",
    "SELECT 0",
    "UNWATCH",
    "EXEC",
    "ROLE",
    "CLIENT REPLY ON",
    "CLIENT UNBLOCK 123456789",
    "CLIENT GETNAME",
    "CLIENT SETNAME x",
    "CLIENT GETNAME",
    "CLIENT NO-EVICT ON",
    "CONFIG GET nothing",
    "COMMAND INFO nothing",
    "COMMAND INFO nothing nowhere",
    "COMMAND DOCS nothing",
    "COMMAND GETKEYS nothing x",
    "INFO nothing",
    "SUBSCRIBED a b",
    "ECHO",
    "RESET",
    "CLIENT GETNAME",
    "UNWATCH",
    "QUIT",
];

#[test]
fn replies_of_connection_commands_have_the_bytes_of_redis() {
    let (sidecar, redis) = (start(&[]), Redis::start());
    for version in [2, 3] {
        let mut ours = Resp::to(&sidecar);
        let mut theirs = Resp::connect((redis.address, redis.port).into());
        for client in [&mut ours, &mut theirs] {
            client.ask(&format!("HELLO {version}"));
        }
        for text in SAME_BYTES {
            let [ours, theirs] = [&mut ours, &mut theirs].map(|client| {
                client.send(&line(text));
                client.receive_bytes()
            });
            assert_eq!(ours, theirs, "{text} in RESP{version}");
        }
    }
}

/// The types in a reply, without its texts and numbers. Of a set or a map, they are those of the first element.
fn shape(reply: &Reply) -> String {
    let first = |elements: &[Reply]| elements.first().map(shape).unwrap_or_default();
    match reply {
        Reply::Simple(_) => String::from("simple"),
        Reply::Error(text) => format!("error {}", text.split(' ').next().unwrap()),
        Reply::Integer(_) => String::from("integer"),
        Reply::Bulk(_) => String::from("bulk"),
        Reply::Verbatim(_) => String::from("verbatim"),
        Reply::Array(elements) => format!("[{}]", elements.iter().map(shape).collect::<Vec<_>>().join(" ")),
        Reply::Set(_) => String::from("set"),
        Reply::Map(pairs) => {
            format!(
                "map of {}",
                pairs.first().map(|(key, _)| first(std::slice::from_ref(key))).unwrap_or_default()
            )
        }
        Reply::Null => String::from("null"),
    }
}

#[test]
fn what_command_and_info_say_has_the_shape_of_redis() {
    let (sidecar, redis) = (start(&[]), Redis::start());
    // ROLE has neither flags nor keys in common with AW.ACK, but RESP2 shows them as arrays of any length.
    for (our_text, their_text) in [
        ("COMMAND COUNT", "COMMAND COUNT"),
        ("COMMAND DOCS aw.ack", "COMMAND DOCS get"),
        ("COMMAND GETKEYS aw.add 1", "COMMAND GETKEYS ping x"),
        ("INFO", "INFO"),
        ("INFO server", "INFO server"),
        ("INFO server replication", "INFO server replication"),
        ("CLIENT INFO", "CLIENT INFO"),
        ("CLIENT ID", "CLIENT ID"),
    ] {
        let mut ours = Resp::to(&sidecar);
        let mut theirs = Resp::connect((redis.address, redis.port).into());
        for client in [&mut ours, &mut theirs] {
            client.ask("HELLO 3");
        }
        assert_eq!(shape(&ours.ask(our_text)), shape(&theirs.ask(their_text)), "{our_text}");
    }
    let mut client = Resp::to(&sidecar);
    client.ask("HELLO 3");
    let mut theirs = Resp::connect((redis.address, redis.port).into());
    theirs.ask("HELLO 3");
    // Redis 7.0 shows two of the fields as empty sets, and 7.2 as arrays.
    let (ours, theirs) =
        (client.ask("COMMAND INFO aw.add nothing AW.STATUS"), theirs.ask("COMMAND INFO get nothing ping"));
    let field = |reply: &Reply, at: usize| shape(&reply.array()[0].array()[at]);
    for at in 0..10 {
        assert_eq!(field(&ours, at), field(&theirs, at), "field {at}");
    }
    assert_eq!((ours.array()[0].array().len(), &ours.array()[1]), (10, &Reply::Null));
    assert_eq!(
        (&ours.array()[0].array()[1], &ours.array()[2].array()[1]),
        (&Reply::Integer(-2), &Reply::Integer(1))
    );
    let names = client.ask("COMMAND LIST");
    assert_eq!(names.texts(), ["aw.add", "aw.del", "aw.get", "aw.take", "aw.ack", "aw.nack", "aw.status"]);
    for text in ["COMMAND", "COMMAND INFO"] {
        let all = client.ask(text);
        assert_eq!(
            all.array().iter().map(|one| one.array()[0].text()).collect::<Vec<_>>(),
            names.texts(),
            "{text}"
        );
    }
    let Reply::Map(docs) = client.ask("COMMAND DOCS aw.ack nothing") else { panic!("no map") };
    assert_eq!((docs.len(), docs[0].0.text()), (1, "aw.ack"));
    let Reply::Verbatim(server) = client.ask("INFO server") else { panic!("no text") };
    assert!(server.starts_with("# Server\r\n") && !server.contains("role:"), "{server}");
}
