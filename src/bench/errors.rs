//! What went wrong under load: all of it counted, the first of it told.

use std::fmt::Display;

use parking_lot::Mutex;

/// How many different texts are kept.
const KEPT: usize = 8;

/// The errors of a load.
#[derive(Debug, Default)]
pub(super) struct Errors {
    inner: Mutex<(u64, Vec<String>)>,
}

impl Errors {
    /// Counts an error. A text that is known already is not kept again.
    pub(super) fn note(&self, text: impl Into<String>) {
        let text = text.into();
        let (count, texts) = &mut *self.inner.lock();
        *count += 1;
        if texts.len() < KEPT && !texts.contains(&text) {
            texts.push(text);
        }
    }

    /// Counts an error of a kind of which only the first is told in full.
    pub(super) fn note_one_of(&self, kind: &str, example: impl Display) {
        let (count, texts) = &mut *self.inner.lock();
        *count += 1;
        if texts.len() < KEPT && !texts.iter().any(|text| text.starts_with(kind)) {
            texts.push(format!("{kind} ({example})"));
        }
    }

    /// How many there were, and the first different ones.
    pub(super) fn told(&self) -> (u64, Vec<String>) {
        self.inner.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_counted_and_the_first_different_ones_told() {
        let errors = Errors::default();
        for number in 0..100 {
            errors.note("the same");
            errors.note_one_of("a kind", number);
            errors.note(format!("number {number}"));
        }
        let (count, texts) = errors.told();
        assert_eq!((count, texts.len()), (300, KEPT));
        assert_eq!(texts[..4], ["the same", "a kind (0)", "number 0", "number 1"]);
    }
}
