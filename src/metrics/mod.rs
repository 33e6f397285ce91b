//! Every metric, once. The help texts say what each counts.

mod labels;
mod latencies;
mod losses;
mod make;
mod process;
mod refusals;

use std::time::Duration;

use prometheus::{IntCounter, IntGauge, IntGaugeVec, Registry, TextEncoder};

pub use labels::REDIS_ERRORS;
pub use latencies::Latencies;
pub use losses::RedisLosses;
pub use process::cpu_time;

use self::make::Maker;

use crate::core::group::GroupName;
use crate::core::message::DelOutcome;
use crate::core::outbox::Backlog;
use crate::core::refusal::Reason;
use crate::core::request_batch::{Outcome, RequestBatch};
use crate::core::ring::RingStatus;
use crate::protocol::frame::FrameType;

/// The names of all metrics begin with this.
const PREFIX: &str = "ackwheel_";

/// The scripts of a Redis store: the values of `script` in `redis_round_trip_seconds`.
pub const SCRIPTS: &[&str] = &[
    "apply",
    "advance",
    "expire",
    "held",
    "forget",
    "mend",
    "reapply",
    "acks_applied",
    "acquire",
    "renew",
    "release",
    "open",
    "status",
    "open_group",
    "delete_group",
    "leave_group",
    "take",
    "take_again",
    "settle",
    "give_back",
    "tend",
    "heartbeat",
    "announce",
    "inspect",
    "reap",
    "drop_link",
    "backlogs",
];

/// What a sidecar accepts at most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Messages in flight, over all rings.
    pub max_in_flight: u64,
    /// Messages of DelMsg that are held while the store is away; 0 where the store is never away.
    pub max_held_acks: u64,
    /// Messages in the outbox, over all rings.
    pub outbox_max_ids: u64,
    /// Connections.
    pub max_connections: usize,
}

/// The metrics of a sidecar.
#[derive(Debug)]
#[expect(missing_docs, reason = "each is described once, by the help text in `new`")]
pub struct Metrics {
    registry: Registry,
    pub messages_in_flight: IntGauge,
    pub messages_added: IntCounter,
    pub messages_rearmed: IntCounter,
    pub messages_acked: [IntCounter; 4],
    pub messages_timed_out: IntCounter,
    pub messages_drained: IntCounter,
    pub ack_latency: Latencies,
    pub timeout_lateness: Latencies,
    pub pointer_tick: IntGauge,
    pub pointer_lag: prometheus::Gauge,
    pub shifted_ticks: IntCounter,
    pub stalls: IntCounter,
    pub expiry_behind_ticks: IntCounter,
    pub leader: IntGauge,
    pub leader_epoch: IntGauge,
    pub leader_changes: IntCounter,
    pub storm_ticks: IntCounter,
    pub batches_published: IntCounter,
    pub batches_delivered: IntCounter,
    pub batches_acked: IntCounter,
    pub batches_nacked: IntCounter,
    pub batches_redelivered: IntCounter,
    pub outbox_batches: IntGaugeVec,
    pub outbox_oldest: prometheus::GaugeVec,
    pub outbox_ids: IntGauge,
    pub outbox_max_ids: IntGauge,
    pub outbox_dropped_ids: IntCounter,
    pub groups_dropped: IntCounter,
    pub subscribers: IntGaugeVec,
    pub connections: IntGauge,
    pub max_connections: IntGauge,
    pub connections_opened: IntCounter,
    pub certificate_expiry: IntGauge,
    frames: Vec<IntCounter>,
    refusals: Vec<IntCounter>,
    pub held_acks: IntGauge,
    pub max_held_acks: IntGauge,
    pub max_in_flight: IntGauge,
    pub rings: IntGauge,
    pub rings_led: IntGauge,
    pub rings_unconfirmed: IntGauge,
    pub ack_timeout: prometheus::Gauge,
    pub store_up: IntGauge,
    pub memory_lost: IntGauge,
    redis_round_trips: Vec<Latencies>,
    redis_errors: Vec<IntCounter>,
    pub redis_reconnects: IntCounter,
    pub redis_lost: IntCounter,
    pub redis_losses: RedisLosses,
}

impl Metrics {
    /// All metrics, every fixed label value at 0.
    ///
    /// # Panics
    ///
    /// If a name is given twice: a mistake in this file.
    #[must_use]
    pub fn new() -> Metrics {
        let make = Maker::new();
        let acked = make.counters("messages_acked_total", "DelMsg answers by outcome.", "outcome");
        let frames = make.counters("frames_total", "Frames received and sent, by type.", "type");
        let refusals = make.counters("refusals_total", "Requests and connections refused, by reason.", "reason");
        let redis_errors = make.counters("redis_errors_total", "Requests that Redis failed, by kind.", "kind");
        make.process_and_build();
        Metrics {
            messages_in_flight: make.gauge("messages_in_flight", "Messages neither acknowledged nor timed out."),
            messages_added: make.counter("messages_added_total", "Messages taken into flight, without re-arms."),
            messages_rearmed: make.counter("messages_rearmed_total", "Messages in flight when added again."),
            messages_acked: DelOutcome::ALL.map(|outcome| acked.with_label_values(&[outcome.as_str()])),
            messages_timed_out: make.counter("messages_timed_out_total", "Messages not acknowledged in time."),
            messages_drained: make.counter("messages_drained_total", "Messages handed out early by a drain."),
            ack_latency: make.latencies("ack_latency_seconds", "From AddNewMsg to DelMsg, late ones included."),
            timeout_lateness: make.latencies(
                "timeout_lateness_seconds",
                "Time from the end of a message's deadline tick to its publication in a batch.",
            ),
            pointer_tick: make.gauge("pointer_tick", "The tick at which the wheel stands."),
            pointer_lag: make.gauge_f64("pointer_lag_seconds", "How long the pointer is behind its time."),
            shifted_ticks: make.counter("shifted_ticks_total", "Ticks by which stalls shifted every deadline."),
            stalls: make.counter("stalls_total", "Times that the process stood still for 150 ms or more."),
            expiry_behind_ticks: make.counter("expiry_behind_ticks_total", "Ticks that expiry was behind with."),
            leader: make.gauge("leader", "1 if this sidecar leads, else 0."),
            leader_epoch: make.gauge("leader_epoch", "The epoch under which this sidecar leads, else 0."),
            leader_changes: make.counter("leader_changes_total", "Times that this sidecar became the leader."),
            storm_ticks: make.counter("storm_ticks_total", "Ticks in which suspiciously many messages timed out."),
            batches_published: make.counter("batches_published_total", "Batches put into the outbox."),
            batches_delivered: make.counter("batches_delivered_total", "Batches handed out, every time."),
            batches_acked: make.counter("batches_acked_total", "Batches settled by a BatchAck."),
            batches_nacked: make.counter("batches_nacked_total", "Batches given back by a BatchNack."),
            batches_redelivered: make.counter("batches_redelivered_total", "Batches handed out more than once."),
            outbox_batches: make.gauges("outbox_batches", "Batches that a group has not acknowledged.", "group"),
            outbox_oldest: make.gauges_f64("outbox_oldest_seconds", "Age of a group's oldest batch.", "group"),
            outbox_ids: make.gauge("outbox_ids", "Messages in batches that not every group has acknowledged."),
            outbox_max_ids: make.gauge("outbox_max_ids", "The most messages kept in the outbox, over all rings."),
            outbox_dropped_ids: make.counter("outbox_dropped_ids_total", "Messages lost to the outbox's bounds."),
            groups_dropped: make.counter("groups_dropped_total", "Groups dropped for want of a subscriber."),
            subscribers: make.gauges("subscribers", "Subscribers of a group here.", "group"),
            connections: make.gauge("connections", "Open connections."),
            max_connections: make.gauge("max_connections", "The most connections accepted."),
            connections_opened: make.counter("connections_opened_total", "Connections accepted."),
            certificate_expiry: make
                .gauge("tls_certificate_expiry_timestamp_seconds", "When --tls-cert runs out; 0 without one."),
            frames: FrameType::ALL.iter().map(|kind| frames.with_label_values(&[kind.as_str()])).collect(),
            refusals: Reason::ALL.iter().map(|reason| refusals.with_label_values(&[reason.as_str()])).collect(),
            held_acks: make.gauge("held_acks", "DelMsg messages held while the store is away."),
            max_held_acks: make.gauge("max_held_acks", "The most DelMsg messages held; 0 where none are."),
            max_in_flight: make.gauge("max_in_flight", "The most messages in flight accepted, over all rings."),
            rings: make.gauge("rings", "Rings of the store: as many as there are, whoever leads them."),
            rings_led: make.gauge("rings_led", "Rings that this sidecar leads."),
            rings_unconfirmed: make.gauge("rings_unconfirmed", "Rings whose Redis no majority confirms."),
            ack_timeout: make.gauge_f64("ack_timeout_seconds", "The default ack timeout: one revolution."),
            store_up: make.gauge("store_up", "1 if the store answers, else 0."),
            memory_lost: make.gauge("memory_lost", "1 if the sidecar before, with --state, did not drain."),
            redis_round_trips: make.latencies_each(
                "redis_round_trip_seconds",
                "Time from sending a script to Redis to its answer, or until it was given up.",
                "script",
                SCRIPTS,
            ),
            redis_errors: REDIS_ERRORS.iter().map(|kind| redis_errors.with_label_values(&[kind])).collect(),
            redis_reconnects: make.counter("redis_reconnects_total", "Connections to Redis made anew."),
            redis_lost: make.counter("redis_lost_total", "Times that Redis came back without the ring."),
            redis_losses: RedisLosses::new(&make),
            registry: make.registry,
        }
    }

    /// Shows the bounds of this sidecar.
    pub fn show_limits(&self, limits: &Limits) {
        self.max_in_flight.set(gauge_value(limits.max_in_flight));
        self.max_held_acks.set(gauge_value(limits.max_held_acks));
        self.outbox_max_ids.set(gauge_value(limits.outbox_max_ids));
        self.max_connections.set(i64::try_from(limits.max_connections).unwrap_or(i64::MAX));
    }

    /// Shows how many rings there are, and their default ack timeout.
    pub fn show_wheel(&self, rings: usize, ack_timeout: Duration) {
        self.rings.set(i64::try_from(rings).unwrap_or(i64::MAX));
        self.ack_timeout.set(ack_timeout.as_secs_f64());
    }

    /// Counts a frame of a type.
    pub fn count_frame(&self, frame_type: FrameType) {
        self.count_frames(frame_type, 1);
    }

    /// Counts so many frames of a type.
    pub fn count_frames(&self, frame_type: FrameType, count: u64) {
        if count > 0 {
            let index = FrameType::ALL.iter().position(|known| *known == frame_type);
            self.frames[index.expect("ALL holds every type")].inc_by(count);
        }
    }

    /// The round trips of a script.
    ///
    /// # Panics
    ///
    /// If it is not one of [`SCRIPTS`]: a mistake in the store.
    #[must_use]
    pub fn round_trip(&self, script: &str) -> &Latencies {
        let index = SCRIPTS.iter().position(|known| *known == script);
        &self.redis_round_trips[index.expect("SCRIPTS holds every script")]
    }

    /// Counts an error of Redis.
    ///
    /// # Panics
    ///
    /// If it is not one of [`REDIS_ERRORS`]: a mistake in the store.
    pub fn count_redis_error(&self, kind: &str) {
        let index = REDIS_ERRORS.iter().position(|known| *known == kind);
        self.redis_errors[index.expect("REDIS_ERRORS holds every kind")].inc();
    }

    /// Counts the outcomes of completed requests.
    pub fn count_requests(&self, batch: &RequestBatch) {
        self.messages_added.inc_by(batch.total(Outcome::Added));
        self.messages_rearmed.inc_by(batch.total(Outcome::Rearmed));
        let of_del = [Outcome::Unknown, Outcome::Acked, Outcome::Late, Outcome::Withdrawn];
        for (outcome, counter) in of_del.into_iter().zip(&self.messages_acked) {
            counter.inc_by(batch.total(outcome));
        }
        self.ack_latency.add(&batch.ack_latency);
    }

    /// Shows the rings that are led here as they are now. Those led elsewhere are shown there, so that sum()
    /// over the sidecars is right.
    pub fn show_rings(&self, led: &[RingStatus]) {
        let most = |value: fn(&RingStatus) -> u64| gauge_value(led.iter().map(value).max().unwrap_or_default());
        self.leader.set(i64::from(!led.is_empty()));
        self.rings_led.set(i64::try_from(led.len()).unwrap_or(i64::MAX));
        self.leader_epoch.set(most(|ring| ring.epoch));
        self.messages_in_flight.set(gauge_value(led.iter().map(|ring| ring.in_flight).sum()));
        self.pointer_tick.set(most(|ring| ring.pointer.0));
        let lag = led.iter().map(|ring| ring.pointer_lag).max().unwrap_or_default();
        self.pointer_lag.set(lag.as_secs_f64());
    }

    /// Shows what the outboxes of the rings led here hold, for which groups, and who subscribes here.
    pub fn show_outbox(&self, backlog: &Backlog, subscribers: &[(GroupName, u64)]) {
        self.outbox_ids.set(gauge_value(backlog.ids));
        self.outbox_batches.reset();
        self.outbox_oldest.reset();
        self.subscribers.reset();
        for of in &backlog.groups {
            let label = &[group_label(&of.group)];
            self.outbox_batches.with_label_values(label).add(gauge_value(of.batches));
            let oldest = self.outbox_oldest.with_label_values(label);
            oldest.set(oldest.get().max(of.oldest.as_secs_f64()));
            // There is a 0 for a group without subscribers, too.
            self.subscribers.with_label_values(label);
        }
        for (group, count) in subscribers {
            self.subscribers.with_label_values(&[group_label(group)]).add(gauge_value(*count));
        }
    }

    /// All metrics in Prometheus' text format.
    ///
    /// # Panics
    ///
    /// If a metric cannot be written: a mistake in this file.
    #[must_use]
    pub fn render(&self) -> String {
        TextEncoder::new().encode_to_string(&self.registry.gather()).expect("metrics made here can be written")
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

/// What a group is called in a label. Groups that nobody has named are one: each would be a series of its own, and gone soon.
fn group_label(group: &GroupName) -> &str {
    if group.is_made_up() { "(ephemeral)" } else { group.as_str() }
}

fn gauge_value(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::core::latency_histogram::LatencyHistogram;

    #[test]
    fn fixed_labels_are_there_from_the_start() {
        let text = Metrics::new().render();
        for line in [
            "ackwheel_messages_acked_total{outcome=\"withdrawn\"} 0",
            "ackwheel_refusals_total{reason=\"silent\"} 0",
            "ackwheel_frames_total{type=\"timeout_batch\"} 0",
            "ackwheel_ack_latency_seconds_count 0",
            "ackwheel_redis_round_trip_seconds_count{script=\"apply\"} 0",
            "ackwheel_redis_round_trip_seconds_bucket{script=\"heartbeat\",le=\"0.0001\"} 0",
            "ackwheel_redis_errors_total{kind=\"stale\"} 0",
            "ackwheel_redis_reconnects_total 0",
            "ackwheel_redis_lost_total 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn no_series_is_there_twice() {
        let text = Metrics::new().render();
        let mut seen = BTreeSet::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let series = line.rsplit_once(' ').map_or(line, |(series, _)| series);
            assert!(seen.insert(series), "{series} is there twice: Prometheus refuses the whole page");
        }
        assert!(seen.len() > 100, "{text}");
    }

    #[test]
    fn each_script_has_a_histogram_of_its_own() {
        let metrics = Metrics::new();
        metrics.round_trip("take").record(Duration::from_micros(180));
        metrics.count_redis_error("readonly");
        let text = metrics.render();
        for line in [
            "ackwheel_redis_round_trip_seconds_bucket{script=\"take\",le=\"0.0001\"} 0",
            "ackwheel_redis_round_trip_seconds_bucket{script=\"take\",le=\"0.0002\"} 1",
            "ackwheel_redis_round_trip_seconds_sum{script=\"take\"} 0.00018",
            "ackwheel_redis_errors_total{kind=\"readonly\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn a_histogram_is_cumulative_and_closed_by_infinity() {
        let metrics = Metrics::new();
        let mut histogram = LatencyHistogram::default();
        histogram.record(Duration::from_millis(2), 3);
        histogram.record(Duration::from_secs(60), 1);
        metrics.ack_latency.add(&histogram);
        let text = metrics.render();
        for line in [
            "ackwheel_ack_latency_seconds_bucket{le=\"0.001\"} 0",
            "ackwheel_ack_latency_seconds_bucket{le=\"0.0025\"} 3",
            "ackwheel_ack_latency_seconds_bucket{le=\"30\"} 3",
            "ackwheel_ack_latency_seconds_bucket{le=\"+Inf\"} 4",
            "ackwheel_ack_latency_seconds_sum 60.006",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }
}
