//! A bare echo: what wire and load generator can do where nobody does any work.
//!
//! It reads once, finds the ends of frames by their lengths, and answers each with a frame of the same size and
//! content, all in one write: a Ping becomes its Pong. Hello is answered as a sidecar would.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Stdio;

use ackwheel::protocol::frame::{DEFAULT_MAX_FRAME_LENGTH, FrameType, HEAD_LENGTH, Welcome};
use ackwheel::protocol::{Body, Codec, Frame};
use anyhow::Context;
use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::child::{Child, end_with_stdin, first_line};

/// Bytes that are read at once.
const READ: usize = 64 * 1_024;

/// An answer has the type of its request with this bit set.
const IS_ANSWER: u8 = 0x80;

/// An echo server in a process of its own.
#[derive(Debug)]
pub struct Echo {
    _process: Child,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Echo {
    /// Starts it.
    ///
    /// # Errors
    ///
    /// When it does not start.
    pub fn start() -> anyhow::Result<Echo> {
        let mut process = Child::in_role(&["echo"], |command| {
            command.stdout(Stdio::piped());
        })?;
        let line = first_line(process.stdout().context("its output is piped")?)?;
        Ok(Echo { address: line.parse()?, _process: process })
    }
}

/// Serves, and prints where, until stdin ends.
///
/// # Errors
///
/// When it cannot listen.
pub fn serve() -> anyhow::Result<()> {
    end_with_stdin();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let mut stdout = std::io::stdout();
        writeln!(stdout, "{}", listener.local_addr()?)?;
        stdout.flush()?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            // A connection that breaks is one that its client is done with.
            tokio::spawn(async { echo(stream).await.unwrap_or_default() });
        }
    })
}

async fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    let mut input = vec![0; READ];
    let (mut filled, mut output) = (0, Vec::with_capacity(READ));
    loop {
        if filled == input.len() {
            input.resize(2 * filled, 0);
        }
        let count = stream.read(&mut input[filled..]).await?;
        if count == 0 {
            return Ok(());
        }
        filled += count;
        let mut done = 0;
        while let Some(length) = frame_length(&input[done..filled]) {
            answer(&input[done..done + length], &mut output);
            done += length;
        }
        input.copy_within(done..filled, 0);
        filled -= done;
        stream.write_all(&output).await?;
        output.clear();
    }
}

/// Bytes of the first frame, if all of it is there.
fn frame_length(input: &[u8]) -> Option<usize> {
    let length: [u8; 4] = input.get(..4)?.try_into().ok()?;
    let length = 4 + u32::from_be_bytes(length) as usize;
    (HEAD_LENGTH <= length && length <= input.len()).then_some(length)
}

fn answer(frame: &[u8], output: &mut Vec<u8>) {
    if frame[4] == FrameType::Hello as u8 {
        let correlation = u32::from_be_bytes([frame[8], frame[9], frame[10], frame[11]]);
        let mut welcome = BytesMut::new();
        Codec::new(DEFAULT_MAX_FRAME_LENGTH).encode_frame(&Frame::new(correlation, self::welcome()), &mut welcome);
        return output.extend_from_slice(&welcome);
    }
    let start = output.len();
    output.extend_from_slice(frame);
    output[start + 4] |= IS_ANSWER;
}

fn welcome() -> Body {
    Body::Welcome(Welcome {
        version: 1,
        slots: 15,
        tick_ms: 1_000,
        max_frame_length: DEFAULT_MAX_FRAME_LENGTH,
        max_messages: 32_768,
        max_credit: 1,
        ping_interval_ms: 10_000,
        store: String::from("none"),
        server_name: String::from("echo"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ping_becomes_its_pong() {
        let codec = Codec::new(DEFAULT_MAX_FRAME_LENGTH);
        let (mut ping, mut pong) = (BytesMut::new(), BytesMut::new());
        codec.encode_frame(&Frame::new(7, Body::Ping(vec![1, 2, 3])), &mut ping);
        codec.encode_frame(&Frame::new(7, Body::Pong(vec![1, 2, 3])), &mut pong);
        let mut output = Vec::new();
        answer(&ping, &mut output);
        assert_eq!(output, pong);
        assert_eq!((frame_length(&ping), frame_length(&ping[..ping.len() - 1])), (Some(ping.len()), None));
    }
}
