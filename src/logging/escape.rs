//! Escapes characters in log lines that could forge a line or control a terminal: text in a line may come from outside.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

use super::writer::LogWriter;

/// Escapes each line and gives it to the [`LogWriter`]. Each call of `write` is one line.
pub(super) struct EscapingWriter {
    pub(super) writer: LogWriter,
    /// Whether lines are JSON and not text.
    pub(super) is_json: bool,
    /// Whether the formatter itself writes colours, which then stay.
    pub(super) has_colours: bool,
}

impl Write for EscapingWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        self.writer.write_all(escaped(&text, self.is_json, self.has_colours).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// Returns a line with escapes in place of control characters (C0, DEL and C1) and of characters that change the
/// direction of text. The newline at the end stays.
pub(super) fn escaped(line: &str, is_json: bool, has_colours: bool) -> Cow<'_, str> {
    let (body, end) = line.strip_suffix('\n').map_or((line, ""), |body| (body, "\n"));
    if !body.contains(is_dangerous) {
        return Cow::Borrowed(line);
    }
    let mut text = String::with_capacity(line.len() + 16);
    for (at, one) in body.char_indices() {
        match (one, is_json) {
            ('\x1b', false) if has_colours && is_colour(&body[at..]) => text.push(one),
            (one, false) if is_dangerous(one) => text.extend(one.escape_default()),
            // In JSON, such a character can only be in a string.
            (one, true) if is_dangerous(one) => drop(write!(text, "\\u{:04x}", u32::from(one))),
            (one, _) => text.push(one),
        }
    }
    text.push_str(end);
    Cow::Owned(text)
}

/// Returns whether a text begins with an escape sequence that only sets a colour or a style. The formatter writes them
/// itself, and escapes those in fields.
fn is_colour(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("\x1b[") else { return false };
    rest.trim_start_matches(|one: char| one.is_ascii_digit() || one == ';').starts_with('m')
}

fn is_dangerous(one: char) -> bool {
    one.is_control()
        || matches!(one, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_forge_lines_or_control_terminals_are_escaped() {
        for (line, has_colours, expected) in [
            ("plain ü 中\n", false, "plain ü 中\n"),
            ("a\nb\r\n", false, "a\\nb\\r\n"),
            ("\x1b[31mred\x7f\u{9b}\u{202e}\u{2028}\n", false, "\\u{1b}[31mred\\u{7f}\\u{9b}\\u{202e}\\u{2028}\n"),
            (
                "\x1b[2mdim\x1b[0m\x1b]0;title\x07\x1b[2J\n",
                true,
                "\x1b[2mdim\x1b[0m\\u{1b}]0;title\\u{7}\\u{1b}[2J\n",
            ),
        ] {
            assert_eq!(escaped(line, false, has_colours), expected);
        }
        let json = "{\"text\":\"\x7f\u{85}\u{2066}\"}\n";
        assert_eq!(escaped(json, true, false), "{\"text\":\"\\u007f\\u0085\\u2066\"}\n");
    }
}
