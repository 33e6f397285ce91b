//! Limits the size of a reply, so that a faulty or hostile server cannot fill the memory of the sidecar.
//!
//! The `redis` crate collects a whole reply before it returns it, and has no limit. This reader follows the framing of
//! RESP while the bytes pass. It returns an error as soon as a length or the bytes themselves exceed the limit.
//!
//! The crate accepts more than RESP: white space around a length, and -1 as the length of an error. If both framings
//! differed, a server could hide a long reply. So this reader refuses each line that is not exactly RESP.

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

/// The maximum length of a line that contains a length, with its line end.
const MAX_LENGTH_LINE: usize = 32;

/// The maximum length of any other line. The `redis` crate scans an unfinished line again after each read, so a longer
/// one would take much processor time.
const MAX_LINE: usize = 64 * 1024;

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
    /// The beginning of the current line, at most [`MAX_LENGTH_LINE`] bytes.
    line: Vec<u8>,
    /// The length of the current line so far.
    line_length: usize,
    /// Whether the last byte of the current line is CR. A line ends only at CR LF.
    is_after_cr: bool,
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
            let end = self.end_of_line(bytes);
            let (line, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
            bytes = rest;
            self.charge(line.len() as u64)?;
            self.add_to_line(line)?;
            if end.is_some() {
                self.end_line()?;
            }
        }
        Ok(())
    }

    /// Returns the position after the first CR LF. The CR may be the last byte of the previous read.
    fn end_of_line(&self, bytes: &[u8]) -> Option<usize> {
        let mut before = if self.is_after_cr { b'\r' } else { 0 };
        let end = bytes.iter().position(|byte| std::mem::replace(&mut before, *byte) == b'\r' && *byte == b'\n');
        end.map(|end| end + 1)
    }

    fn add_to_line(&mut self, bytes: &[u8]) -> Result<(), String> {
        let room = MAX_LENGTH_LINE.saturating_sub(self.line.len()).min(bytes.len());
        self.line.extend_from_slice(bytes.get(..room).unwrap_or_default());
        self.line_length += bytes.len();
        self.is_after_cr = bytes.last() == Some(&b'\r');
        let most =
            if self.line.first().is_some_and(|kind| has_length(*kind)) { MAX_LENGTH_LINE } else { MAX_LINE };
        if self.line_length <= most {
            return Ok(());
        }
        Err(format!("a line in a reply of the server is longer than {most} bytes: is it Redis?"))
    }

    fn end_line(&mut self) -> Result<(), String> {
        (self.line_length, self.is_after_cr) = (0, false);
        let line = std::mem::take(&mut self.line);
        let (kind, length) = line.strip_suffix(b"\r\n").unwrap_or(&line).split_first().unwrap_or((&0, &[]));
        if !has_length(*kind) {
            // The parser of the `redis` crate reports unknown types.
            self.end_value();
            return Ok(());
        }
        match (kind, parse_length(length)) {
            (b'$' | b'*' | b'~' | b'>', Some(Length::Missing))
            | (b'*' | b'~' | b'>' | b'%', Some(Length::Of(0))) => {
                self.end_value();
            }
            (b'$' | b'!' | b'=', Some(Length::Of(length))) => {
                self.string = length.saturating_add(2);
                self.charge(self.string)?;
            }
            (b'*' | b'~' | b'>', Some(Length::Of(count))) => self.begin(count)?,
            (b'%', Some(Length::Of(count))) => self.begin(count.saturating_mul(2))?,
            // The value that the attributes describe follows them.
            (b'|', Some(Length::Of(count))) => self.begin(count.saturating_mul(2).saturating_add(1))?,
            _ => return Err(String::from("a reply of the server has a wrong length: is it Redis?")),
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

/// Returns whether a line of this type contains a length.
fn has_length(kind: u8) -> bool {
    b"$!=*~>%|".contains(&kind)
}

/// The length in a line.
enum Length {
    /// -1: the value is missing.
    Missing,
    Of(u64),
}

/// Parses a length. Returns `None` if it is wrong.
fn parse_length(digits: &[u8]) -> Option<Length> {
    if digits == b"-1" {
        return Some(Length::Missing);
    }
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok().map(Length::Of)
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
        ] {
            let error = Reply::default().follow(reply.as_bytes()).err();
            let is_wrong_length = reply.contains(&u64::MAX.to_string());
            assert!(is_wrong_length || error.is_some_and(|error| error.contains("limit of 32 MiB")));
        }
        let many = format!("*1000\r\n{}", format!("+{}\r\n", "x".repeat(MAX_LINE - 3)).repeat(600));
        assert!(Reply::default().follow(many.as_bytes()).unwrap_err().contains("limit of 32 MiB"));
        let deep = follow("*1\r\n".repeat(MAX_DEPTH + 1).as_bytes()).unwrap_err();
        assert!(deep.contains("more than 32 arrays"), "{deep}");
    }
    #[test]
    fn a_reply_that_the_parser_could_frame_otherwise_is_refused() {
        for reply in [
            "!-1\r\n",
            "=-1\r\n",
            "%-1\r\n",
            "|-1\r\n",
            "$-2\r\n",
            "*-2\r\n",
            "$ 9999999999\r\n",
            "$9999999999 \r\n",
            "$+9\r\n",
            "$\t9\r\n",
            "$\r\n",
            "*x\r\n",
            "$9\n\r\n",
        ] {
            assert!(follow(format!("{reply}\r\n").as_bytes()).is_err(), "{reply:?}");
        }
        let padded = format!("${}9999999999\r\n", "0".repeat(40));
        assert!(follow(padded.as_bytes()).unwrap_err().contains("longer than 32 bytes"));
        assert_eq!(follow(b"$0000000000000000000000000003\r\nabc\r\n"), Ok(0));
    }

    #[test]
    fn a_line_ends_only_at_cr_lf_and_has_a_limit() {
        for line in ["+a\n$5\rb\r\r\n", "-a\n\n\r\n", "+\r\n"] {
            assert_eq!(follow(line.as_bytes()), Ok(0), "{line:?}");
        }
        let unfinished = format!("+{}", "x\n".repeat(MAX_LINE / 2 - 1));
        assert_eq!(follow(unfinished.as_bytes()), Ok(unfinished.len() as u64), "LF alone ends no line");
        let too_long = format!("+{}", "x\n".repeat(MAX_LINE / 2));
        assert!(follow(too_long.as_bytes()).unwrap_err().contains("longer than 65536 bytes"));
    }
}
