//! Limits the memory of the buffers of all connections together. If the limit is exceeded, the connection with the
//! largest buffers is closed; of equal ones, the oldest.
//!
//! A connection charges the capacity of its buffers, so memory that it keeps while it is idle counts too. A connection
//! may keep empty buffers only while less than half of the limit is charged. So idle connections alone never exceed it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

/// Charges are rounded up to a multiple of this number of bytes. So a buffer that changes little changes no charge.
const GRANULE: usize = 4_096;

/// The limit, and the charges of all connections.
pub struct MemoryBudget {
    limit: usize,
    charged: AtomicUsize,
    /// The accounts of the open connections, in the order of their opening.
    accounts: Mutex<Accounts>,
}

#[derive(Default)]
struct Accounts {
    opened: u64,
    open: BTreeMap<u64, Arc<Account>>,
}

/// The charge of one connection.
#[derive(Default)]
struct Account {
    /// The charged bytes. `None` after the budget has chosen the connection to be closed: its memory no longer counts.
    bytes: Mutex<Option<usize>>,
    is_closed: AtomicBool,
    session: AtomicWaker,
}

/// The right of a connection to charge memory. Dropping it ends the charge.
pub(super) struct Charge {
    budget: Arc<MemoryBudget>,
    number: u64,
    account: Arc<Account>,
    /// The last charge, so that an unchanged one needs no lock.
    pub(super) last: usize,
}

impl MemoryBudget {
    /// Creates a budget of `limit` bytes.
    pub fn new(limit: usize) -> MemoryBudget {
        MemoryBudget { limit, charged: AtomicUsize::new(0), accounts: Mutex::default() }
    }

    /// Returns the number of bytes that are charged.
    pub fn charged(&self) -> usize {
        self.charged.load(Ordering::Relaxed)
    }

    /// Opens the account of a connection.
    pub(super) fn open(self: &Arc<Self>) -> Charge {
        let account = Arc::new(Account { bytes: Mutex::new(Some(0)), ..Account::default() });
        let mut accounts = self.accounts.lock();
        let number = accounts.opened;
        accounts.opened += 1;
        accounts.open.insert(number, Arc::clone(&account));
        Charge { budget: Arc::clone(self), number, account, last: 0 }
    }

    /// Chooses connections to be closed until the rest is within the limit.
    fn enforce(&self) {
        let mut accounts = self.accounts.lock();
        while self.charged() > self.limit {
            // `max_by_key` returns the last of equal ones, so the order is reversed for the oldest.
            let largest =
                accounts.open.iter().rev().max_by_key(|(_, account)| account.bytes.lock().unwrap_or_default());
            let Some((&number, _)) = largest else { return };
            let account = accounts.open.remove(&number).expect("it was just found");
            let bytes = account.bytes.lock().take().unwrap_or_default();
            self.charged.fetch_sub(bytes, Ordering::Relaxed);
            account.is_closed.store(true, Ordering::Release);
            account.session.wake();
        }
    }
}

impl Charge {
    /// Charges `bytes` instead of the last charge. If the limit is then exceeded, connections are chosen to be closed,
    /// and this one may be among them.
    #[inline]
    pub(super) fn set(&mut self, bytes: usize) {
        let bytes = bytes.next_multiple_of(GRANULE);
        if bytes != self.last {
            self.change(bytes);
        }
    }

    fn change(&mut self, bytes: usize) {
        {
            let mut charged = self.account.bytes.lock();
            let Some(before) = *charged else { return };
            *charged = Some(bytes);
            // The sum wraps around in between if the charge falls.
            self.budget.charged.fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed);
        }
        self.last = bytes;
        if self.budget.charged() > self.budget.limit {
            self.budget.enforce();
        }
    }

    /// Returns whether the connection may keep the memory of an empty buffer.
    pub(super) fn may_keep(&self) -> bool {
        self.budget.charged() < self.budget.limit / 2
    }

    /// Returns whether the budget has chosen this connection to be closed, but only once: afterwards, the connection
    /// may still write an Error.
    pub(super) fn take_closed(&self) -> bool {
        self.account.is_closed.load(Ordering::Acquire) && self.account.is_closed.swap(false, Ordering::Relaxed)
    }

    /// Wakes the task of `context` when the budget chooses this connection to be closed. Call this before
    /// [`Charge::take_closed`].
    pub(super) fn wake_when_closed(&self, context: &Context<'_>) {
        self.account.session.register(context.waker());
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.accounts.lock().open.remove(&self.number);
        let bytes = self.account.bytes.lock().take().unwrap_or_default();
        self.budget.charged.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_connection_is_closed_and_of_equal_ones_the_oldest() {
        let budget = Arc::new(MemoryBudget::new(10 * GRANULE));
        let mut charges: Vec<Charge> = (0..4).map(|_| budget.open()).collect();
        for (charge, granules) in charges.iter_mut().zip([2, 4, 4, 0]) {
            charge.set(granules * GRANULE - granules.min(1));
        }
        assert_eq!(budget.charged(), 10 * GRANULE, "each charge is rounded up");
        assert!(!charges.iter().any(Charge::take_closed));
        charges[3].set(1);
        assert_eq!(charges.iter().map(Charge::take_closed).collect::<Vec<_>>(), [false, true, false, false]);
        assert_eq!(budget.charged(), 7 * GRANULE);
        charges[1].set(100 * GRANULE);
        assert_eq!(budget.charged(), 7 * GRANULE, "a closed connection charges nothing");
        charges[0].set(11 * GRANULE);
        assert!(charges[0].take_closed(), "also the connection that exceeds the limit");
        drop(charges);
        assert_eq!(budget.charged(), 0);
    }

    #[test]
    fn empty_buffers_are_kept_below_half_of_the_limit_only() {
        let budget = Arc::new(MemoryBudget::new(4 * GRANULE));
        let (mut one, other) = (budget.open(), budget.open());
        one.set(GRANULE);
        assert!(other.may_keep());
        one.set(2 * GRANULE);
        assert!(!other.may_keep());
        one.set(0);
        assert!(other.may_keep());
    }
}
