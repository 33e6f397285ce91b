//! Makes metrics and registers them.

use std::fmt;

use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::proto::MetricType;
use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::latencies::{Builder, Latencies, LatenciesVec};

/// The names of all metrics begin with this.
const PREFIX: &str = "ackwheel_";

/// A metric with a fixed set of label values, each of which exists from the start.
#[derive(Debug)]
pub struct Labelled<V: 'static, M> {
    values: &'static [V],
    metrics: Vec<M>,
}

impl<V: Copy + PartialEq + fmt::Debug, M> Labelled<V, M> {
    /// The metric of a label value.
    ///
    /// # Panics
    ///
    /// If the table of metrics does not list the value.
    pub fn of(&self, value: V) -> &M {
        let index = self.values.iter().position(|known| *known == value);
        &self.metrics[index.unwrap_or_else(|| panic!("{value:?} is not in the list of label values"))]
    }
}

/// Makes metrics that are in its registry.
pub(super) struct Register {
    pub(super) registry: Registry,
}

impl Register {
    pub(super) fn add<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("names and labels in this folder are valid");
        self.registry.register(Box::new(metric.clone())).expect("no metric is named twice");
        metric
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::with_opts(opts(name, help)))
    }

    pub(super) fn counters<V: Copy>(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: &'static [V],
        text: impl Fn(V) -> &'static str,
    ) -> Labelled<V, IntCounter> {
        self.labelled(IntCounterVec::new(opts(name, help), &[label]), values, text)
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
        self.add(histograms(opts(name, help))).with_label_values::<&str>(&[])
    }

    /// A histogram for each value of a label.
    pub(super) fn latencies_by(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: &'static [&'static str],
    ) -> Labelled<&'static str, Latencies> {
        self.labelled(histograms(opts(name, help).variable_label(label)), values, |value| value)
    }

    fn labelled<V: Copy, B: MetricVecBuilder + 'static>(
        &self,
        vector: prometheus::Result<MetricVec<B>>,
        values: &'static [V],
        text: impl Fn(V) -> &'static str,
    ) -> Labelled<V, B::M> {
        let vector = self.add(vector);
        let metrics = values.iter().map(|value| vector.with_label_values(&[text(*value)])).collect();
        Labelled { values, metrics }
    }
}

fn histograms(opts: Opts) -> prometheus::Result<LatenciesVec> {
    MetricVec::create(MetricType::HISTOGRAM, Builder, opts)
}

pub(super) fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("{PREFIX}{name}"), help)
}
