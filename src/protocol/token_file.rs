//! Splits a file of tokens into lines. Client and server share it, so one file can serve both.
//!
//! A line is `[NAME:]TOKEN [RIGHT...]`. Blank lines and lines that begin with `#` are ignored.

use super::frame::MAX_TOKEN_LENGTH;

/// A line with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenLine<'a> {
    /// The number of the line, from 1.
    pub(crate) number: usize,
    /// The bytes before the first colon, if there is one.
    pub(crate) name: Option<&'a [u8]>,
    pub(crate) token: &'a [u8],
    /// The words after the token.
    pub(crate) rights: &'a [u8],
}

/// Returns the lines of a file that have a token.
pub(crate) fn token_lines(bytes: &[u8]) -> impl Iterator<Item = TokenLine<'_>> {
    let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
    (1..).zip(bytes.split(|byte| *byte == b'\n')).filter_map(|(number, line)| {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            return None;
        }
        let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
        let (word, rights) = line.split_at(end);
        let (name, token) = match word.iter().position(|byte| *byte == b':') {
            Some(colon) => (Some(&word[..colon]), &word[colon + 1..]),
            None => (None, word),
        };
        Some(TokenLine { number, name, token, rights })
    })
}

/// Returns the first token of a file, which is the one that a client presents.
///
/// # Errors
///
/// If there is no token, or if it is too short or too long.
pub(crate) fn first_token(bytes: &[u8]) -> Result<&[u8], String> {
    let token = token_lines(bytes).next().map_or(&b""[..], |line| line.token);
    if (1..=MAX_TOKEN_LENGTH).contains(&token.len()) {
        return Ok(token);
    }
    Err(format!("a token has 1 to {MAX_TOKEN_LENGTH} bytes, and this file begins with one of {}", token.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_token_and_may_have_a_name_and_rights() {
        let text = "\u{feff}# the nodes\r\n\r\n  plain \r\nnode-7:se:cret\tproduce, consume\n:\n";
        let lines: Vec<TokenLine> = token_lines(text.as_bytes()).collect();
        let line = |number, name, token, rights| TokenLine { number, name, token, rights };
        assert_eq!(lines[0], line(3, None, b"plain", b""));
        assert_eq!(lines[1], line(4, Some(&b"node-7"[..]), b"se:cret", b"\tproduce, consume"));
        assert_eq!(lines[2], line(5, Some(&b""[..]), b"", b""));
    }
}
