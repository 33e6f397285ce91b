//! The requests and answers of one load generator: eight bytes for most messages.

use std::collections::HashMap;
use std::time::Instant;

use super::history::{Added, Deleted, Outcome, Request};

/// A request frame and when it was answered or given up.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    pub begun: Instant,
    pub ended: Instant,
    pub place: u8,
    /// None for a DelMsg.
    pub ack_timeout_ticks: Option<u16>,
    /// The tick in which its messages time out, where an AddNewMsg was answered.
    pub deadline: Option<u64>,
}

/// The answer for one message of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answer {
    Added,
    Rearmed,
    Done,
    Late,
    Unknown,
    Refused,
    Unclear,
}

impl Answer {
    const ALL: [Answer; 7] = [
        Answer::Added,
        Answer::Rearmed,
        Answer::Done,
        Answer::Late,
        Answer::Unknown,
        Answer::Refused,
        Answer::Unclear,
    ];
}

/// Bits of an entry that hold the answer; the others hold the number of the exchange.
const ANSWER_BITS: u32 = 3;

/// An entry that holds nothing.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub struct Ledger {
    pub first_id: u64,
    exchanges: Vec<Exchange>,
    /// The first two entries of each message, by id.
    entries: Vec<[u32; 2]>,
    /// All further entries.
    more: HashMap<u32, Vec<u32>>,
}

impl Ledger {
    pub fn new(first_id: u64) -> Ledger {
        Ledger { first_id, exchanges: Vec::new(), entries: Vec::new(), more: HashMap::new() }
    }

    /// The messages, by index: `first_id` plus the index is the id.
    pub fn indices(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.entries.len()).expect("a run has fewer messages")
    }

    pub fn id(&self, index: u32) -> u64 {
        self.first_id + u64::from(index)
    }

    pub fn index_of(&self, id: u64) -> Option<u32> {
        let index = u32::try_from(id.checked_sub(self.first_id)?).ok()?;
        self.indices().contains(&index).then_some(index)
    }

    /// Records an exchange; returns its number.
    pub fn exchange(&mut self, exchange: Exchange) -> u32 {
        self.exchanges.push(exchange);
        u32::try_from(self.exchanges.len() - 1).expect("a run has fewer requests")
    }

    /// Records the deadline that an exchange answered.
    pub fn record_deadline(&mut self, exchange: u32, deadline: u64) {
        self.exchanges[exchange as usize].deadline = Some(deadline);
    }

    /// The deadline of a message, as it was answered last.
    pub fn deadline(&self, index: u32) -> Option<u64> {
        self.of(index).filter_map(|(exchange, _)| exchange.deadline).last()
    }

    /// Records what an exchange answered for a message, which is a known one or the next.
    pub fn record(&mut self, index: u32, exchange: u32, answer: Answer) {
        let entry = exchange << ANSWER_BITS | u32::from(answer as u8);
        if index as usize == self.entries.len() {
            self.entries.push([entry, NONE]);
            return;
        }
        match &mut self.entries[index as usize] {
            [_, second] if *second == NONE => *second = entry,
            _ => self.more.entry(index).or_default().push(entry),
        }
    }

    /// The requests and answers for a message, in order.
    pub fn of(&self, index: u32) -> impl Iterator<Item = (Exchange, Answer)> + '_ {
        let first = self.entries[index as usize].into_iter().filter(|entry| *entry != NONE);
        let more = self.more.get(&index).into_iter().flatten().copied();
        first.chain(more).map(|entry| {
            let answer = Answer::ALL[(entry & ((1 << ANSWER_BITS) - 1)) as usize];
            (self.exchanges[(entry >> ANSWER_BITS) as usize], answer)
        })
    }

    /// How often an AddNewMsg was sent for a message.
    pub fn adds(&self, index: u32) -> usize {
        self.of(index).filter(|(exchange, _)| exchange.ack_timeout_ticks.is_some()).count()
    }

    pub fn requests(&self, index: u32) -> impl Iterator<Item = Request> + '_ {
        self.of(index).map(|(exchange, answer)| {
            let outcome = match exchange.ack_timeout_ticks {
                Some(ack_timeout_ticks) => Outcome::Add { ack_timeout_ticks, added: added(answer) },
                None => Outcome::Del(deleted(answer)),
            };
            Request { begun: exchange.begun, ended: exchange.ended, place: exchange.place.into(), outcome }
        })
    }
}

fn added(answer: Answer) -> Added {
    match answer {
        Answer::Added => Added::Accepted { rearmed: false },
        Answer::Rearmed => Added::Accepted { rearmed: true },
        Answer::Refused => Added::Refused,
        Answer::Unclear => Added::Unclear,
        Answer::Done | Answer::Late | Answer::Unknown => unreachable!("no answer to an AddNewMsg"),
    }
}

fn deleted(answer: Answer) -> Deleted {
    match answer {
        Answer::Done => Deleted::Done,
        Answer::Late => Deleted::Late,
        Answer::Unknown => Deleted::Unknown,
        Answer::Refused => Deleted::Refused,
        Answer::Unclear => Deleted::Unclear,
        Answer::Added | Answer::Rearmed => unreachable!("no answer to a DelMsg"),
    }
}
