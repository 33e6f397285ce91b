//! The metrics of a sidecar: one table with the name, the type and the help text of each metric.

mod register;

use std::time::Duration;

#[cfg(target_os = "linux")]
use prometheus::process_collector::ProcessCollector;
use prometheus::{Counter, Gauge, GaugeVec, IntCounter, IntGauge, IntGaugeVec, Registry, TextEncoder};
use rustix::time::{ClockId, clock_gettime};

use self::register::{Labelled, Latencies, Register, opts};
use crate::core::{Backlog, DelOutcome, GroupName, JournalStatus, Outcome, Reason, RequestBatch, RingStatus};
use crate::logging;
use crate::protocol::frame::FrameType;

/// The name of the CPU time metric. This file exports the metric itself, because the collector of the prometheus crate
/// counts only whole seconds. This is too coarse for a measurement of ten seconds, or for a scrape every second.
const CPU_TIME: &str = "process_cpu_seconds_total";

/// Defines [`Metrics`] from a table. Each line contains a field, its type, the method of [`Register`] that creates the
/// metric, and the arguments of this method.
macro_rules! metrics {
    ($($field:ident: $type:ty = $make:ident($($argument:expr),*);)+) => {
        /// The metrics of a sidecar.
        #[derive(Debug)]
        #[expect(missing_docs, reason = "the help text in the table describes each")]
        pub struct Metrics {
            registry: Registry,
            cpu_time: Counter,
            $(pub $field: $type,)+
        }

        impl Default for Metrics {
            /// Registers all metrics. A metric with fixed label values starts with the value 0 for each of them.
            fn default() -> Metrics {
                let register = Register { registry: Registry::new() };
                let build_info = opts("build_info", "1, with the version as its label.");
                let build_info = build_info.const_label("version", env!("CARGO_PKG_VERSION"));
                register.add(IntGauge::with_opts(build_info)).set(1);
                Metrics {
                    $($field: register.$make($($argument),*),)+
                    cpu_time: register.add(Counter::new(CPU_TIME, "Total user and system CPU time spent in seconds.")),
                    registry: register.registry,
                }
            }
        }
    };
}

metrics! {
    messages_in_flight: IntGauge = gauge("messages_in_flight", "Messages neither acknowledged nor timed out.");
    messages_added: IntCounter = counter("messages_added_total", "Messages taken into flight, without re-arms.");
    messages_rearmed: IntCounter = counter("messages_rearmed_total", "Messages added again while in flight.");
    messages_acked: Labelled<DelOutcome, IntCounter> =
        counters("messages_acked_total", "DelMsg answers by outcome.", "outcome",
            &DelOutcome::ALL, DelOutcome::as_str);
    messages_timed_out: IntCounter = counter("messages_timed_out_total", "Messages not acknowledged in time.");
    messages_drained: IntCounter = counter("messages_drained_total", "Messages delivered early by a drain.");
    ack_latency: Latencies = latencies("ack_latency_seconds", "From AddNewMsg to DelMsg, late ones included.");
    timeout_lateness: Latencies =
        latencies("timeout_lateness_seconds",
            "Time from the end of a message's deadline tick to its publication in a batch.");
    pointer_tick: IntGauge = gauge("pointer_tick", "The tick at the pointer: the next one to expire.");
    pointer_lag: Gauge = gauge("pointer_lag_seconds", "How long after its due time the pointer moves.");
    shifted_ticks: IntCounter = counter("shifted_ticks_total", "Ticks by which stalls shifted every deadline.");
    stalls: IntCounter = counter("stalls_total", "Times that the process stalled for 150 ms or more.");
    expiry_behind_ticks: IntCounter =
        counter("expiry_behind_ticks_total", "Ticks that expired before expiry was done with earlier ticks.");
    leader: IntGauge = gauge("leader", "1 if this sidecar leads, else 0.");
    leader_epoch: IntGauge = gauge("leader_epoch", "The epoch under which this sidecar leads, else 0.");
    leader_changes: IntCounter = counter("leader_changes_total", "Times that this sidecar became the leader.");
    storm_ticks: IntCounter = counter("storm_ticks_total", "Ticks in which suspiciously many messages timed out.");
    batches_published: IntCounter = counter("batches_published_total", "Batches put into the outbox.");
    batches_delivered: IntCounter = counter("batches_delivered_total", "Deliveries of batches, repeats included.");
    batches_acked: IntCounter = counter("batches_acked_total", "Batches settled by a BatchAck.");
    batches_nacked: IntCounter = counter("batches_nacked_total", "Batches returned by a BatchNack.");
    batches_redelivered: IntCounter = counter("batches_redelivered_total", "Redeliveries of batches.");
    outbox_batches: IntGaugeVec =
        gauge_vec("outbox_batches", "Batches that a group has not acknowledged.", "group");
    outbox_oldest: GaugeVec = gauge_vec("outbox_oldest_seconds", "Age of a group's oldest batch.", "group");
    outbox_ids: IntGauge = gauge("outbox_ids", "Messages in batches that not every group has acknowledged.");
    outbox_max_ids: IntGauge = gauge("outbox_max_ids", "The limit of messages in the outbox, over all rings.");
    outbox_dropped_ids: IntCounter = counter("outbox_dropped_ids_total", "Messages lost to the outbox's bounds.");
    groups_dropped: IntCounter = counter("groups_dropped_total", "Groups dropped because they had no subscriber.");
    subscribers: IntGaugeVec = gauge_vec("subscribers", "Subscribers of a group here.", "group");
    connections: Labelled<Listener, IntGauge> =
        gauges("connections", "Connections of admitted clients, by listener.", "listener",
            &Listener::ALL, Listener::as_str);
    received_bytes: Labelled<Listener, IntCounter> =
        counters("received_bytes_total", "Bytes received from clients, by listener.", "listener",
            &Listener::ALL, Listener::as_str);
    sent_bytes: Labelled<Listener, IntCounter> =
        counters("sent_bytes_total", "Bytes sent to clients, by listener.", "listener",
            &Listener::ALL, Listener::as_str);
    max_connections: IntGauge = gauge("max_connections", "The limit of connections of each listener.");
    unauthenticated_connections: IntGauge =
        gauge("unauthenticated_connections", "Connections whose Hello was not accepted yet.");
    connections_evicted: IntCounter =
        counter("connections_evicted_total", "Unauthenticated connections closed for newer ones.");
    connections_opened: IntCounter = counter("connections_opened_total", "Connections accepted.");
    certificate_expiry: IntGauge =
        gauge("tls_certificate_expiry_timestamp_seconds", "When --tls-cert expires, in Unix time; 0 without one.");
    frames: Labelled<FrameType, IntCounter> =
        counters("frames_total", "Frames received and sent, by type.", "type", &FrameType::ALL, FrameType::as_str);
    resp_commands: Labelled<&'static str, IntCounter> =
        counters("resp_commands_total", "Commands received over the RESP protocol.", "command",
            &RESP_COMMANDS, |command| command);
    refusals: Labelled<Reason, IntCounter> =
        counters("refusals_total", "Requests and connections refused, by reason.", "reason",
            Reason::ALL, Reason::as_str);
    held_acks: IntGauge = gauge("held_acks", "DelMsg messages held while the store is unreachable.");
    max_held_acks: IntGauge = gauge("max_held_acks", "The limit of held DelMsg messages; 0 with the memory store.");
    max_in_flight: IntGauge = gauge("max_in_flight", "The limit of messages in flight, over all rings.");
    rings: IntGauge = gauge("rings", "Rings of the store, with or without a leader.");
    rings_led: IntGauge = gauge("rings_led", "Rings that this sidecar leads.");
    rings_unconfirmed: IntGauge = gauge("rings_unconfirmed", "Rings whose Redis no majority confirms.");
    ack_timeout: Gauge = gauge("ack_timeout_seconds", "The default ack timeout: one revolution.");
    store_up: IntGauge = gauge("store_up", "1 if the store answers, else 0.");
    journal_damaged: IntGauge = gauge("journal_damaged", "Damaged parts of the journal at the start.");
    journal_log_bytes: IntGauge = gauge("journal_log_bytes", "Bytes in the segments of the journal in use.");
    journal_unwritten_bytes: IntGauge = gauge("journal_unwritten_bytes", "Bytes that wait for the writer.");
    journal_refusing: IntGauge = gauge("journal_refusing", "1 if adds are refused because of the journal.");
    journal_errors: IntCounter = counter("journal_errors_total", "Failed writes and syncs of the journal.");
    journal_syncs: IntCounter = counter("journal_syncs_total", "Syncs of the journal.");
    journal_sync_time: Counter = counter("journal_sync_seconds_total", "The time of all syncs of the journal.");
    redis_round_trips: Labelled<&'static str, Latencies> =
        latencies_by("redis_round_trip_seconds",
            "Time from sending a script to Redis to its answer, or until it was given up.", "script",
            &["apply", "advance", "expire", "held", "forget", "mend", "reapply", "acks_applied",
                "acquire", "renew", "release", "open", "status", "get", "open_group", "delete_group", "leave_group",
                "take", "retake", "settle", "give_back", "tend", "backlogs",
                "heartbeat", "announce", "inspect", "reap", "drop_link"]);
    redis_errors: Labelled<&'static str, IntCounter> =
        counters("redis_errors_total", "Requests that Redis failed, by kind.", "kind",
            &["timeout", "disconnected", "readonly", "unwritable", "open_slot", "loading", "busy", "oom",
                "noscript", "stale", "lost", "forbidden", "other"], |kind| kind);
    redis_reconnects: IntCounter = counter("redis_reconnects_total", "Connections to Redis made again.");
    redis_lost: IntCounter = counter("redis_lost_total", "Times that Redis came back without the ring.");
    redis_lost_writes: IntCounter =
        counter("redis_lost_writes_total", "Scripts that Redis answered and then lost.");
    redis_lost_messages: Labelled<&'static str, IntCounter> =
        counters("redis_lost_messages_total", "Messages that Redis lost, by kind.", "kind",
            &["added", "acked"], |kind| kind);
    redis_reapplied_acks: IntCounter = counter("redis_reapplied_acks_total", "Lost Acks that were applied again.");
    log_lines_dropped: IntCounter =
        counter("log_lines_dropped_total",
            "Log lines dropped because stderr could not be written, or not fast enough.");
}

/// The commands of the RESP protocol that are counted. All others are counted together.
pub const RESP_COMMANDS: [&str; 8] =
    ["AW.ADD", "AW.DEL", "AW.GET", "AW.TAKE", "AW.ACK", "AW.NACK", "AW.STATUS", "other"];

/// A listener for clients, under the name of its flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listener {
    /// The native protocol over TCP.
    Listen,
    /// The native protocol over a Unix socket.
    Socket,
    /// The RESP protocol.
    Resp,
}

impl Listener {
    /// All listeners.
    pub const ALL: [Listener; 3] = [Listener::Listen, Listener::Socket, Listener::Resp];

    /// Returns the name of the flag, without the dashes.
    pub const fn as_str(self) -> &'static str {
        match self {
            Listener::Listen => "listen",
            Listener::Socket => "socket",
            Listener::Resp => "resp",
        }
    }
}

impl Metrics {
    /// Counts a frame of a type.
    pub fn count_frame(&self, frame_type: FrameType) {
        self.count_frames(frame_type, 1);
    }

    /// Counts `count` frames of a type.
    pub fn count_frames(&self, frame_type: FrameType, count: u64) {
        if count > 0 {
            self.frames.of(frame_type).inc_by(count);
        }
    }

    /// Counts the outcomes of completed requests.
    pub fn count_requests(&self, batch: &RequestBatch) {
        self.messages_added.inc_by(batch.total(Outcome::Added));
        self.messages_rearmed.inc_by(batch.total(Outcome::Rearmed));
        for outcome in [Outcome::Unknown, Outcome::Acked, Outcome::Late, Outcome::Withdrawn] {
            self.messages_acked.of(outcome.of_del()).inc_by(batch.total(outcome));
        }
        self.ack_latency.add(&batch.ack_latency);
    }

    /// Sets the gauges of the rings that this sidecar leads. No other sidecar exports these rings, so sums over all
    /// sidecars count each ring once. The epoch, the pointer and its lag are maximums over the rings.
    pub fn set_rings(&self, led: &[RingStatus]) {
        let most = |value: fn(&RingStatus) -> u64| gauge_value(led.iter().map(value).max().unwrap_or_default());
        self.leader.set(i64::from(!led.is_empty()));
        self.rings_led.set(i64::try_from(led.len()).unwrap_or(i64::MAX));
        self.leader_epoch.set(most(|ring| ring.epoch));
        self.messages_in_flight.set(gauge_value(led.iter().map(|ring| ring.in_flight).sum()));
        self.pointer_tick.set(most(|ring| ring.pointer.0));
        self.pointer_lag.set(led.iter().map(|ring| ring.pointer_lag_seconds).fold(0.0, f64::max));
    }

    /// Sets the metrics of the journal.
    pub fn set_journal(&self, journal: &JournalStatus) {
        self.journal_damaged.set(gauge_value(journal.damaged));
        self.journal_log_bytes.set(gauge_value(journal.log_bytes));
        self.journal_unwritten_bytes.set(gauge_value(journal.unwritten_bytes));
        self.journal_refusing.set(i64::from(journal.is_refusing));
        self.journal_errors.inc_by(journal.errors.saturating_sub(self.journal_errors.get()));
        self.journal_syncs.inc_by(journal.syncs.saturating_sub(self.journal_syncs.get()));
        self.journal_sync_time.inc_by((journal.sync_seconds - self.journal_sync_time.get()).max(0.0));
    }

    /// Sets the gauges of the outboxes of the rings that this sidecar leads, and of the subscribers on this sidecar.
    pub fn set_outbox(&self, backlog: &Backlog, subscribers: &[(GroupName, u64)]) {
        self.outbox_ids.set(gauge_value(backlog.ids));
        self.outbox_batches.reset();
        self.outbox_oldest.reset();
        self.subscribers.reset();
        for group in &backlog.groups {
            let label = &[group_label(&group.group)];
            self.outbox_batches.with_label_values(label).add(gauge_value(group.batches));
            let oldest = self.outbox_oldest.with_label_values(label);
            oldest.set(oldest.get().max(group.oldest.as_secs_f64()));
            // Export 0 for a group without subscribers.
            self.subscribers.with_label_values(label);
        }
        for (group, count) in subscribers {
            self.subscribers.with_label_values(&[group_label(group)]).add(gauge_value(*count));
        }
    }

    /// Returns all metrics in the text format of Prometheus.
    ///
    /// # Panics
    ///
    /// Panics if a metric cannot be encoded, which would be a bug in this file.
    pub fn render(&self) -> String {
        // Take a negative difference as 0: a concurrent scrape may have added a later value.
        self.cpu_time.inc_by((cpu_time().as_secs_f64() - self.cpu_time.get()).max(0.0));
        self.log_lines_dropped.inc_by(logging::dropped_lines().saturating_sub(self.log_lines_dropped.get()));
        let mut families = self.registry.gather();
        #[cfg(target_os = "linux")]
        {
            let process = prometheus::core::Collector::collect(&ProcessCollector::for_self());
            families.extend(process.into_iter().filter(|family| family.name() != CPU_TIME));
        }
        TextEncoder::new().encode_to_string(&families).expect("metrics made here can be written")
    }
}

/// Returns the CPU time of all threads of this process, user and system time together.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Returns the label of a group. Groups with a generated name share one label. Otherwise each of these groups would add
/// a series that soon ends.
fn group_label(group: &GroupName) -> &str {
    if group.is_generated() { "(ephemeral)" } else { group.as_str() }
}

/// Converts a value to the type of a gauge, limited to `i64::MAX`.
pub(crate) fn gauge_value(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::core::LatencyHistogram;

    #[test]
    fn fixed_labels_are_there_from_the_start() {
        let text = Metrics::default().render();
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
        let text = Metrics::default().render();
        let mut seen = BTreeSet::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let series = line.rsplit_once(' ').map_or(line, |(series, _)| series);
            assert!(seen.insert(series), "{series} is there twice: Prometheus refuses the whole page");
        }
        assert!(seen.len() > 100, "{text}");
    }

    #[test]
    fn each_script_has_a_histogram_of_its_own() {
        let metrics = Metrics::default();
        metrics.redis_round_trips.of("take").record(Duration::from_micros(180));
        metrics.redis_errors.of("readonly").inc();
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
        let metrics = Metrics::default();
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

    #[test]
    fn cpu_time_is_exported_once_and_in_fractions_of_a_second() {
        let before = cpu_time().as_secs_f64();
        let text = Metrics::default().render();
        let exported: Vec<f64> =
            text.lines().filter_map(|line| line.strip_prefix(CPU_TIME)?.trim().parse().ok()).collect();
        let after = cpu_time().as_secs_f64();
        assert!(matches!(exported[..], [time] if before <= time && time <= after), "{exported:?}");
        assert!(before > 0.0 && text.contains("\nprocess_resident_memory_bytes "), "{text}");
    }
}
