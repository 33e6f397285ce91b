//! Numbers, times and names as a person reads them, in few columns.

use std::time::Duration;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// The columns of a terminal that nobody has widened.
pub(super) const COLUMNS: usize = 80;

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// A number in groups of three digits.
pub(super) fn whole(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// How long something lasts, in one unit, rounded down.
pub(super) fn span(duration: Duration) -> String {
    match duration.as_secs() {
        0..10 => format!("{}.{}s", duration.as_secs(), duration.subsec_millis() / 100),
        seconds @ 10..MINUTE => format!("{seconds}s"),
        seconds @ MINUTE..HOUR => format!("{}m", seconds / MINUTE),
        seconds if seconds < 2 * DAY => format!("{}h", seconds / HOUR),
        seconds => format!("{}d", seconds / DAY),
    }
}

/// The same of seconds as JSON has them; what cannot be a time is none at all.
pub(super) fn span_of_seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| String::from("?"), span)
}

/// A character, and a question mark for one that a terminal would obey.
pub(super) fn plain(character: char) -> char {
    if character.is_control() { '?' } else { character }
}

/// A name in at most so many columns, and without anything that a terminal would obey.
pub(super) fn fitted(name: &str, columns: usize) -> String {
    let name: String = name.chars().map(plain).collect();
    if name.width() <= columns {
        return name;
    }
    let mut used = 1;
    let begin = name.chars().take_while(|character| {
        used += character.width().unwrap_or_default();
        used <= columns
    });
    begin.chain(['…']).collect()
}

/// The same, with blanks up to the full width: `{:<}` counts characters, and some take two columns.
pub(super) fn padded(name: &str, columns: usize) -> String {
    let name = fitted(name, columns);
    let blanks = columns.saturating_sub(name.width());
    name + &" ".repeat(blanks)
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
            ("節点一", "節点一"),
            ("節点一二三", "節点一…"),
        ] {
            assert_eq!(fitted(name, 7), text);
            assert_eq!(padded(name, 7).width(), 7, "{name:?}");
        }
    }
}
