//! Fits the limits of a sidecar to the memory that it may use. A process that uses more is killed, and with it the
//! messages in a memory store.

use std::path::Path;

use super::settings::{MIN_CONNECTION_MEMORY, Settings, Values};
use crate::process::cgroup::memory_limit;

/// The most memory of a message in flight, in bytes, if no message is acknowledged: 46 for its entry, as many for one that
/// timed out before it and is remembered as `late`, and the rest while the table changes its size.
const IN_FLIGHT_BYTES: u64 = 125;

/// The memory of a message in the outbox, in bytes.
const OUTBOX_BYTES: u64 = 24;

/// The memory of an Ack that waits for Redis, in bytes.
const HELD_ACK_BYTES: u64 = 134;

/// The memory of an idle sidecar and of connections before their Hello, in bytes.
const PROCESS_BYTES: u64 = 26 * MEBIBYTE;

/// The further memory of connections that make a TLS handshake, in bytes.
const TLS_BYTES: u64 = 30 * MEBIBYTE;

/// The least limit of messages that a default becomes.
const LEAST_MESSAGES: u64 = 10_000;

const MEBIBYTE: u64 = 1_024 * 1_024;

impl Values {
    /// Fits the limits to the memory that the cgroup of this process may use, if there is a limit: see [`Values::fit`].
    pub(super) fn fit_into_cgroup(&mut self, given: &Settings) -> (Vec<String>, Option<String>) {
        memory_limit(Path::new("/")).map(|limit| self.fit(given, limit)).unwrap_or_default()
    }

    /// Lowers default limits, so that everything that they let the process hold fits into `memory` bytes. Returns a
    /// note for each of them, and a warning if the limits do not fit, because some were given. Half of the memory is
    /// for messages in flight, or for Acks that wait for Redis.
    fn fit(&mut self, given: &Settings, memory: u64) -> (Vec<String>, Option<String>) {
        let least = MIN_CONNECTION_MEMORY as u64;
        let mut needed = PROCESS_BYTES + self.tls_cert.as_ref().map_or(0, |_| TLS_BYTES);
        let (room, mebibytes) = (memory.saturating_sub(needed + least), memory / MEBIBYTE);
        let (mut notes, mut limits) = (Vec::new(), Vec::new());
        let mut fit = |flag: &str, is_given: bool, value: &mut u64, bytes: u64, share: u64| {
            let fitting = (share / bytes).max(LEAST_MESSAGES);
            if !is_given && fitting < *value {
                notes.push(format!(
                    "{flag} is {fitting} in place of {value}, because this process may use {mebibytes} MiB of memory"
                ));
                *value = fitting;
            }
            needed = needed.saturating_add(value.saturating_mul(bytes));
            limits.push(format!("{flag} {value}"));
        };
        let mut connections = self.max_connection_memory as u64;
        let is_given = given.max_connection_memory.is_some();
        fit("--max-connection-memory", is_given, &mut connections, 1, least + room / 4);
        self.max_connection_memory = usize::try_from(connections).unwrap_or(usize::MAX);
        if self.store.is_memory() {
            let (in_flight, outbox) = (given.max_in_flight.is_some(), given.outbox_max_ids.is_some());
            fit("--max-in-flight", in_flight, &mut self.max_in_flight, IN_FLIGHT_BYTES, room / 2);
            fit("--outbox-max-ids", outbox, &mut self.outbox_max_ids, OUTBOX_BYTES, room / 4);
        } else {
            let is_given = given.max_held_acks.is_some();
            fit("--max-held-acks", is_given, &mut self.max_held_acks, HELD_ACK_BYTES, room / 2);
        }
        let warning = format!(
            "{} can take {} MiB, and this process may use {mebibytes} MiB of memory: if it uses more, it is killed; lower \
             them, or raise the limit of memory",
            limits.join(" and "),
            needed.div_ceil(MEBIBYTE)
        );
        (notes, (needed > memory).then_some(warning))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::StoreUrl;

    const DEFAULTS: (u64, u64, usize) = (4_000_000, 10_000_000, 256 * 1_024 * 1_024);

    /// Returns the limits of messages in flight, of the outbox and of connections, with the notes and the warning.
    fn fitted(given: &Settings, mebibytes: u64) -> ((u64, u64, usize), Vec<String>, Option<String>) {
        let mut values = given.values().unwrap();
        let (notes, warning) = values.fit(given, mebibytes * MEBIBYTE);
        ((values.max_in_flight, values.outbox_max_ids, values.max_connection_memory), notes, warning)
    }

    #[test]
    fn defaults_fit_whatever_the_limit_is() {
        for mebibytes in [64, 100, 128, 256, 512, 1_024, 2_048, 4_096] {
            let ((in_flight, outbox, connections), notes, warning) = fitted(&Settings::default(), mebibytes);
            let needed = in_flight * IN_FLIGHT_BYTES + outbox * OUTBOX_BYTES + connections as u64 + PROCESS_BYTES;
            assert!(needed <= mebibytes * MEBIBYTE, "{needed} in {mebibytes} MiB");
            assert_eq!(warning, None);
            let is_lowered = [in_flight < DEFAULTS.0, outbox < DEFAULTS.1, connections < DEFAULTS.2];
            assert_eq!(notes.len(), is_lowered.into_iter().filter(|is| *is).count(), "{notes:?}");
        }
        let ((in_flight, ..), notes, _) = fitted(&Settings::default(), 100);
        assert!((200_000..300_000).contains(&in_flight), "{in_flight}");
        let note =
            format!("--max-in-flight is {in_flight} in place of 4000000, because this process may use 100 MiB");
        assert!(notes.iter().any(|text| text.starts_with(&note)), "{notes:?}");
        assert_eq!(fitted(&Settings::default(), 2_048).0, DEFAULTS);
        assert_eq!(fitted(&Settings::default(), 8).0.0, LEAST_MESSAGES);
        assert_eq!(fitted(&Settings::default(), u64::MAX / MEBIBYTE), (DEFAULTS, vec![], None));
    }

    #[test]
    fn given_limits_stay_and_a_warning_says_what_does_not_fit() {
        let given = Settings { max_in_flight: Some(4_000_000), ..Settings::default() };
        let ((in_flight, outbox, connections), _, warning) = fitted(&given, 100);
        assert_eq!(in_flight, 4_000_000);
        let without = fitted(&Settings::default(), 100).0;
        assert_eq!((outbox, connections), (without.1, without.2), "the other limits do not suffer");
        let warning = warning.unwrap();
        for word in ["--max-in-flight 4000000", "--outbox-max-ids", "--max-connection-memory", "100 MiB", "killed"]
        {
            assert!(warning.contains(word), "{warning}");
        }
        let fits = Settings { max_in_flight: Some(200_000), ..Settings::default() };
        assert_eq!((fitted(&fits, 100).0.0, fitted(&fits, 100).2), (200_000, None));
        for given in [
            Settings { outbox_max_ids: Some(DEFAULTS.1), ..Settings::default() },
            Settings { max_connection_memory: Some(DEFAULTS.2), ..Settings::default() },
            Settings { max_in_flight: Some(u64::MAX), ..Settings::default() },
        ] {
            assert!(fitted(&given, 100).2.is_some(), "{given:?}");
        }
        assert!(fitted(&Settings::default(), 1).2.is_some(), "the least values take more than 1 MiB");
    }

    #[test]
    fn with_redis_the_acks_that_it_holds_count_and_the_messages_in_flight_do_not() {
        let url = StoreUrl::from("redis://127.0.0.1/");
        let given = Settings { store: Some(url), ..Settings::default() };
        let mut values = given.values().unwrap();
        let (notes, warning) = values.fit(&given, 100 * MEBIBYTE);
        assert_eq!((values.max_in_flight, values.outbox_max_ids), (DEFAULTS.0, DEFAULTS.1));
        assert!(values.max_held_acks < 500_000 && notes.len() == 2 && warning.is_none(), "{notes:?}");
    }
}
