//! The kinds of faults, and what each of them may cost by contract.

use super::history::Breach;

/// Where the wheel lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    Memory,
    Redis,
    Sentinel,
    Cluster,
}

impl Topology {
    pub fn name(self) -> &'static str {
        match self {
            Topology::Memory => "Memory",
            Topology::Redis => "One Redis",
            Topology::Sentinel => "Sentinel",
            Topology::Cluster => "Cluster",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    SidecarKilled,
    SidecarDrained,
    SidecarPaused,
    SidecarClockSet,
    LogReaderStuck,
    LogReaderGone,
    SubscribersGone,
    SubscribersSilent,
    SubscribersReturn,
    RequestFlood,
    DiskStalled,
    AnswerLost,
    RequestHeld,
    ConnectionsCut,
    ScriptsFlushed,
    RedisPaused,
    RedisKilled,
    RedisReadOnly,
    RedisClockSet,
    RedisBusy,
    WritesLost,
    PrimaryKilled,
    PrimaryPaused,
    PrimaryPartitioned,
    ReplicaPartitioned,
    ReplicaBehind,
    FailoverRequested,
    FailoverUnasked,
    SlotMoved,
    MachineStalled,
}

impl Kind {
    pub const ALL: [Kind; 30] = [
        Kind::SidecarKilled,
        Kind::SidecarDrained,
        Kind::SidecarPaused,
        Kind::SidecarClockSet,
        Kind::LogReaderStuck,
        Kind::LogReaderGone,
        Kind::SubscribersGone,
        Kind::SubscribersSilent,
        Kind::SubscribersReturn,
        Kind::RequestFlood,
        Kind::DiskStalled,
        Kind::AnswerLost,
        Kind::RequestHeld,
        Kind::ConnectionsCut,
        Kind::ScriptsFlushed,
        Kind::RedisPaused,
        Kind::RedisKilled,
        Kind::RedisReadOnly,
        Kind::RedisClockSet,
        Kind::RedisBusy,
        Kind::WritesLost,
        Kind::PrimaryKilled,
        Kind::PrimaryPaused,
        Kind::PrimaryPartitioned,
        Kind::ReplicaPartitioned,
        Kind::ReplicaBehind,
        Kind::FailoverRequested,
        Kind::FailoverUnasked,
        Kind::SlotMoved,
        Kind::MachineStalled,
    ];

    /// Its name in docs/RELIABILITY.md.
    pub fn name(self) -> &'static str {
        match self {
            Kind::SidecarKilled => "sidecar killed",
            Kind::SidecarDrained => "sidecar drained and restarted",
            Kind::SidecarPaused => "sidecar paused",
            Kind::SidecarClockSet => "clock of a sidecar set",
            Kind::LogReaderStuck => "log reader stuck",
            Kind::LogReaderGone => "log reader gone",
            Kind::SubscribersGone => "subscribers disconnect",
            Kind::SubscribersSilent => "subscribers hang",
            Kind::SubscribersReturn => "subscribers nack",
            Kind::RequestFlood => "overload: flood of large frames",
            Kind::DiskStalled => "disk stalled",
            Kind::AnswerLost => "answer of Redis lost",
            Kind::RequestHeld => "script delayed on its way",
            Kind::ConnectionsCut => "all connections to Redis cut",
            Kind::ScriptsFlushed => "script cache flushed",
            Kind::RedisPaused => "Redis paused",
            Kind::RedisKilled => "Redis killed and restarted",
            Kind::RedisReadOnly => "Redis refuses writes",
            Kind::RedisClockSet => "clock of Redis set",
            Kind::RedisBusy => "overload: other clients of Redis",
            Kind::WritesLost => "Redis restored from a snapshot",
            Kind::PrimaryKilled => "failover: primary killed",
            Kind::PrimaryPaused => "failover: primary paused",
            Kind::PrimaryPartitioned => "partition: primary and a sidecar cut off",
            Kind::ReplicaPartitioned => "partition: replica and a sidecar cut off",
            Kind::ReplicaBehind => "failover: replica behind",
            Kind::FailoverRequested => "failover requested",
            Kind::FailoverUnasked => "failover by itself",
            Kind::SlotMoved => "slot moved",
            Kind::MachineStalled => "the whole machine stalled",
        }
    }

    /// Whether a run causes it; others happen by themselves on a busy machine.
    pub fn is_caused(self) -> bool {
        !matches!(self, Kind::FailoverUnasked | Kind::MachineStalled)
    }

    /// A bit of its own.
    pub fn bit(self) -> u32 {
        1 << self as u8
    }

    /// Whether the contract allows this breach for messages that live while the fault lasts.
    ///
    /// Replication is asynchronous. Nothing allows an early report.
    pub fn allows(self, breach: Breach, topology: Topology) -> bool {
        let loses_writes = match self {
            Kind::WritesLost
            | Kind::PrimaryKilled
            | Kind::PrimaryPaused
            | Kind::PrimaryPartitioned
            | Kind::FailoverUnasked
            | Kind::ReplicaBehind => true,
            // A Cluster hands over in step; Sentinels do not.
            Kind::FailoverRequested => topology == Topology::Sentinel,
            _ => false,
        };
        match breach {
            Breach::Lost | Breach::WrongOutcome | Breach::AckedAndReported | Breach::Doubled => loses_writes,
            // Acks behind more requests than Redis can serve wait for a quarter of a tick only.
            Breach::LateInTime => matches!(self, Kind::RequestFlood | Kind::RedisBusy),
            Breach::Early => false,
        }
    }

    /// Whether it keeps the sidecar at its place from passing on what it is asked.
    pub fn isolates(self) -> bool {
        matches!(
            self,
            Kind::SidecarKilled
                | Kind::SidecarDrained
                | Kind::SidecarPaused
                | Kind::AnswerLost
                | Kind::RequestHeld
                | Kind::PrimaryPartitioned
                | Kind::ReplicaPartitioned
        )
    }

    /// The kinds that a run on this topology draws from. A kind that stands here twice happens twice as often.
    pub fn of(topology: Topology) -> Vec<Kind> {
        let of_the_store = match topology {
            Topology::Memory => MEMORY,
            Topology::Redis => REDIS,
            Topology::Sentinel => SENTINEL,
            Topology::Cluster => CLUSTER,
        };
        [EVERYWHERE, of_the_store].concat()
    }
}

const EVERYWHERE: &[Kind] = &[
    Kind::SidecarKilled,
    Kind::SidecarDrained,
    Kind::SidecarPaused,
    Kind::SidecarClockSet,
    Kind::LogReaderStuck,
    Kind::LogReaderGone,
    Kind::SubscribersGone,
    Kind::SubscribersSilent,
    Kind::SubscribersReturn,
    Kind::RequestFlood,
];

const MEMORY: &[Kind] =
    &[Kind::SidecarDrained, Kind::SidecarPaused, Kind::SidecarPaused, Kind::RequestFlood, Kind::DiskStalled];

const REDIS: &[Kind] = &[
    Kind::SidecarPaused,
    Kind::AnswerLost,
    Kind::RequestHeld,
    Kind::ConnectionsCut,
    Kind::ScriptsFlushed,
    Kind::RedisPaused,
    Kind::RedisPaused,
    Kind::RedisKilled,
    Kind::RedisKilled,
    Kind::RedisReadOnly,
    Kind::RedisClockSet,
    Kind::RedisBusy,
    Kind::WritesLost,
    Kind::DiskStalled,
];

const SENTINEL: &[Kind] = &[
    Kind::ConnectionsCut,
    Kind::ScriptsFlushed,
    Kind::RedisPaused,
    Kind::RedisClockSet,
    Kind::RedisBusy,
    Kind::DiskStalled,
    Kind::PrimaryKilled,
    Kind::PrimaryPaused,
    Kind::PrimaryPartitioned,
    Kind::PrimaryPartitioned,
    Kind::ReplicaPartitioned,
    Kind::ReplicaBehind,
    Kind::FailoverRequested,
];

/// The clocks of its nodes are not set: a Cluster itself goes by them, and may elect no other primary for hours.
const CLUSTER: &[Kind] = &[
    Kind::ConnectionsCut,
    Kind::ScriptsFlushed,
    Kind::RedisPaused,
    Kind::RedisKilled,
    Kind::RedisBusy,
    Kind::DiskStalled,
    Kind::PrimaryKilled,
    Kind::PrimaryPaused,
    Kind::PrimaryPartitioned,
    Kind::PrimaryPartitioned,
    Kind::ReplicaPartitioned,
    Kind::ReplicaBehind,
    Kind::FailoverRequested,
    Kind::SlotMoved,
];
