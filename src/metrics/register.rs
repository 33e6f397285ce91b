//! Makes metrics and registers them.

use std::fmt;

use prometheus::core::Collector;
use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::latencies::{Histogram, Latencies};

/// The names of all metrics begin with this.
const PREFIX: &str = "ackwheel_";

/// A metric with a fixed set of label values, each of which exists from the start.
#[derive(Debug)]
pub struct Labelled<V: 'static, M> {
    values: &'static [V],
    metrics: Vec<M>,
}

impl<V: PartialEq + fmt::Debug, M> Labelled<V, M> {
    /// The metric of a label value.
    pub(super) fn of(&self, value: &V) -> &M {
        let index = self.values.iter().position(|known| known == value);
        &self.metrics[index.unwrap_or_else(|| panic!("{value:?} is not in the list of label values"))]
    }
}

/// The counters of what Redis answered and then lost.
#[derive(Debug)]
pub struct RedisLosses {
    /// Scripts of adds and Acks.
    pub writes: IntCounter,
    /// Messages that were added in them.
    pub added: IntCounter,
    /// Messages that were acknowledged in them, as far as the sidecar remembers their Acks.
    pub acked: IntCounter,
    /// Acks of those that were applied again.
    pub reapplied: IntCounter,
}

/// Makes metrics that are in its registry.
pub(super) struct Register {
    pub(super) registry: Registry,
}

impl Register {
    pub(super) fn new() -> Register {
        Register { registry: Registry::new() }
    }

    pub(super) fn add<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("names and labels in this folder are valid");
        self.registry.register(Box::new(metric.clone())).expect("no metric is named twice");
        metric
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::with_opts(opts(name, help)))
    }

    pub(super) fn counters<V>(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: &'static [V],
        text: impl Fn(V) -> &'static str,
    ) -> Labelled<V, IntCounter>
    where
        V: Copy,
    {
        let counters = self.add(IntCounterVec::new(opts(name, help), &[label]));
        let metrics = values.iter().map(|value| counters.with_label_values(&[text(*value)])).collect();
        Labelled { values, metrics }
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.add(IntGauge::with_opts(opts(name, help)))
    }

    pub(super) fn gauge_f64(&self, name: &str, help: &str) -> Gauge {
        self.add(Gauge::with_opts(opts(name, help)))
    }

    pub(super) fn gauge_vec(&self, name: &str, help: &str, label: &str) -> IntGaugeVec {
        self.add(IntGaugeVec::new(opts(name, help), &[label]))
    }

    pub(super) fn gauge_f64_vec(&self, name: &str, help: &str, label: &str) -> GaugeVec {
        self.add(GaugeVec::new(opts(name, help), &[label]))
    }

    pub(super) fn latencies(&self, name: &str, help: &str) -> Latencies {
        let latencies = Latencies::default();
        self.add(Histogram::new(&opts(name, help), None, vec![("", latencies.clone())]));
        latencies
    }

    /// A histogram for each value of a label.
    pub(super) fn latencies_by(
        &self,
        name: &str,
        help: &str,
        label: &'static str,
        values: &'static [&'static str],
    ) -> Labelled<&'static str, Latencies> {
        let metrics: Vec<Latencies> = values.iter().map(|_| Latencies::default()).collect();
        let series = values.iter().copied().zip(metrics.iter().cloned()).collect();
        self.add(Histogram::new(&opts(name, help), Some(label), series));
        Labelled { values, metrics }
    }

    pub(super) fn redis_losses(&self) -> RedisLosses {
        let kinds: &[&str] = &["added", "acked"];
        let messages = self.counters(
            "redis_lost_messages_total",
            "Messages that Redis lost, by kind.",
            "kind",
            kinds,
            |kind| kind,
        );
        RedisLosses {
            writes: self.counter("redis_lost_writes_total", "Scripts that Redis answered and then lost."),
            added: messages.of(&"added").clone(),
            acked: messages.of(&"acked").clone(),
            reapplied: self.counter("redis_reapplied_acks_total", "Lost Acks that were applied again."),
        }
    }

    pub(super) fn build_info(&self) {
        let version = opts("build_info", "1, with the version as its label.");
        let version = version.const_label("version", env!("CARGO_PKG_VERSION"));
        self.add(IntGauge::with_opts(version)).set(1);
    }
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("{PREFIX}{name}"), help)
}
