//! In which order messages are acknowledged: phones do not answer in the order of the pushes.

/// Odd, so that no two numbers of a block become the same.
const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The number of the message that is acknowledged in place of number `nth`, where `in_flight` messages are at a time and
/// `added` have been added.
///
/// Numbers are taken in blocks, a power of two of at most a quarter of what is in flight, and change places within
/// theirs: a message stays in flight a quarter longer than on average at most. A block of which the end was not added
/// yet keeps its order, so that nothing is acknowledged before it was added. That must stay so for it: whoever begins
/// such a block adds no more.
#[must_use]
pub const fn acknowledged(nth: u64, in_flight: u64, added: u64) -> u64 {
    let Some(bits) = (in_flight / 4).checked_ilog2() else { return nth };
    // Of a power of two the remainder is what the lowest bits say: no division, which would cost as much as the rest.
    let within = (1 << bits) - 1;
    let first = nth & !within;
    if first + within >= added {
        return nth;
    }
    first | nth.wrapping_mul(SCATTER) & within
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_is_acknowledged_once_and_after_it_was_added() {
        for in_flight in [1, 3, 4, 100, 4_100, 1_000_000] {
            let steady = 0..20_000;
            let mut seen: Vec<u64> =
                steady.clone().map(|nth| acknowledged(nth, in_flight, nth + in_flight + 1)).collect();
            assert!(seen.iter().zip(steady).all(|(number, nth)| *number < nth + in_flight + 1), "{in_flight}");
            // Then no more are added.
            let added = 20_000 + in_flight;
            seen.extend((20_000..added).map(|nth| acknowledged(nth, in_flight, added)));
            assert!(in_flight < 8 || !seen.is_sorted(), "{in_flight}");
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..added), "{in_flight}");
        }
    }
}
