//! A connection to the RESP listener that may end at any moment.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::peer::{GREETING, LOOK, read_until};
use crate::support::resp::{Reply, Taken, command, parse};

pub struct RespPeer {
    stream: TcpStream,
    input: Vec<u8>,
    /// An answer did not come, or the sidecar drains: nothing more is asked over this connection.
    pub is_over: bool,
}

impl RespPeer {
    /// A connection that a PING has tried; none where nobody answers.
    pub fn connected(address: SocketAddr) -> Option<RespPeer> {
        let stream = TcpStream::connect_timeout(&address, GREETING).ok()?;
        stream.set_nodelay(true).ok()?;
        let mut peer = RespPeer { stream, input: Vec::new(), is_over: false };
        let pong = peer.ask(&[command(&["PING"])], GREETING, || true);
        (pong == [Reply::Simple(String::from("PONG"))]).then_some(peer)
    }

    /// Sends a pipeline of commands and returns the replies, of which the last ones may be missing.
    pub fn ask(&mut self, commands: &[Vec<u8>], patience: Duration, is_reached: impl Fn() -> bool) -> Vec<Reply> {
        let mut replies = Vec::with_capacity(commands.len());
        let deadline = Instant::now() + patience;
        let mut goes_on = self.stream.write_all(&commands.concat()).is_ok();
        while goes_on && replies.len() < commands.len() {
            let look = (Instant::now() + LOOK).min(deadline);
            goes_on = match read_until(&mut self.stream, &mut self.input, look) {
                Some(0) => false,
                Some(_) => true,
                None => Instant::now() < deadline && is_reached(),
            };
            let mut rest = &self.input[..];
            let mut parsed = 0;
            while let Some(reply) = parse(&mut rest) {
                parsed = self.input.len() - rest.len();
                replies.push(reply);
            }
            self.input.drain(..parsed);
        }
        let drains =
            replies.iter().any(|reply| matches!(reply, Reply::Error(text) if text.starts_with("DRAINING")));
        self.is_over |= replies.len() < commands.len() || drains;
        replies
    }

    /// Takes batches; none where the sidecar refuses, or the connection has ended.
    pub fn take(
        &mut self,
        group: &str,
        options: &[&str],
        block: Duration,
        is_reached: impl Fn() -> bool,
    ) -> Option<Vec<Taken>> {
        let block_ms = block.as_millis().to_string();
        let take = command(&[&["AW.TAKE", group, "BLOCK", &block_ms], options].concat());
        match &self.ask(&[take], block + GREETING, is_reached)[..] {
            [batches @ Reply::Array(_)] => Some(batches.batches()),
            _ => None,
        }
    }
}
