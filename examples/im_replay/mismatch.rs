//! The ways in which an outcome can differ from what the trace says, counted.

/// How many mismatches are described; the rest is only counted.
const DESCRIBED: usize = 10;

/// A way in which what happened differs from what had to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An AddNewMsg was not answered well.
    AddFailed,
    /// A message was in flight before it was pushed.
    Rearmed,
    /// A DelMsg was not answered well.
    AckFailed,
    /// The Ack of an online phone was answered with something else than `acked`.
    NotAcked,
    /// A message whose phone was to acknowledge it in time is in a batch.
    TimedOutThoughOnline,
    /// A message whose phone was offline is in no batch.
    NeverTimedOut,
    /// A message is in more than one batch, or twice in one.
    TimedOutTwice,
    /// A message is in a batch before its ack timeout was over.
    Early,
    /// A message is in a batch later than promised.
    Late,
    /// A message is in a batch with another attempt than it was added with.
    WrongAttempt,
    /// A message is in a batch that the sidecar drained before its time.
    Drained,
    /// A batch came twice with the same delivery count.
    DuplicateDelivery,
    /// A batch came again with other messages.
    ChangedRedelivery,
    /// A batch holds a message that this replay had not pushed.
    Stranger,
}

impl Kind {
    const ALL: [Kind; 14] = [
        Kind::AddFailed,
        Kind::Rearmed,
        Kind::AckFailed,
        Kind::NotAcked,
        Kind::TimedOutThoughOnline,
        Kind::NeverTimedOut,
        Kind::TimedOutTwice,
        Kind::Early,
        Kind::Late,
        Kind::WrongAttempt,
        Kind::Drained,
        Kind::DuplicateDelivery,
        Kind::ChangedRedelivery,
        Kind::Stranger,
    ];

    /// The word of the report.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::AddFailed => "add_failed",
            Kind::Rearmed => "rearmed",
            Kind::AckFailed => "ack_failed",
            Kind::NotAcked => "not_acked",
            Kind::TimedOutThoughOnline => "timed_out_though_online",
            Kind::NeverTimedOut => "never_timed_out",
            Kind::TimedOutTwice => "timed_out_twice",
            Kind::Early => "early",
            Kind::Late => "late",
            Kind::WrongAttempt => "wrong_attempt",
            Kind::Drained => "drained",
            Kind::DuplicateDelivery => "duplicate_delivery",
            Kind::ChangedRedelivery => "changed_redelivery",
            Kind::Stranger => "stranger",
        }
    }
}

/// All mismatches of a replay.
#[derive(Debug, Default)]
pub struct Mismatches {
    counts: [u64; Kind::ALL.len()],
    descriptions: Vec<String>,
}

impl Mismatches {
    /// Counts one, and describes it if it is one of the first.
    pub fn add(&mut self, kind: Kind, describe: impl FnOnce() -> String) {
        self.counts[kind as usize] += 1;
        if self.descriptions.len() < DESCRIBED {
            self.descriptions.push(format!("{}: {}", kind.as_str(), describe()));
        }
    }

    /// How many there are.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// How many there are of each kind, those without any included.
    pub fn by_kind(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Kind::ALL.iter().map(|kind| (kind.as_str(), self.counts[*kind as usize]))
    }

    /// The first of them.
    pub fn descriptions(&self) -> &[String] {
        &self.descriptions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_place() {
        for (position, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, position, "{}", kind.as_str());
        }
    }
}
