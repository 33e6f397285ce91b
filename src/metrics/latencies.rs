//! Histograms that take many latencies at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::Opts;
use prometheus::core::{Metric, MetricVec, MetricVecBuilder};
use prometheus::proto::{self, LabelPair};

use crate::core::{LATENCY_BOUNDS, LatencyHistogram, STAMP_UNIT};

/// A histogram of latencies. A frame of 32,768 Acks costs a few additions.
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

/// Histograms of latencies with the same labels, each with other values.
pub(super) type LatenciesVec = MetricVec<Builder>;

#[derive(Clone, Debug)]
pub(super) struct Builder;

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
