//! Bytes that are no commands, and peers that wear out.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use crate::support::frames;
use crate::support::resp::{Reply, Resp, command, line, start};
use crate::support::wait_until;

#[test]
fn bytes_that_are_no_command_end_the_connection_with_an_error() {
    let sidecar = start(&[]);
    for (bytes, reply) in [
        (&b"*1\r\n*1\r\n"[..], "-ERR Protocol error: expected '$', got '*'\r\n"),
        (b"*9999999999999999999\r\n", "-ERR Protocol error: invalid multibulk length\r\n"),
        (
            b"*1\r\n$9223372036854775807\r\n",
            "-ERR Protocol error: invalid bulk length: an argument has at most 4096 bytes here\r\n",
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\n\r\nAW.ADD 1\r\n", ""),
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "-ERR unknown command 'GET', with args beginning with: '/' 'HTTP/1.1' \r\n",
        ),
        (b"\x16\x03\x01\x02\x00\x01", ""),
        (&frames::hello((1, 1), b"").bytes(1), ""),
    ] {
        let mut client = Resp::to(&sidecar);
        client.send(bytes);
        assert_eq!(String::from_utf8(client.rest()).unwrap(), reply, "{}", bytes.escape_ascii());
    }
    let log = sidecar.log();
    for text in
        ["an HTTP request came to --resp", "a TLS handshake came to --resp", "a client of the native protocol"]
    {
        wait_until(text, || log.text().contains(text));
    }
    assert_eq!(Resp::to(&sidecar).ask("AW.DEL 1").texts(), ["unknown"], "the body of the request was not applied");
}

#[test]
fn an_error_follows_the_replies_to_all_commands_before_it() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client.send(
        &[line("AW.ADD 1"), line("AW.TAKE default BLOCK 0"), line("PING"), b"*1\r\n:1\r\n".to_vec()].concat(),
    );
    assert_eq!(client.receive().array()[0], Reply::Integer(1));
    assert_eq!(client.receive(), Reply::Array(Vec::new()));
    assert_eq!(client.receive().text(), "PONG");
    client.receive().assert_error("ERR Protocol error: expected '$', got ':'");
    assert_eq!(client.rest(), b"");
}

#[test]
fn commands_that_are_not_of_ackwheel_have_few_arguments() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    for name in ["INFO", "COMMAND", "CLIENT", "HELLO", "CONFIG", "MSET"] {
        let many = |count: usize| [&[name, "GET"][..], &vec!["x"; count - 2]].concat();
        client.send(&command(&many(64)));
        let few = client.receive();
        client.send(&command(&many(65)));
        let reply = client.receive();
        reply.assert_error("ERR too many arguments");
        assert_ne!(few, reply, "{name}");
        client.send(&command(&many(32_000)));
        assert_eq!(client.receive(), reply);
    }
}

#[test]
fn three_hundred_hostile_connections_cost_little_memory_and_delay_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "0123456789abcdef-all").unwrap();
    let flags = ["--token-file", path.to_str().unwrap(), "--threads", "1"];
    let sidecar = start(&flags);
    let resident = || sidecar.metrics().find("process_resident_memory_bytes").unwrap();
    let mut victim = Resp::to(&sidecar);
    victim.ask("AUTH 0123456789abcdef-all");
    victim.ask("AW.ADD 7");
    let before = resident();
    let megabyte = vec![b'x'; 1_048_576];
    let mut open: Vec<TcpStream> = Vec::new();
    for index in 0..300 {
        let mut stream = TcpStream::connect(sidecar.resp.unwrap()).unwrap();
        stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let bytes = match index % 10 {
            0 => b"*1\r\n".repeat(8_192),
            1 => b"*2\r\n$9223372036854775807\r\n".to_vec(),
            2 => b"*3\r\n$4\r\nAUT".to_vec(),
            3 => b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            4 => vec![0x16, 3, 1, 2, 0, 1],
            5 => frames::hello((1, 1), b"x").bytes(1),
            6 => line("PING").repeat(20_000),
            7 => megabyte.clone(),
            8 => [&b"*2\r\n$4\r\nAUTH\r\n$1048576\r\n"[..], &megabyte].concat(),
            _ => [&b"*10\r\n"[..], &[&b"$1000\r\n"[..], &megabyte[..1_000], b"\r\n"].concat().repeat(9)].concat(),
        };
        let _ = stream.write_all(&bytes);
        open.push(stream);
    }
    assert_eq!(victim.ask("AW.DEL 7").texts(), ["acked"]);
    let grown = resident() - before;
    assert!(grown < 64.0 * 1_048_576.0, "grew by {grown} bytes");
    drop(open);
    assert_eq!(victim.ask("PING").text(), "PONG");
}
