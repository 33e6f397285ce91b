//! Limits wrong tokens by address, so that nobody can guess a token.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How many wrong tokens an address may send at once.
const BUDGET: u32 = 100;

/// The time after which an address may send one more wrong token.
const REFILL: Duration = Duration::from_millis(100);

/// The maximum number of addresses in one generation. Two generations are kept.
const MAX_ADDRESSES: usize = 2_048;

/// The origin of connections: an IPv4 address, the network (/64) of an IPv6 address, because one host may use any address
/// of its network, or the user of a process that connects over the Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Source {
    V4([u8; 4]),
    V6([u8; 8]),
    User(u32),
}

impl Source {
    pub(super) fn of(address: IpAddr) -> Source {
        match address.to_canonical() {
            IpAddr::V4(address) => Source::V4(address.octets()),
            IpAddr::V6(address) => Source::V6(*address.octets().first_chunk().expect("an address has 16 bytes")),
        }
    }
}

/// The budgets of addresses that sent wrong tokens. An address without an entry has its whole budget.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    /// For each address, the time at which its budget is full again.
    recent: HashMap<Source, Instant>,
    /// The previous generation. When `recent` is full, it replaces this generation, and the oldest addresses leave.
    older: HashMap<Source, Instant>,
}

impl Throttle {
    /// Returns how long an address must wait before its next token is compared. Returns `None` if it need not wait.
    pub(super) fn wait(&self, address: IpAddr, now: Instant) -> Option<Duration> {
        let full = self.full_at(Source::of(address))?.saturating_duration_since(now);
        full.checked_sub(REFILL * (BUDGET - 1)).filter(|wait| !wait.is_zero())
    }

    /// Takes one wrong token from the budget of an address.
    pub(super) fn count(&mut self, address: IpAddr, now: Instant) {
        let source = Source::of(address);
        let full = self.full_at(source).map_or(now, |full| full.max(now)) + REFILL;
        if self.recent.len() >= MAX_ADDRESSES && !self.recent.contains_key(&source) {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(source, full);
    }

    fn full_at(&self, source: Source) -> Option<Instant> {
        self.recent.get(&source).or_else(|| self.older.get(&source)).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    fn guesses(throttle: &mut Throttle, address: IpAddr, now: Instant) -> u32 {
        let mut compared = 0;
        while throttle.wait(address, now).is_none() {
            throttle.count(address, now);
            compared += 1;
        }
        compared
    }

    #[test]
    fn an_address_has_a_budget_of_its_own_that_refills() {
        let (mut throttle, now) = (Throttle::default(), Instant::now());
        let [one, other] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        assert_eq!(guesses(&mut throttle, one, now), BUDGET);
        assert_eq!(throttle.wait(one, now), Some(REFILL));
        assert_eq!(throttle.wait(other, now), None);
        let mapped = IpAddr::from(Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped());
        assert!(throttle.wait(mapped, now).is_some(), "the same address, written for IPv6");
        assert_eq!(guesses(&mut throttle, one, now + Duration::from_secs(1)), 10);
        assert_eq!(guesses(&mut throttle, one, now + Duration::from_secs(60)), BUDGET);
    }

    #[test]
    fn the_addresses_of_an_ipv6_network_share_a_budget() {
        let (mut throttle, now) = (Throttle::default(), Instant::now());
        let address = |network, host| IpAddr::from(Ipv6Addr::new(0x2001, 0xdb8, 0, network, 0, 0, 0, host));
        guesses(&mut throttle, address(1, 1), now);
        assert!(throttle.wait(address(1, 2), now).is_some());
        assert!(throttle.wait(address(2, 1), now).is_none());
    }

    #[test]
    fn addresses_are_bounded_and_the_oldest_leave() {
        let (mut throttle, now) = (Throttle::default(), Instant::now());
        let address = |number: u32| IpAddr::from(Ipv4Addr::from(number));
        guesses(&mut throttle, address(0), now);
        (1..=MAX_ADDRESSES).for_each(|number| throttle.count(address(u32::try_from(number).unwrap()), now));
        assert!(throttle.wait(address(0), now).is_some(), "one generation later it is still known");
        (0..100_000).for_each(|number| throttle.count(address(number + 10_000), now));
        assert!(throttle.recent.len() + throttle.older.len() <= 2 * MAX_ADDRESSES);
        assert!(throttle.wait(address(0), now).is_none());
    }
}
