//! The last line: what the replay found.

use std::collections::BTreeMap;
use std::fmt;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::ledger::Ledger;
use crate::plan::Planned;

/// The report of the replay; as JSON in the order of its fields.
#[derive(Debug, Serialize)]
pub struct Report {
    pushed: usize,
    acked: usize,
    timed_out: usize,
    clients_without_ack: usize,
    /// How often something went otherwise than the trace says.
    pub mismatches: u64,
    mismatches_by_kind: BTreeMap<&'static str, u64>,
    ack_latency_ms: Percentiles,
    timeout_lateness_ms: Percentiles,
}

/// A distribution in four numbers; none where there was nothing to measure.
#[derive(Debug, Serialize)]
struct Percentiles {
    p50: Option<f64>,
    p90: Option<f64>,
    p99: Option<f64>,
    max: Option<f64>,
}

impl Report {
    /// The report of a ledger that is closed.
    pub fn new(ledger: &Ledger, plan: &[Planned]) -> Report {
        Report {
            pushed: ledger.pushed(),
            acked: ledger.acked(),
            timed_out: ledger.timed_out(),
            clients_without_ack: ledger.clients_without_ack(plan),
            mismatches: ledger.mismatches().total(),
            mismatches_by_kind: ledger.mismatches().by_kind().collect(),
            ack_latency_ms: Percentiles::of(ledger.ack_latency()),
            timeout_lateness_ms: Percentiles::of(ledger.timeout_lateness()),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { pushed, acked, timed_out, clients_without_ack, mismatches, .. } = self;
        write!(f, "pushed={pushed} acked={acked} timed_out={timed_out} ")?;
        write!(f, "clients_without_ack={clients_without_ack} mismatches={mismatches} ")?;
        write!(f, "ack_latency_ms={} timeout_lateness_ms={}", self.ack_latency_ms, self.timeout_lateness_ms)
    }
}

impl Percentiles {
    fn of(microseconds: &Histogram<u64>) -> Percentiles {
        #[expect(clippy::cast_precision_loss, reason = "µs of a replay")]
        let ms = |microseconds: u64| microseconds as f64 / 1_000.0;
        let at = |quantile| (!microseconds.is_empty()).then(|| ms(microseconds.value_at_quantile(quantile)));
        Percentiles { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }
}

/// `p50:150.1,p90:420.7,p99:1003.5,max:1502.2`, or `-` where there was nothing to measure.
impl fmt::Display for Percentiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Percentiles { p50: Some(p50), p90: Some(p90), p99: Some(p99), max: Some(max) } = self else {
            return f.write_str("-");
        };
        write!(f, "p50:{p50:.1},p90:{p90:.1},p99:{p99:.1},max:{max:.1}")
    }
}
