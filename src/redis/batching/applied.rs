//! The answer of the script that applies a chunk of adds and dels.

use crate::core::tick::Tick;

/// A script's answer to a chunk.
#[derive(Debug)]
pub(crate) struct Applied<'a> {
    pub(crate) tick_due: Tick,
    /// A letter a message.
    pub(crate) letters: &'a str,
    /// In ms, comma-separated: Redis' time, and for each message that was acknowledged or withdrawn when it was added.
    pub(crate) times: &'a str,
    /// Messages in flight after it; not known of an answer that was asked for again.
    pub(crate) in_flight: Option<u64>,
}

impl<'a> Applied<'a> {
    /// An answer as the script keeps it, `generation|number|tick due|outcomes|times`, if it is that to this chunk.
    pub(crate) fn parse(text: &'a str, generation: i64, number: u64) -> Option<Applied<'a>> {
        let mut parts = text.split('|');
        let is_of_chunk = parts.next()?.parse() == Ok(generation) && parts.next()?.parse() == Ok(number);
        is_of_chunk.then_some(())?;
        Some(Applied {
            tick_due: Tick(parts.next()?.parse().ok()?),
            letters: parts.next()?,
            times: parts.next()?,
            in_flight: None,
        })
    }

    /// The times, in order.
    pub(crate) fn times(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.times.split(',').map(|ms| ms.parse().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_to_a_chunk_of_another_generation_is_not_taken() {
        for (answer, is_taken) in [("9|5|7|k|6,5", true), ("8|5|7|k|6,5", false), ("9|3|7|k|6,5", false)] {
            let parsed = Applied::parse(answer, 9, 5);
            assert_eq!(parsed.is_some(), is_taken, "{answer}");
            let expected = (Tick(7), "k", vec![6, 5]);
            assert!(parsed.is_none_or(|it| (it.tick_due, it.letters, it.times().collect::<Vec<_>>()) == expected));
        }
    }
}
