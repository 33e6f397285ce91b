//! Formats numbers, times and names for a terminal.

use std::fmt::Write;
use std::time::Duration;

use console::{Alignment, pad_str, truncate_str};
use indicatif::HumanCount;

/// The default width of a terminal, in columns.
pub(super) const COLUMNS: usize = 80;

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Formats a number in groups of three digits.
pub(super) fn whole(number: u64) -> String {
    HumanCount(number).to_string()
}

/// Formats a count with the words that follow it: `one` after 1, `many` after any other count.
pub(super) fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Formats a duration in one unit, rounded down, such as 9.9s, 59m or 2d.
pub(super) fn span(duration: Duration) -> String {
    match duration.as_secs() {
        0..10 => format!("{}.{}s", duration.as_secs(), duration.subsec_millis() / 100),
        seconds @ 10..MINUTE => format!("{seconds}s"),
        seconds @ MINUTE..HOUR => format!("{}m", seconds / MINUTE),
        seconds if seconds < 2 * DAY => format!("{}h", seconds / HOUR),
        seconds => format!("{}d", seconds / DAY),
    }
}

/// Formats a number of seconds like [`span`]. Returns a question mark if the number is no valid duration: in the JSON
/// of a server, it may be negative or too large.
pub(super) fn span_of_seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| String::from("?"), span)
}

/// Returns the character, or a question mark instead of one that controls a terminal or the direction of the text.
pub(super) fn plain(character: char) -> char {
    let turns_text = matches!(character, '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if character.is_control() || turns_text { '?' } else { character }
}

/// Makes JSON of a server fit for a terminal. In its strings, escapes stand in place of DEL, C1 control characters and
/// characters that change the direction of the text. JSON has C0 control characters only as white space between values:
/// a line end stays, and a space replaces each other one.
pub(super) fn escaped_json(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for one in json.chars() {
        match one {
            '\n' => text.push(one),
            '\0'..' ' => text.push(' '),
            one if plain(one) != one => {
                // Writing to a string does not fail.
                let _ = write!(text, "\\u{:04x}", u32::from(one));
            }
            one => text.push(one),
        }
    }
    text
}

/// Makes a text that may contain words of a server fit for a terminal: it stays on one line and controls nothing.
pub(super) fn escaped(text: &str) -> String {
    text.chars().map(plain).collect()
}

/// Cuts a name to at most `columns` columns of the terminal, and replaces control characters with question marks.
pub(super) fn fitted(name: &str, columns: usize) -> String {
    truncate_str(&escaped(name), columns, "…").into_owned()
}

/// Formats a name like [`fitted`], and appends spaces up to the full width. The format `{:<}` would count characters,
/// but some characters take two columns.
pub(super) fn padded(name: &str, columns: usize) -> String {
    pad_str(&fitted(name, columns), columns, Alignment::Left, None).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_in_groups_of_three() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (12_345_678, "12,345,678"),
            (u64::MAX, "18,446,744,073,709,551,615"),
        ] {
            assert_eq!(whole(number), text);
        }
    }

    #[test]
    fn times_have_one_unit() {
        for (seconds, text) in [
            (0.0, "0.0s"),
            (9.99, "9.9s"),
            (59.9, "59s"),
            (60.0, "1m"),
            (3_599.0, "59m"),
            (86_400.0, "24h"),
            (172_800.0, "2d"),
            (f64::MAX, "?"),
            (-1.0, "?"),
            (f64::NAN, "?"),
        ] {
            assert_eq!(span_of_seconds(seconds), text);
        }
    }

    #[test]
    fn names_fit_in_columns_and_command_no_terminal() {
        for (name, text) in [
            ("node-1", "node-1"),
            ("node-17:80", "node-1…"),
            ("\u{1b}[2Jx", "?[2Jx"),
            ("a\u{202e}b\nc", "a?b?c"),
            ("節点一", "節点一"),
            ("節点一二三", "節点一…"),
        ] {
            assert_eq!(fitted(name, 7), text);
            assert_eq!(console::measure_text_width(&padded(name, 7)), 7, "{name:?}");
        }
    }
}
