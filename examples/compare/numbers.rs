//! Message ids: random to look at, distinct, and computed from a counter, so that nobody has to keep them.

use ackwheel::core::Message;

/// The finalizer of splitmix64: it maps u64 to u64 one to one.
pub fn id(number: u64) -> u64 {
    let mut bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// The messages with these numbers.
pub fn messages(numbers: impl Iterator<Item = u64>) -> Vec<Message> {
    numbers.map(|number| Message::new(id(number), id(!number) % 1_000)).collect()
}

/// Appends a number in decimal.
pub fn push_decimal(output: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; 20];
    let mut first = digits.len();
    loop {
        first -= 1;
        digits[first] = b'0' + u8::try_from(number % 10).expect("it is a digit");
        number /= 10;
        if number == 0 {
            break;
        }
    }
    output.extend_from_slice(&digits[first..]);
}

/// A count as a figure.
#[expect(clippy::cast_precision_loss, reason = "figures are read by people")]
pub fn figure(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_as_they_are_printed() {
        for number in [0, 7, 10, 1_234_567_890, u64::MAX] {
            let mut output = Vec::new();
            push_decimal(&mut output, number);
            assert_eq!(output, number.to_string().into_bytes());
        }
    }

    #[test]
    fn ids_are_distinct() {
        let ids: std::collections::HashSet<_> = (0..100_000).map(id).collect();
        assert_eq!(ids.len(), 100_000);
    }
}
