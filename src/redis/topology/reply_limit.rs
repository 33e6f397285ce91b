//! Limits the size of a reply, so that a faulty or hostile server cannot fill the memory of the sidecar.
//!
//! The `redis` crate collects a whole reply before it returns it, and has no limit. This reader follows the framing of
//! RESP while the bytes pass. It returns an error as soon as a length or the bytes themselves exceed the limit.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The maximum size of one reply in bytes. The largest reply that ackwheel asks for, 16 full batches, is below 8 MiB.
const MAX_REPLY: u64 = 32 * 1024 * 1024;

/// The cost of an element of an array in addition to its bytes: the memory of the parsed element.
const COST_OF_ELEMENT: u64 = 64;

/// The maximum number of arrays within each other.
const MAX_DEPTH: usize = 32;

/// The maximum length of a line that begins with a length.
const MAX_LENGTH_LINE: usize = 32;

/// A stream whose replies are limited.
pub(super) struct LimitedReplies<S> {
    stream: S,
    reply: Reply,
}

impl<S> LimitedReplies<S> {
    pub(super) fn new(stream: S) -> LimitedReplies<S> {
        LimitedReplies { stream, reply: Reply::default() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedReplies<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let read = buf.filled().get(before..).unwrap_or_default();
        Poll::Ready(self.reply.follow(read).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedReplies<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The position in the current reply.
#[derive(Debug, Default)]
struct Reply {
    /// The bytes of this reply so far, and those that its lengths announce.
    used: u64,
    /// For each array that has begun and not ended: the number of elements that are missing.
    open: Vec<u64>,
    /// The beginning of the current line.
    line: Vec<u8>,
    /// How many bytes of a string, with its line end, are missing.
    string: u64,
}

impl Reply {
    /// Follows the framing over the next bytes.
    fn follow(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            if self.string > 0 {
                let length = usize::try_from(self.string).map_or(bytes.len(), |string| string.min(bytes.len()));
                bytes = bytes.get(length..).unwrap_or_default();
                self.string -= length as u64;
                if self.string == 0 {
                    self.end_value();
                }
                continue;
            }
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let (line, rest) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
            bytes = rest;
            self.charge(line.len() as u64)?;
            let room = MAX_LENGTH_LINE.saturating_sub(self.line.len()).min(line.len());
            self.line.extend_from_slice(line.get(..room).unwrap_or_default());
            if end.is_some() {
                self.end_line()?;
            }
        }
        Ok(())
    }

    fn end_line(&mut self) -> Result<(), String> {
        let line = std::mem::take(&mut self.line);
        let (kind, rest) = line.split_first().unwrap_or((&b'+', &[]));
        let number = std::str::from_utf8(rest).ok().and_then(|rest| rest.trim_end().parse::<i64>().ok());
        // A length below 0 is a missing value. The parser of the `redis` crate reports other wrong lengths.
        let number = number.and_then(|number| u64::try_from(number).ok());
        match (kind, number) {
            (b'$' | b'!' | b'=', Some(length)) => {
                self.string = length.saturating_add(2);
                self.charge(self.string)?;
            }
            (b'*' | b'~' | b'>', Some(count @ 1..)) => self.begin(count)?,
            (b'%', Some(count @ 1..)) => self.begin(count.saturating_mul(2))?,
            // The value that the attributes describe follows them.
            (b'|', Some(count)) => self.begin(count.saturating_mul(2).saturating_add(1))?,
            _ => self.end_value(),
        }
        Ok(())
    }

    fn begin(&mut self, elements: u64) -> Result<(), String> {
        if self.open.len() == MAX_DEPTH {
            return Err(format!("a reply of the server has more than {MAX_DEPTH} arrays within each other"));
        }
        self.open.push(elements);
        self.charge(elements.saturating_mul(COST_OF_ELEMENT))
    }

    fn end_value(&mut self) {
        while let Some(missing) = self.open.last_mut() {
            *missing -= 1;
            if *missing > 0 {
                return;
            }
            self.open.pop();
        }
        self.used = 0;
    }

    fn charge(&mut self, bytes: u64) -> Result<(), String> {
        self.used = self.used.saturating_add(bytes);
        if self.used <= MAX_REPLY {
            return Ok(());
        }
        Err(format!(
            "a reply of the server exceeds the limit of {} MiB: is it Redis, and does another program write to \
             ackwheel's keys?",
            MAX_REPLY / 1024 / 1024
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Follows bytes in one piece and byte by byte, which must give the same result.
    fn follow(bytes: &[u8]) -> Result<u64, String> {
        let (mut whole, mut single) = (Reply::default(), Reply::default());
        let result = whole.follow(bytes);
        assert_eq!(result, bytes.chunks(1).try_for_each(|byte| single.follow(byte)));
        result.map(|()| {
            assert_eq!(whole.used, single.used);
            whole.used
        })
    }

    #[test]
    fn whole_replies_of_every_type_use_nothing_afterwards() {
        for reply in [
            "+OK\r\n",
            "-ERR x\r\n",
            ":1\r\n",
            ",1.5\r\n",
            "_\r\n",
            "#t\r\n",
            "(123\r\n",
            "$-1\r\n",
            "*-1\r\n",
            "*0\r\n",
            "$0\r\n\r\n",
            "$3\r\na\nb\r\n",
            "!5\r\nERR x\r\n",
            "=5\r\ntxt:x\r\n",
            "*2\r\n*1\r\n:1\r\n$1\r\nx\r\n",
            "%1\r\n+a\r\n*2\r\n:1\r\n:2\r\n",
            "~1\r\n:1\r\n",
            ">2\r\n+a\r\n+b\r\n",
            "|1\r\n+a\r\n+b\r\n:7\r\n",
            "*1\r\n|1\r\n+a\r\n+b\r\n:7\r\n",
        ] {
            assert_eq!(follow(reply.as_bytes()), Ok(0), "{reply:?}");
            assert_eq!(follow(reply.repeat(2).as_bytes()), Ok(0), "{reply:?}");
            assert_ne!(follow(&reply.as_bytes()[..reply.len() - 1]), Ok(0), "{reply:?}");
        }
    }

    #[test]
    fn a_reply_beyond_the_limit_ends_at_its_length() {
        let most = MAX_REPLY - 2 - 11;
        assert!(follow(format!("${most}\r\n").as_bytes()).is_ok());
        for reply in [
            format!("${}\r\n", most + 1),
            String::from("$2000000000\r\n"),
            format!("${}\r\n", u64::MAX),
            format!("*{}\r\n", i64::MAX),
            format!("%{}\r\n", i64::MAX),
            format!("*2\r\n$20000000\r\n{}\r\n$20000000\r\n", "x".repeat(20_000_000)),
            format!("+{}", "x".repeat(40_000_000)),
        ] {
            let error = Reply::default().follow(reply.as_bytes()).err();
            let is_wrong_length = reply.contains(&u64::MAX.to_string());
            assert!(is_wrong_length || error.is_some_and(|error| error.contains("limit of 32 MiB")));
        }
        let deep = follow("*1\r\n".repeat(MAX_DEPTH + 1).as_bytes()).unwrap_err();
        assert!(deep.contains("more than 32 arrays"), "{deep}");
    }
}
