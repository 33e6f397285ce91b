//! Histograms that take many latencies at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::Opts;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{self, LabelPair, MetricFamily, MetricType};

use crate::core::latency_histogram::{BOUNDS, LatencyHistogram, STAMP_UNIT};

/// A histogram of latencies. A frame of 32,768 Acks costs a few additions.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    counts: [AtomicU64; BOUNDS.len() + 1],
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

    #[expect(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
    fn histogram(&self) -> proto::Histogram {
        let mut cumulative = 0;
        let mut buckets = Vec::with_capacity(BOUNDS.len());
        for (count, bound) in self.0.counts.iter().zip(BOUNDS) {
            cumulative += count.load(Ordering::Relaxed);
            let mut bucket = proto::Bucket::default();
            bucket.set_cumulative_count(cumulative);
            bucket.set_upper_bound((STAMP_UNIT * bound).as_secs_f64());
            buckets.push(bucket);
        }
        cumulative += self.0.counts[BOUNDS.len()].load(Ordering::Relaxed);
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(cumulative);
        histogram.set_sample_sum(self.0.sum_micros.load(Ordering::Relaxed) as f64 / 1e6);
        histogram
    }
}

/// Exports latencies to Prometheus: one series, or one for each value of a label.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    desc: Desc,
    label: Option<&'static str>,
    series: Vec<(&'static str, Latencies)>,
}

impl Histogram {
    /// Without a label there is one series, whose value is not shown.
    pub(super) fn new(
        opts: &Opts,
        label: Option<&'static str>,
        series: Vec<(&'static str, Latencies)>,
    ) -> prometheus::Result<Histogram> {
        let labels = label.into_iter().map(String::from).collect();
        let desc = Desc::new(opts.fq_name(), opts.help.clone(), labels, HashMap::new())?;
        Ok(Histogram { desc, label, series })
    }

    fn metric(&self, value: &str, latencies: &Latencies) -> proto::Metric {
        let labels = self.label.into_iter().map(|name| {
            let mut label = LabelPair::default();
            label.set_name(name.to_owned());
            label.set_value(value.to_owned());
            label
        });
        let mut metric = proto::Metric::from_label(labels.collect());
        metric.set_histogram(latencies.histogram());
        metric
    }
}

impl Collector for Histogram {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut family = MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.desc.help.clone());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(self.series.iter().map(|(value, latencies)| self.metric(value, latencies)).collect());
        vec![family]
    }
}
