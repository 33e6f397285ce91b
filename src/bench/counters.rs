//! The counters of one connection, and the errors of all.

use std::fmt::Display;

use parking_lot::Mutex;

/// The counters of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    /// The number of the connection.
    pub(super) connection: usize,
    /// Messages added while it was measured.
    pub(super) added: u64,
    /// Messages acknowledged while it was measured.
    pub(super) acked: u64,
    /// Requests answered while it was measured.
    pub(super) frames: u64,
    /// Pairs, or Pings, that were due at a fixed rate and never made.
    pub(super) not_made: u64,
    /// Messages in flight that are not to be acknowledged, since the beginning.
    pub(super) left_to_time_out: u64,
    /// Numbers that were given to messages, since the beginning.
    pub(super) numbers: u64,
}

/// How many different texts are kept.
const KEPT: usize = 8;

/// The errors of a load.
#[derive(Debug, Default)]
pub(super) struct Errors {
    inner: Mutex<(u64, Vec<String>)>,
}

impl Errors {
    /// Counts an error. A text that is known already is not kept again.
    pub(super) fn record(&self, text: impl Into<String>) {
        let text = text.into();
        self.count(|known| *known == text, || text.clone());
    }

    /// Counts an error of a kind; only the first example is kept.
    pub(super) fn record_kind(&self, kind: &str, example: impl Display) {
        self.count(|known| known.starts_with(kind), || format!("{kind} ({example})"));
    }

    fn count(&self, is_known: impl FnMut(&String) -> bool, text: impl FnOnce() -> String) {
        let (count, texts) = &mut *self.inner.lock();
        *count += 1;
        if texts.len() < KEPT && !texts.iter().any(is_known) {
            texts.push(text());
        }
    }

    /// How many there were, and the first different ones.
    pub(super) fn first(&self) -> (u64, Vec<String>) {
        self.inner.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_counted_and_the_first_different_ones_kept() {
        let errors = Errors::default();
        for number in 0..100 {
            errors.record("the same");
            errors.record_kind("a kind", number);
            errors.record(format!("number {number}"));
        }
        let (count, texts) = errors.first();
        assert_eq!((count, texts.len()), (300, KEPT));
        assert_eq!(texts[..4], ["the same", "a kind (0)", "number 0", "number 1"]);
    }
}
