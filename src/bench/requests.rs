//! The requests of one connection that are not yet answered.

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An AddNewMsg.
    Add,
    /// A DelMsg.
    Del,
    /// A Ping.
    Ping,
}

/// A request on its way. It takes half of a cache line: a load of many connections goes through all that they have had
/// unanswered before it comes back to the first, and it shares caches with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    /// When it was sent, or should have been at a fixed rate, in ns since the load began.
    pub(super) at: u64,
    /// The number of its first message, or that of the Ping.
    pub(super) first: u64,
    correlation: u32,
    /// By how much later than `at` it was made, in ns. More than four seconds counts as four: a request may be taken to
    /// have been made too early, and never too late.
    made_after: u32,
    /// How many messages it has; 0 once it is answered.
    pub(super) count: u32,
    /// Its type.
    pub(super) kind: Kind,
}

const _: () = assert!(size_of::<Sent>() == 32, "two of them are a cache line");

impl Sent {
    /// A request that was due `at` and made at `made_at`.
    pub(super) fn new(kind: Kind, first: u64, count: u32, at: u64, made_at: u64) -> Sent {
        let made_after = u32::try_from(made_at.saturating_sub(at)).unwrap_or(u32::MAX);
        Sent { at, first, correlation: 0, made_after, count, kind }
    }

    /// When it was made: it was sent then, or later.
    pub(super) fn made_at(&self) -> u64 {
        self.at + u64::from(self.made_after)
    }
}

/// Room for this many times as many requests as may be unanswered: answers may come in any order, and the place of one
/// that is answered is free only when all before it are.
const SPARE: usize = 2;

/// Unanswered requests by their correlation id: a ring of places, each found without a search.
#[derive(Debug)]
pub(super) struct Outstanding {
    slots: Box<[Sent]>,
    /// How many may be unanswered.
    pipeline: usize,
    /// How many are unanswered.
    count: usize,
    /// The sequence number of the next request; its lower half is the correlation id.
    next: u64,
    /// No request before this one is unanswered.
    oldest: u64,
}

impl Outstanding {
    /// For up to `pipeline` requests; `first` is the first correlation id that may be used.
    pub(super) fn new(pipeline: usize, first: u32) -> Outstanding {
        let slots = vec![Sent::new(Kind::Add, 0, 0, 0, 0); (pipeline * SPARE).next_power_of_two()];
        let first = u64::from(first);
        Outstanding { slots: slots.into_boxed_slice(), pipeline, count: 0, next: first, oldest: first }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether another request may be made.
    pub(super) const fn has_room(&self) -> bool {
        // One place stays free for the correlation id that is skipped.
        self.count < self.pipeline && self.next - self.oldest < self.slots.len() as u64 - 1
    }

    #[expect(clippy::cast_possible_truncation, reason = "the ring has fewer places than a usize has values")]
    const fn place(&self, sequence: u64) -> usize {
        sequence as usize & (self.slots.len() - 1)
    }

    /// The correlation id that the next request will have. Never 0, under which a server speaks unasked.
    #[expect(clippy::cast_possible_truncation, reason = "correlation ids start again after four billion")]
    pub(super) const fn next_correlation(&mut self) -> u32 {
        if self.next as u32 == 0 {
            self.next += 1;
        }
        self.next as u32
    }

    /// Notes a request, of one message at least, under [`next_correlation`](Outstanding::next_correlation).
    pub(super) fn push(&mut self, sent: Sent) {
        debug_assert!(sent.count > 0, "a place without messages is free");
        let correlation = self.next_correlation();
        let place = self.place(self.next);
        self.slots[place] = Sent { correlation, ..sent };
        self.next += 1;
        self.count += 1;
    }

    /// Takes the request out that is answered under this correlation id; none if there is no such request.
    pub(super) fn take(&mut self, correlation: u32) -> Option<Sent> {
        let place = self.place(u64::from(correlation));
        let slot = &mut self.slots[place];
        if slot.correlation != correlation || slot.count == 0 {
            return None;
        }
        let sent = *slot;
        slot.count = 0;
        self.count -= 1;
        if self.count == 0 {
            // From the first place on: a load that comes in groups stays in the caches.
            self.next = self.next.next_multiple_of(self.slots.len() as u64);
            self.oldest = self.next;
            return Some(sent);
        }
        while self.oldest < self.next && self.slots[self.place(self.oldest)].count == 0 {
            self.oldest += 1;
        }
        Some(sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(first: u64) -> Sent {
        Sent::new(Kind::Add, first, 1, 0, 0)
    }

    #[test]
    fn every_request_is_answered_once_in_whatever_order() {
        let mut outstanding = Outstanding::new(3, 5);
        let mut ids = Vec::new();
        while outstanding.has_room() {
            ids.push(outstanding.next_correlation());
            outstanding.push(sent(u64::from(*ids.last().unwrap())));
        }
        assert_eq!(ids, [5, 6, 7]);
        for id in [6, 7, 5] {
            assert_eq!(outstanding.take(id).map(|sent| sent.first), Some(u64::from(id)));
            assert_eq!(outstanding.take(id), None);
        }
        assert!(outstanding.is_empty() && outstanding.take(8).is_none() && outstanding.take(0).is_none());
    }

    #[test]
    fn a_request_is_what_it_was_when_it_is_answered_and_was_made_no_later() {
        for (late_by, reported) in [(0, 0), (77, 77), (5_000_000_000, u64::from(u32::MAX))] {
            for kind in [Kind::Add, Kind::Del, Kind::Ping] {
                let mut outstanding = Outstanding::new(1, 1);
                outstanding.push(Sent::new(kind, u64::MAX, 32_768, 1 << 50, (1 << 50) + late_by));
                let taken = outstanding.take(1).expect("it was asked");
                assert_eq!((taken.kind, taken.first, taken.count), (kind, u64::MAX, 32_768));
                assert_eq!((taken.at, taken.made_at()), (1 << 50, (1 << 50) + reported));
            }
        }
    }

    #[test]
    fn a_request_that_is_never_answered_holds_up_the_ring_and_is_not_overwritten() {
        let mut outstanding = Outstanding::new(2, 1);
        outstanding.push(sent(77));
        let mut others = 0;
        while outstanding.has_room() {
            let id = outstanding.next_correlation();
            outstanding.push(sent(0));
            assert!(outstanding.take(id).is_some());
            others += 1;
        }
        assert_eq!((others, outstanding.take(1).map(|sent| sent.first)), (2, Some(77)));
        assert!(outstanding.has_room());
    }

    #[test]
    fn correlation_ids_start_again_after_the_last_and_skip_0() {
        let mut outstanding = Outstanding::new(2, u32::MAX - 1);
        let mut ids = vec![outstanding.next_correlation()];
        outstanding.push(sent(9));
        for _ in 0..7 {
            ids.push(outstanding.next_correlation());
            outstanding.push(sent(9));
            // One is always unanswered.
            assert_eq!(outstanding.take(ids[ids.len() - 2]).map(|sent| sent.first), Some(9));
        }
        assert_eq!(ids, [u32::MAX - 1, u32::MAX, 1, 2, 3, 4, 5, 6]);
        assert!(outstanding.take(6).is_some() && outstanding.is_empty() && outstanding.has_room());
    }

    #[test]
    fn the_first_places_are_used_again_when_nothing_is_unanswered() {
        let mut outstanding = Outstanding::new(8, u32::MAX - 20);
        let mut places = Vec::new();
        for _ in 0..4 {
            let ids = [0; 3].map(|_| {
                let id = outstanding.next_correlation();
                assert_eq!(id, outstanding.next_correlation(), "to ask twice changes nothing");
                places.push(id % 16);
                outstanding.push(sent(9));
                id
            });
            for id in ids {
                assert_eq!(outstanding.take(id).map(|sent| sent.first), Some(9));
            }
            assert!(outstanding.is_empty() && outstanding.has_room());
        }
        // Behind the last correlation id comes 1.
        assert_eq!(places, [11, 12, 13, 0, 1, 2, 1, 2, 3, 0, 1, 2]);
    }
}
