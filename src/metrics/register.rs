//! Creates metrics and registers them. Contains a histogram to which many latencies can be added at once.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::core::{
    Atomic, Collector, GenericCounter, GenericGauge, GenericGaugeVec, Metric, MetricVec, MetricVecBuilder,
};
use prometheus::proto::{self, LabelPair, MetricType};
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use crate::core::{LATENCY_BOUNDS, LatencyHistogram, STAMP_UNIT};

/// The prefix of the names of all metrics.
const PREFIX: &str = "ackwheel_";

/// A metric with a fixed set of label values. Each value has a series from the start, even before its first event.
#[derive(Debug)]
pub struct Labelled<V: 'static, M> {
    values: &'static [V],
    metrics: Vec<M>,
}

impl<V: Copy + PartialEq + fmt::Debug, M> Labelled<V, M> {
    /// Returns the metric of a label value.
    ///
    /// # Panics
    ///
    /// If `value` is not one of the label values of this metric.
    pub fn of(&self, value: V) -> &M {
        let index = self.values.iter().position(|known| *known == value);
        &self.metrics[index.unwrap_or_else(|| panic!("{value:?} is not in the list of label values"))]
    }
}

/// A registry, with methods that create metrics and register them.
pub(super) struct Register {
    pub(super) registry: Registry,
}

impl Register {
    pub(super) fn add<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("names and labels in this folder are valid");
        self.registry.register(Box::new(metric.clone())).expect("no metric is named twice");
        metric
    }

    pub(super) fn counter<N: Atomic + 'static>(&self, name: &str, help: &str) -> GenericCounter<N> {
        self.add(GenericCounter::with_opts(opts(name, help)))
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

    pub(super) fn gauges<V: Copy>(
        &self,
        name: &str,
        help: &str,
        label: &str,
        values: &'static [V],
        text: impl Fn(V) -> &'static str,
    ) -> Labelled<V, IntGauge> {
        self.labelled(IntGaugeVec::new(opts(name, help), &[label]), values, text)
    }

    pub(super) fn gauge<N: Atomic + 'static>(&self, name: &str, help: &str) -> GenericGauge<N> {
        self.add(GenericGauge::with_opts(opts(name, help)))
    }

    pub(super) fn gauge_vec<N: Atomic + 'static>(
        &self,
        name: &str,
        help: &str,
        label: &str,
    ) -> GenericGaugeVec<N> {
        self.add(GenericGaugeVec::new(opts(name, help), &[label]))
    }

    pub(super) fn latencies(&self, name: &str, help: &str) -> Latencies {
        self.add(histograms(opts(name, help))).with_label_values::<&str>(&[])
    }

    /// Creates a histogram for each value of a label.
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

fn histograms(opts: Opts) -> prometheus::Result<MetricVec<Builder>> {
    MetricVec::create(MetricType::HISTOGRAM, Builder, opts)
}

pub(super) fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("{PREFIX}{name}"), help)
}

/// A histogram of latencies. Adding the latencies of many Acks takes only one addition per bucket.
#[derive(Clone, Debug)]
pub struct Latencies(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    labels: Vec<LabelPair>,
    counts: [AtomicU64; LATENCY_BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Latencies {
    /// Adds all latencies of a histogram.
    pub fn add(&self, histogram: &LatencyHistogram) {
        if histogram.is_empty() {
            return;
        }
        for (counter, count) in self.0.counts.iter().zip(histogram.counts) {
            counter.fetch_add(count, Ordering::Relaxed);
        }
        self.0.sum_micros.fetch_add(histogram.sum_micros, Ordering::Relaxed);
    }

    /// Records one latency.
    pub fn record(&self, latency: Duration) {
        let mut histogram = LatencyHistogram::default();
        histogram.record(latency, 1);
        self.add(&histogram);
    }
}

impl Metric for Latencies {
    #[expect(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
    fn metric(&self) -> proto::Metric {
        let mut cumulative = 0;
        let mut buckets = Vec::with_capacity(LATENCY_BOUNDS.len());
        for (count, bound) in self.0.counts.iter().zip(LATENCY_BOUNDS) {
            cumulative += count.load(Ordering::Relaxed);
            let mut bucket = proto::Bucket::default();
            bucket.set_cumulative_count(cumulative);
            bucket.set_upper_bound((STAMP_UNIT * bound).as_secs_f64());
            buckets.push(bucket);
        }
        cumulative += self.0.counts[LATENCY_BOUNDS.len()].load(Ordering::Relaxed);
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(cumulative);
        histogram.set_sample_sum(self.0.sum_micros.load(Ordering::Relaxed) as f64 / 1e6);
        let mut metric = proto::Metric::from_label(self.0.labels.clone());
        metric.set_histogram(histogram);
        metric
    }
}

/// The builder of histograms with the same label names and different label values.
#[derive(Clone, Debug)]
struct Builder;

impl MetricVecBuilder for Builder {
    type M = Latencies;
    type P = Opts;

    fn build<V: AsRef<str>>(&self, opts: &Opts, values: &[V]) -> prometheus::Result<Latencies> {
        let labels = opts.variable_labels.iter().zip(values).map(|(name, value)| {
            let mut label = LabelPair::default();
            label.set_name(name.clone());
            label.set_value(value.as_ref().to_owned());
            label
        });
        Ok(Latencies(Arc::new(Counters { labels: labels.collect(), ..Counters::default() })))
    }
}
