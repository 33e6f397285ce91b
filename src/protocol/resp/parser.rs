//! Splits the bytes of a client into commands: arrays of bulk strings, and inline lines.
//!
//! The parser keeps its place between two reads, so a command that arrives in many pieces costs no more than one that
//! arrives whole. It copies nothing: the arguments are ranges of the input. It is iterative, and refuses nested arrays.

use std::mem;
use std::ops::Range;

use super::super::frame::MAX_MESSAGES;

/// The maximum length of a line with a count or a length, such as `*3` or `$12`.
const MAX_HEADER: usize = 32;

/// The maximum length of an inline line.
const MAX_INLINE: usize = 4 * 1_024;

/// The largest number of arguments for which a connection keeps memory.
const MAX_KEPT: usize = 256;

/// The limits of a command.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The maximum length of the whole command, in bytes.
    pub command: usize,
    /// The maximum length of an argument, in bytes.
    pub argument: usize,
    /// The maximum number of arguments, with the name of the command.
    pub arguments: usize,
}

impl Limits {
    /// The limits before a client is admitted.
    pub const GREETING: Limits = Limits { command: 4 * 1_024, argument: 1_100, arguments: 10 };

    /// The limits of an admitted client. The largest command is an AW.ADD with its options.
    pub const ADMITTED: Limits =
        Limits { command: 2 * 1_024 * 1_024, argument: 4 * 1_024, arguments: MAX_MESSAGES + 8 };
}

/// The reason why bytes are not a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The bytes are the beginning of a TLS handshake.
    #[error("Protocol error: a TLS handshake")]
    Tls,
    /// The bytes are the beginning of a frame of the native protocol.
    #[error("Protocol error: a frame of the native protocol")]
    Native,
    /// The bytes are of no known protocol.
    #[error("Protocol error: {0}")]
    Other(String),
}

impl ProtocolError {
    fn new(text: impl Into<String>) -> ProtocolError {
        ProtocolError::Other(text.into())
    }
}

/// The state of the command at the front of the input.
#[derive(Debug)]
pub struct Parser {
    limits: Limits,
    /// The bytes of the command that need not be looked at again.
    scanned: usize,
    /// The number of arguments that the command has. `None` before its first line is read.
    count: Option<usize>,
    arguments: Vec<Range<usize>>,
    is_inline: bool,
}

impl Parser {
    /// Creates a parser for the first command of an input.
    pub fn new(limits: Limits) -> Parser {
        Parser { limits, scanned: 0, count: None, arguments: Vec::new(), is_inline: false }
    }

    /// Changes the limits of the next commands.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Parses the command at the front of `input`. Returns its length, or `None` if it is incomplete; the next call must
    /// then pass the same bytes and further ones. After a complete command, [`Parser::arguments`] has its arguments, and
    /// the next call must pass the bytes that follow it. A command without arguments is to be ignored.
    ///
    /// # Errors
    ///
    /// If the bytes are not a command, or exceed a limit. The connection must then be closed.
    pub fn parse(&mut self, input: &[u8]) -> Result<Option<usize>, ProtocolError> {
        if self.count.is_none() && self.scanned == 0 {
            self.is_inline = false;
            self.arguments.clear();
        }
        let count = match (self.count, input.first()) {
            (Some(count), _) => count,
            (None, None) => return Ok(None),
            (None, Some(b'*')) => {
                let Some((count, length)) = number(input, b'*', "multibulk")? else { return Ok(None) };
                // A negative count is an empty command, as in Redis.
                let count = usize::try_from(count).unwrap_or_default();
                if count > self.limits.arguments {
                    return Err(ProtocolError::new(format!(
                        "invalid multibulk length: at most {} arguments are accepted here",
                        self.limits.arguments
                    )));
                }
                (self.count, self.scanned) = (Some(count), length);
                count
            }
            (None, Some(0x16)) => return Err(ProtocolError::Tls),
            (None, Some(0)) => return Err(ProtocolError::Native),
            (None, Some(_)) => return self.parse_inline(input),
        };
        while self.arguments.len() < count {
            let Some(rest) = input.get(self.scanned..).filter(|rest| !rest.is_empty()) else { return Ok(None) };
            if rest[0] != b'$' {
                return Err(ProtocolError::new(format!("expected '$', got '{}'", rest[0].escape_ascii())));
            }
            let Some((length, header)) = number(rest, b'$', "bulk")? else { return Ok(None) };
            let length = usize::try_from(length).ok().filter(|length| *length <= self.limits.argument);
            let Some(length) = length else {
                return Err(ProtocolError::new(format!(
                    "invalid bulk length: an argument has at most {} bytes here",
                    self.limits.argument
                )));
            };
            let (begin, end) = (self.scanned + header, self.scanned + header + length);
            if end + 2 > self.limits.command {
                return Err(ProtocolError::new(format!(
                    "too big command: at most {} bytes are accepted here; send several commands",
                    self.limits.command
                )));
            }
            match input.get(end..end + 2) {
                None => return Ok(None),
                Some(b"\r\n") => {}
                Some(_) => return Err(ProtocolError::new("a bulk string is not followed by CR LF")),
            }
            self.arguments.push(begin..end);
            self.scanned = end + 2;
        }
        let length = self.scanned;
        (self.count, self.scanned) = (None, 0);
        Ok(Some(length))
    }

    /// Parses a line whose words are the arguments.
    fn parse_inline(&mut self, input: &[u8]) -> Result<Option<usize>, ProtocolError> {
        self.is_inline = true;
        let most = input.len().min(MAX_INLINE.min(self.limits.command));
        let Some(line) = input[self.scanned..most].iter().position(|byte| *byte == b'\n') else {
            if most < input.len() || most == MAX_INLINE {
                return Err(ProtocolError::new("too big inline request"));
            }
            self.scanned = most;
            return Ok(None);
        };
        let end = self.scanned + line;
        let mut at = 0;
        while at <= end {
            if input[at].is_ascii_whitespace() {
                at += 1;
                continue;
            }
            let (word, next) = inline_word(&input[..=end], at)?;
            if self.arguments.len() == self.limits.arguments || word.len() > self.limits.argument {
                return Err(ProtocolError::new("too big inline request"));
            }
            self.arguments.push(word);
            at = next;
        }
        self.scanned = 0;
        Ok(Some(end + 1))
    }

    /// Returns the arguments of the command that was parsed last, as ranges of its bytes.
    pub fn arguments(&self) -> &[Range<usize>] {
        &self.arguments
    }

    /// Takes the arguments of the command that was parsed last. The caller should return the vector, so that its memory
    /// is used again.
    pub fn take_arguments(&mut self) -> Vec<Range<usize>> {
        mem::take(&mut self.arguments)
    }

    /// Returns a vector of [`Parser::take_arguments`]. Frees it if it is large.
    pub fn return_arguments(&mut self, mut arguments: Vec<Range<usize>>) {
        if arguments.capacity() <= MAX_KEPT {
            arguments.clear();
            self.arguments = arguments;
        }
    }

    /// Returns the memory of the arguments, in bytes.
    pub fn bytes(&self) -> usize {
        self.arguments.capacity() * size_of::<Range<usize>>()
    }

    /// Returns whether the command that was parsed last is an inline line.
    pub fn is_inline(&self) -> bool {
        self.is_inline
    }
}

/// Returns the word at `begin` of a line, and the index behind it. A word may stand in quotes.
fn inline_word(line: &[u8], begin: usize) -> Result<(Range<usize>, usize), ProtocolError> {
    let find = |from: usize, is_end: &dyn Fn(&u8) -> bool| {
        line[from..].iter().position(is_end).map(|length| from + length)
    };
    let quote = line[begin];
    if !matches!(quote, b'"' | b'\'') {
        let end = find(begin, &u8::is_ascii_whitespace).unwrap_or(line.len());
        return Ok((begin..end, end));
    }
    let unbalanced = || ProtocolError::new("unbalanced quotes in request");
    let end = find(begin + 1, &|byte| *byte == quote).ok_or_else(unbalanced)?;
    if !line.get(end + 1).is_none_or(u8::is_ascii_whitespace) {
        return Err(unbalanced());
    }
    if quote == b'"' && line[begin..end].contains(&b'\\') {
        return Err(ProtocolError::new(
            "an inline request with a backslash in quotes: send an array of bulk strings",
        ));
    }
    Ok((begin + 1..end, end + 1))
}

/// Parses a line with a number behind a byte: a count or a length. Returns the number and the length of the line, or
/// `None` if the line is incomplete.
fn number(input: &[u8], first: u8, what: &str) -> Result<Option<(i64, usize)>, ProtocolError> {
    debug_assert_eq!(input.first(), Some(&first));
    let invalid = || ProtocolError::new(format!("invalid {what} length"));
    let mut number: i64 = 0;
    let is_negative = input.get(1) == Some(&b'-');
    let begin = if is_negative { 2 } else { 1 };
    for (at, byte) in input.iter().enumerate().take(MAX_HEADER).skip(begin) {
        match byte {
            b'0'..=b'9' => {
                let digit = i64::from(byte - b'0');
                number =
                    number.checked_mul(10).and_then(|number| number.checked_add(digit)).ok_or_else(invalid)?;
            }
            b'\r' if at > begin => {
                return match input.get(at + 1) {
                    None => Ok(None),
                    Some(b'\n') => Ok(Some((if is_negative { -number } else { number }, at + 2))),
                    Some(_) => Err(invalid()),
                };
            }
            _ => return Err(invalid()),
        }
    }
    if input.len() >= MAX_HEADER { Err(invalid()) } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use redis_protocol::resp2::decode::decode;
    use redis_protocol::resp2::types::OwnedFrame;

    use super::*;

    /// Parses all commands in an input that arrives in pieces of `piece` bytes.
    fn commands(input: &[u8], piece: usize) -> Result<Vec<Vec<Vec<u8>>>, ProtocolError> {
        let (mut parser, mut commands) = (Parser::new(Limits::ADMITTED), Vec::new());
        let (mut received, mut begin) = (0, 0);
        while received < input.len() {
            received = (received + piece).min(input.len());
            while let Some(length) = parser.parse(&input[begin..received])? {
                let command = &input[begin..begin + length];
                commands.push(parser.arguments().iter().map(|range| command[range.clone()].to_vec()).collect());
                begin += length;
            }
        }
        Ok(commands)
    }

    #[test]
    fn a_command_is_the_same_in_whatever_pieces_it_arrives() {
        let input = b"*2\r\n$6\r\nAW.ADD\r\n$5\r\n101:7\r\nPING  x \r\n\r\nAUTH \"my token\" 'b'\r\n*0\r\n*-1\r\n*1\r\n$0\r\n\r\nquit\n";
        let whole = commands(input, input.len()).unwrap();
        let words: Vec<Vec<&[u8]>> =
            whole.iter().map(|command| command.iter().map(|word| &word[..]).collect()).collect();
        assert_eq!(
            words,
            [
                vec![&b"AW.ADD"[..], b"101:7"],
                vec![b"PING", b"x"],
                vec![],
                vec![b"AUTH", b"my token", b"b"],
                vec![],
                vec![],
                vec![b""],
                vec![b"quit"]
            ]
        );
        for piece in 1..input.len() {
            assert_eq!(commands(input, piece).unwrap(), whole, "pieces of {piece}");
        }
    }

    /// The length and the arguments of a command.
    type Parsed = (usize, Vec<Vec<u8>>);

    /// The first command by the crate redis-protocol, or none where it needs more bytes.
    ///
    /// Frames other than arrays of bulk strings are errors here.
    fn by_the_oracle(input: &[u8]) -> Result<Option<Parsed>, ()> {
        let words = |frames: Vec<OwnedFrame>| -> Result<Vec<_>, ()> {
            frames
                .into_iter()
                .map(|frame| match frame {
                    OwnedFrame::BulkString(word) => Ok(word),
                    _ => Err(()),
                })
                .collect()
        };
        match decode(input) {
            Ok(None) => Ok(None),
            Ok(Some((OwnedFrame::Array(frames), length))) => Ok(Some((length, words(frames)?))),
            Ok(Some(_)) | Err(_) => Err(()),
        }
    }

    /// Commands as client libraries send them, of which some bytes are then changed.
    fn nearly_commands() -> impl Strategy<Value = Vec<u8>> {
        let word = prop::collection::vec(any::<u8>(), 0..12);
        let commands = prop::collection::vec(prop::collection::vec(word, 1..5), 1..4);
        let change = (any::<prop::sample::Index>(), prop::sample::select(b"*$:-+0129\r\nx".to_vec()));
        (commands, prop::collection::vec(change, 0..3)).prop_map(|(commands, changes)| {
            let mut input = Vec::new();
            for words in commands {
                input.extend(format!("*{}\r\n", words.len()).into_bytes());
                for word in words {
                    input.extend(format!("${}\r\n", word.len()).into_bytes());
                    input.extend(&word);
                    input.extend(b"\r\n");
                }
            }
            for (at, byte) in changes {
                *at.get_mut(&mut input) = byte;
            }
            input
        })
    }

    proptest! {
        /// An accepted command is the same for the oracle, and both wait for the same bytes.
        #[test]
        fn commands_are_those_of_another_parser(input in nearly_commands()) {
            let (mut parser, mut rest) = (Parser::new(Limits::ADMITTED), &input[..]);
            // Inline lines are not known to the oracle.
            while rest.first() == Some(&b'*') {
                let parsed = parser.parse(rest).map(|length| {
                    length.map(|length| {
                        let words = parser.arguments().iter().map(|range| rest[range.clone()].to_vec());
                        (length, words.collect::<Vec<_>>())
                    })
                });
                match (parsed, by_the_oracle(rest)) {
                    (Ok(Some((length, words))), oracle) => {
                        // A null array is no command for either, and needs no oracle.
                        prop_assert!(words.is_empty() || oracle == Ok(Some((length, words))), "{oracle:?}");
                        rest = &rest[length..];
                    }
                    (Ok(None), oracle) => {
                        prop_assert!(!matches!(oracle, Ok(Some(_))), "{oracle:?}");
                        break;
                    }
                    // The oracle does not look at the bytes behind a bulk string.
                    (Err(_), _) => break,
                }
            }
        }
    }

    #[test]
    fn bytes_that_are_no_command_are_refused() {
        for (input, text) in [
            (&b"*1\r\n*1\r\n$4\r\nPING\r\n"[..], "expected '$', got '*'"),
            (b"*1\r\n:5\r\n", "expected '$', got ':'"),
            (b"*x\r\n", "invalid multibulk length"),
            (b"*\r\n", "invalid multibulk length"),
            (b"*9223372036854775808\r\n", "invalid multibulk length"),
            (b"*9223372036854775807\r\n", "invalid multibulk length: at most 32776 arguments are accepted here"),
            (b"*00000000000000000000000000000001\r\n", "invalid multibulk length"),
            (b"*1\r\n$-1\r\n", "invalid bulk length: an argument has at most 4096 bytes here"),
            (b"*1\r\n$4097\r\n", "invalid bulk length: an argument has at most 4096 bytes here"),
            (b"*1\r\n$1\r\nxy\r\n", "a bulk string is not followed by CR LF"),
            (b"*1\rx", "invalid multibulk length"),
            (b"AUTH \"secret\r\n", "unbalanced quotes in request"),
            (b"AUTH \"secret\"x\r\n", "unbalanced quotes in request"),
            (
                b"AUTH \"a\\x41\"\r\n",
                "an inline request with a backslash in quotes: send an array of bulk strings",
            ),
        ] {
            let error = commands(input, input.len()).unwrap_err();
            assert_eq!(error.to_string(), format!("Protocol error: {text}"), "{}", input.escape_ascii());
            assert_eq!(commands(input, 1).unwrap_err(), error, "byte by byte: {}", input.escape_ascii());
        }
    }

    #[test]
    fn long_lines_and_long_commands_are_refused() {
        let line = [b'x'; MAX_INLINE];
        assert_eq!(commands(&line, 1).unwrap_err().to_string(), "Protocol error: too big inline request");
        let mut input = b"*1000\r\n".to_vec();
        for _ in 0..1_000 {
            input.extend_from_slice(b"$4000\r\n");
            input.extend_from_slice(&[b'x'; 4_000]);
            input.extend_from_slice(b"\r\n");
        }
        assert!(commands(&input, 65_536).unwrap_err().to_string().contains("too big command"));
    }
}
