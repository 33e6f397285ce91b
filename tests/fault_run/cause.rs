//! How each fault begins and ends.

use std::ops::Range;
use std::time::{Duration, Instant};

use rand::RngExt;
use rustix::process::Signal;

use super::faults::{Kind, Topology};
use super::pressure::Pressure;
use super::shared::Manners;
use super::stage::{Ongoing, READER_LEAVES, Remedy, Stage, Subject};
use crate::support::clock::Clock;

/// The offsets that clocks are set to, in seconds.
const OFFSETS: [i64; 8] = [0, 0, 2, -2, 90, -90, 3_600, 3 * 86_400];

/// How long after a request for a failover another follows, if the replica has not taken over.
const REQUEST_AGAIN: Duration = Duration::from_secs(10);

/// How long a primary may be silent before Sentinels, or the nodes of a Cluster, replace it.
fn unnoticed_ms(topology: Topology) -> Range<u64> {
    match topology {
        Topology::Memory | Topology::Redis => 50..6_000,
        Topology::Sentinel => 50..300,
        Topology::Cluster => 50..600,
    }
}

impl Stage {
    /// Whether what a kind concerns has no other fault.
    pub(super) fn can_happen(&self, kind: Kind) -> bool {
        let store = self.store.is_shared() && self.is_free(Subject::Store);
        let places = self.free_places();
        match kind {
            Kind::SidecarKilled
            | Kind::SidecarDrained
            | Kind::SidecarPaused
            | Kind::SidecarClockSet
            | Kind::LogReaderStuck
            | Kind::LogReaderGone
            | Kind::RequestFlood => !places.is_empty(),
            Kind::SubscribersGone | Kind::SubscribersSilent | Kind::SubscribersReturn => {
                self.shared.manners() == Manners::Usual
            }
            Kind::DiskStalled if self.store.is_shared() => store && self.store.disk().is_some(),
            Kind::DiskStalled => !places.is_empty() && self.is_free(Subject::Store) && self.store.disk().is_some(),
            Kind::AnswerLost | Kind::RequestHeld => !places.is_empty() && store,
            Kind::PrimaryPartitioned => store && self.store.can_be_cut() && self.store.primary == 0,
            Kind::ReplicaPartitioned => store && self.store.can_be_cut() && self.store.replica() == 0,
            _ => store,
        }
    }

    pub(super) fn cause(&mut self, kind: Kind) {
        match kind {
            Kind::SidecarKilled
            | Kind::SidecarDrained
            | Kind::SidecarPaused
            | Kind::SidecarClockSet
            | Kind::LogReaderStuck
            | Kind::LogReaderGone
            | Kind::AnswerLost
            | Kind::RequestHeld => self.cause_at_a_place(kind),
            Kind::SubscribersGone | Kind::SubscribersSilent | Kind::SubscribersReturn => {
                self.shared.set_manners(match kind {
                    Kind::SubscribersGone => Manners::Disconnect,
                    Kind::SubscribersSilent => Manners::Hang,
                    _ => Manners::Nack,
                });
                self.lasts(kind, None, 1_000..5_000, Remedy::Manners);
            }
            Kind::RequestFlood => {
                self.shared.flood();
                self.lasts(kind, None, 3_000..3_001, Remedy::Ebb);
            }
            Kind::DiskStalled => self.stall_the_disk(),
            _ => self.cause_at_the_store(kind),
        }
    }

    fn cause_at_a_place(&mut self, kind: Kind) {
        let places = self.free_places();
        let index = places[self.random.random_range(0..places.len())];
        let place = Some(Subject::Place(index));
        match kind {
            Kind::SidecarKilled => {
                let (mut sidecar, _) = self.places[index].sidecar.take().expect("it runs");
                sidecar.kill();
                self.shared.set_listen(index, None);
                let fault = self.lasts(kind, place, 0..3_000, Remedy::Start(index));
                self.timeline.lost_all(fault);
            }
            Kind::SidecarDrained => {
                self.drain(index);
                self.lasts(kind, place, 0..2_000, Remedy::Start(index));
            }
            Kind::SidecarPaused => {
                self.sidecar(index).stop();
                let long = self.random.random_bool(0.3);
                let ms = if long { 3_000..8_000 } else { 50..2_000 };
                self.lasts(kind, place, ms, Remedy::GoOn(index));
            }
            Kind::SidecarClockSet => {
                let offset = self.offset();
                // The last place has the clock.
                self.places
                    .last()
                    .and_then(|place| place.clock.as_ref())
                    .expect("it has one")
                    .set(Clock::Offset(offset));
                self.print(&format!("the clock is {offset} s fast"));
                self.lasts(kind, None, 1_000..1_001, Remedy::Ebb);
            }
            Kind::LogReaderStuck => {
                let log = self.sidecar(index).log().clone();
                log.stick();
                self.sidecar(index).fill_log_pipe();
                self.lasts(kind, None, 2_000..15_000, Remedy::Read(log));
            }
            Kind::LogReaderGone => {
                self.sidecar(index).log().close();
                self.sidecar(index).write_to_log(&format!("{READER_LEAVES}\n"));
                self.lasts(kind, None, 2_000..2_001, Remedy::Ebb);
            }
            Kind::AnswerLost => {
                self.places[index].proxy.as_ref().expect("one Redis has it").lose_an_answer();
                self.lasts(kind, place, 2_000..2_001, Remedy::Ebb);
            }
            _ => {
                self.places[index].proxy.as_ref().expect("one Redis has it").hold_a_request();
                self.lasts(kind, place, 100..4_000, Remedy::LetGo(index));
            }
        }
    }

    fn drain(&mut self, index: usize) {
        let (sidecar, drains) = self.places[index].sidecar.as_mut().expect("it runs");
        sidecar.signal(Signal::TERM);
        *drains = Some(Instant::now());
    }

    fn stall_the_disk(&mut self) {
        self.store.disk().expect("it can stall").freeze();
        if self.store.is_shared() {
            // A server that waits for its disk is silent.
            self.lasts(Kind::DiskStalled, Some(Subject::Store), unnoticed_ms(self.topology), Remedy::Thaw);
            return;
        }
        // A wheel in memory writes when it drains.
        let index = self.free_places()[0];
        self.drain(index);
        self.lasts(Kind::DiskStalled, Some(Subject::Store), 200..4_000, Remedy::Thaw);
        self.lasts(Kind::SidecarDrained, Some(Subject::Place(index)), 0..2_000, Remedy::Start(index));
    }

    fn cause_at_the_store(&mut self, kind: Kind) {
        let primaries = self.store.primaries();
        let any = primaries[self.random.random_range(0..primaries.len())];
        let primary = self.store.primary;
        let store = Some(Subject::Store);
        match kind {
            Kind::ConnectionsCut => {
                self.store.server(any).command::<u64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
                self.lasts(kind, None, 0..1, Remedy::Ebb);
            }
            Kind::ScriptsFlushed => {
                self.store.server(any).command::<()>(&["SCRIPT", "FLUSH"]);
                self.lasts(kind, None, 0..1, Remedy::Ebb);
            }
            Kind::RedisPaused => {
                self.store.server(any).stop();
                let ms = unnoticed_ms(self.topology);
                self.lasts(kind, store, ms, Remedy::ServerGoesOn(any));
            }
            Kind::RedisKilled => {
                // In a Cluster one without a replica; there is no other that could take over.
                let number = *primaries.last().expect("there is one");
                self.store.server_mut(number).kill();
                self.lasts(kind, store, 0..3_000, Remedy::ServerStarts(number));
            }
            Kind::RedisReadOnly => {
                self.store.server(any).command::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
                self.lasts(kind, store, 100..3_000, Remedy::Writable);
            }
            Kind::RedisClockSet => {
                let offset = self.offset();
                self.store.server(any).set_offset(offset);
                self.print(&format!("the clock is {offset} s fast"));
                self.lasts(kind, None, 1_000..1_001, Remedy::Ebb);
            }
            Kind::RedisBusy => {
                let server = self.store.server(any);
                let pressure = Pressure::on(server.address, server.port);
                self.lasts(kind, store, 1_000..4_000, Remedy::Relax(pressure));
            }
            Kind::WritesLost => {
                let snapshot = self.store.server(primary).snapshot();
                self.lasts(kind, store, 300..2_500, Remedy::Restore(snapshot));
            }
            Kind::SlotMoved => {
                self.lasts(kind, store, 1_000..1_001, Remedy::Ebb);
                let moved = self.store.move_a_ring();
                self.print(if moved { "a ring was moved" } else { "no ring lies where it can be moved" });
            }
            _ => self.cause_a_failover(kind),
        }
    }

    fn cause_a_failover(&mut self, kind: Kind) {
        let primary = self.store.primary;
        let store = Some(Subject::Store);
        match kind {
            Kind::PrimaryKilled => {
                self.store.server_mut(primary).kill();
                self.lasts(kind, store, 0..1, Remedy::Rejoin(primary));
            }
            Kind::PrimaryPaused => {
                self.store.server(primary).stop();
                self.lasts(kind, store, 0..1, Remedy::Rejoin(primary));
            }
            Kind::PrimaryPartitioned | Kind::ReplicaPartitioned => self.cause_a_partition(kind),
            Kind::ReplicaBehind => {
                self.store.set_behind(self.store.replica(), true);
                self.lasts(kind, store, 300..2_000, Remedy::KillPrimary);
            }
            _ => {
                if self.store.request_failover() {
                    let again = Instant::now() + REQUEST_AGAIN;
                    self.lasts(kind, store, 0..1, Remedy::Requested { old: primary, again });
                } else {
                    self.print("a failover was refused");
                }
            }
        }
    }

    /// Cuts off server 0 and the sidecar beside it.
    fn cause_a_partition(&mut self, kind: Kind) {
        self.store.cut();
        self.shared.set_cut(true);
        let fault = if kind == Kind::PrimaryPartitioned {
            self.lasts(kind, Some(Subject::Store), 0..1, Remedy::HealLater(0))
        } else {
            self.lasts(kind, Some(Subject::Store), 500..6_000, Remedy::Heal(0))
        };
        self.timeline.faults[fault].place = Some(0);
    }

    fn offset(&mut self) -> i64 {
        OFFSETS[self.random.random_range(0..OFFSETS.len())]
    }

    /// Records that a fault begins, and what ends it; returns its number.
    fn lasts(&mut self, kind: Kind, occupies: Option<Subject>, ms: Range<u64>, remedy: Remedy) -> usize {
        let due = Instant::now() + self.ms(ms);
        let place = if let Some(Subject::Place(index)) = occupies { Some(index) } else { None };
        let fault = self.timeline.begin(kind, place);
        self.print(&format!(
            "{}{}",
            kind.name(),
            place.map(|place| format!(", place {place}")).unwrap_or_default()
        ));
        self.ongoing.push(Ongoing { due, fault, occupies, remedy });
        fault
    }

    /// Ends a fault, or has it go on with its next step.
    pub(super) fn end(&mut self, ongoing: Ongoing) {
        let Ongoing { fault, occupies, remedy, .. } = ongoing;
        if let Some((ms, remedy)) = self.next_step(fault, remedy) {
            let due = Instant::now() + Duration::from_millis(ms);
            self.ongoing.push(Ongoing { due, fault, occupies, remedy });
            return;
        }
        self.timeline.end(fault);
        self.print(&format!("  over: {}", self.timeline.faults[fault].kind.name()));
    }

    /// Does what ends a fault; returns what is to be done after some ms, if it is not over yet.
    fn next_step(&mut self, fault: usize, remedy: Remedy) -> Option<(u64, Remedy)> {
        match remedy {
            Remedy::Start(index) => {
                // A sidecar that does not reach its store for 10 s does not start at all.
                if !self.has_left(index) || !self.is_free(Subject::Store) {
                    return Some((0, Remedy::Start(index)));
                }
                self.start(index);
            }
            Remedy::GoOn(index) => {
                self.sidecar(index).go_on();
            }
            Remedy::LetGo(index) => self.places[index].proxy.as_ref().expect("one Redis has it").let_go(),
            Remedy::Read(log) => log.go_on(),
            Remedy::Manners => self.shared.set_manners(Manners::Usual),
            Remedy::Thaw => self.store.disk().expect("it can stall").thaw(),
            Remedy::ServerGoesOn(number) => self.store.server(number).go_on(),
            Remedy::ServerStarts(number) => self.store.restart(number),
            Remedy::Writable => {
                let primary = self.store.primary;
                self.store.server(primary).command::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
            }
            Remedy::Restore(snapshot) => {
                let primary = self.store.primary;
                self.store.server_mut(primary).restore(&snapshot);
                self.timeline.lost_all(fault);
            }
            Remedy::Relax(pressure) => drop(pressure),
            Remedy::Ebb => {}
            remedy => return self.next_step_of_a_failover(fault, remedy),
        }
        None
    }

    fn next_step_of_a_failover(&mut self, fault: usize, remedy: Remedy) -> Option<(u64, Remedy)> {
        match remedy {
            Remedy::KillPrimary => {
                let primary = self.store.primary;
                self.store.server_mut(primary).kill();
                Some((0, Remedy::Rejoin(primary)))
            }
            Remedy::Rejoin(old) | Remedy::HealLater(old) if !self.store.has_taken_over(1 - old) => {
                Some((20, remedy))
            }
            Remedy::Requested { old, again } if !self.store.has_taken_over(1 - old) => {
                let mut next = again;
                if Instant::now() >= again {
                    self.store.request_failover();
                    next = Instant::now() + REQUEST_AGAIN;
                }
                Some((20, Remedy::Requested { old, again: next }))
            }
            Remedy::Rejoin(old) | Remedy::Requested { old, .. } => {
                self.take_over(old);
                self.store.rejoin(old);
                self.timeline.lost_all(fault);
                Some((3_000, Remedy::Demote(old)))
            }
            Remedy::HealLater(old) => {
                self.take_over(old);
                let ms = self.random.random_range(500..5_000);
                Some((ms, Remedy::Heal(old)))
            }
            Remedy::Heal(number) => {
                self.store.heal();
                self.shared.set_cut(false);
                self.timeline.lost_all(fault);
                Some((3_000, Remedy::Demote(number)))
            }
            Remedy::Demote(old) | Remedy::InStep(old) if self.store.has_taken_over(old) => {
                // On a busy machine it was made the primary again meanwhile.
                self.take_over(1 - old);
                self.timeline.lost_all(fault);
                Some((0, Remedy::InStep(1 - old)))
            }
            Remedy::Demote(old) => {
                if !self.store.is_in_step(old) && self.store.has_taken_over(1 - old) {
                    self.store.demote(old);
                }
                Some((0, Remedy::InStep(old)))
            }
            Remedy::InStep(old) if !self.store.is_in_step(old) => Some((20, remedy)),
            _ => None,
        }
    }

    fn take_over(&mut self, old: usize) {
        self.print("  the replica has taken over");
        self.store.primary = 1 - old;
        self.store.set_behind(1 - old, false);
    }
}
