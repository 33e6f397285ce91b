//! How metrics come into being: each is made and registered in one step.

use prometheus::core::{Collector, Desc, Describer};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::PREFIX;
use super::latencies::{Histogram, Latencies};
use super::process::Process;
use crate::logging;

/// A counter whose value is asked for with each scrape.
#[derive(Clone)]
struct CounterOfProcess {
    desc: Desc,
    opts: Opts,
    value: fn() -> u64,
}

impl Collector for CounterOfProcess {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let counter = IntCounter::with_opts(self.opts.clone()).expect("names in this crate are valid");
        counter.inc_by((self.value)());
        counter.collect()
    }
}

/// Makes metrics and registers them.
pub(super) struct Maker {
    pub(super) registry: Registry,
}

impl Maker {
    pub(super) fn new() -> Maker {
        Maker { registry: Registry::new_custom(None, None).expect("no prefix is a valid prefix") }
    }

    fn register<C: Collector + Clone + 'static>(&self, collector: prometheus::Result<C>) -> C {
        let collector = collector.expect("names and labels in this file are valid");
        self.registry.register(Box::new(collector.clone())).expect("no metric is named twice");
        collector
    }

    fn opts(name: &str, help: &str) -> Opts {
        Opts::new(format!("{PREFIX}{name}"), help)
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::with_opts(Maker::opts(name, help)))
    }

    /// A counter that is counted elsewhere in this process.
    fn counter_of_process(&self, name: &str, help: &str, value: fn() -> u64) {
        let opts = Maker::opts(name, help);
        self.register(opts.describe().map(|desc| CounterOfProcess { desc, opts, value }));
    }

    pub(super) fn counters(&self, name: &str, help: &str, label: &str) -> IntCounterVec {
        self.register(IntCounterVec::new(Maker::opts(name, help), &[label]))
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.register(IntGauge::with_opts(Maker::opts(name, help)))
    }

    pub(super) fn gauge_f64(&self, name: &str, help: &str) -> prometheus::Gauge {
        self.register(prometheus::Gauge::with_opts(Maker::opts(name, help)))
    }

    pub(super) fn gauges(&self, name: &str, help: &str, label: &str) -> IntGaugeVec {
        self.register(IntGaugeVec::new(Maker::opts(name, help), &[label]))
    }

    pub(super) fn gauges_f64(&self, name: &str, help: &str, label: &str) -> prometheus::GaugeVec {
        self.register(prometheus::GaugeVec::new(Maker::opts(name, help), &[label]))
    }

    pub(super) fn latencies(&self, name: &str, help: &str) -> Latencies {
        let latencies = Latencies::default();
        self.register(Histogram::new(&Maker::opts(name, help), latencies.clone()));
        latencies
    }

    /// A histogram for each value of a label.
    pub(super) fn latencies_each(
        &self,
        name: &str,
        help: &str,
        label: &'static str,
        values: &'static [&'static str],
    ) -> Vec<Latencies> {
        let each: Vec<Latencies> = values.iter().map(|_| Latencies::default()).collect();
        let series = values.iter().copied().zip(each.iter().cloned()).collect();
        self.register(Histogram::labelled(&Maker::opts(name, help), label, series));
        each
    }

    pub(super) fn process_and_build(&self) {
        self.registry.register(Box::new(Process::new())).expect("process metrics have names of their own");
        let opts = Maker::opts("build_info", "1, with the version as its label.");
        let version = opts.const_label("version", env!("CARGO_PKG_VERSION"));
        self.register(IntGauge::with_opts(version)).set(1);
        self.counter_of_process(
            "log_lines_dropped_total",
            "Log lines dropped because stderr could not be written, or not fast enough.",
            logging::dropped_lines,
        );
    }
}
