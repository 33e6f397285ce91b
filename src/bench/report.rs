//! The report of a bench.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::{BenchOptions, Op, Order};

/// The report of a bench. Its JSON has these names.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The requests.
    pub op: Op,
    /// Connections that carried the load.
    pub connections: usize,
    /// Further connections that only answered Pings.
    pub idle_connections: usize,
    /// Requests of one connection that were unanswered at most.
    pub pipeline: usize,
    /// Messages in one AddNewMsg.
    pub ids_per_frame: usize,
    /// Messages to be acknowledged that were kept in flight.
    pub in_flight: u64,
    /// The share of messages to be acknowledged.
    pub acked: f64,
    /// The rate asked for; none where it was as fast as possible.
    pub rate: Option<u64>,
    /// How often each connection had requests due, in ms; none where it was as fast as possible.
    pub burst_every_ms: Option<f64>,
    /// Threads that made the load.
    pub threads: usize,
    /// In which order adds and dels came.
    pub order: Order,
    /// Whether they never slept.
    pub busy_poll: bool,
    /// For how long was measured.
    pub seconds: f64,
    /// Messages added and finished per second; none for Pings.
    pub pairs_per_second: Option<f64>,
    /// Requests answered per second.
    pub frames_per_second: f64,
    /// Pairs, or Pings, that were due at a fixed rate and never made, since the server was slower, or this load. Their
    /// latency counts until the load gave them up: it is understated.
    pub not_made: u64,
    /// From request to answer, in us; at a fixed rate from when the request was due.
    pub latency_us: LatencyReport,
    /// From the end of a tick to the arrival of its batch, in ms, counted per message; none where nothing timed out.
    pub timeout_lateness_ms: Option<Lateness>,
    /// Messages that timed out, none of which was to be acknowledged.
    pub timed_out: u64,
    /// Messages that timed out at the same server and were not of this load.
    pub timed_out_of_others: u64,
    /// Batches that were delivered more than once.
    pub redelivered_batches: u64,
    /// Errors: answers with a wrong outcome, refusals, missing messages.
    pub errors: u64,
    /// The first different ones.
    pub error_texts: Vec<String>,
    /// CPU time of this process while it was measured, in seconds.
    pub client_cpu_seconds: f64,
    /// The server's own figures; none where its admin endpoint was not asked or not reached.
    pub server: Option<ServerFigures>,
    /// Why there are none.
    #[serde(skip)]
    pub server_problem: Option<String>,
}

/// Latencies by request. A request that was not made is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LatencyReport {
    /// Of AddNewMsg.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub add: Option<Latency>,
    /// Of DelMsg.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub del: Option<Latency>,
    /// Of Ping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ping: Option<Latency>,
}

/// Latencies in us.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Half of them are at most this.
    pub p50: f64,
    /// 99 % of them.
    pub p99: f64,
    /// 99.9 % of them.
    pub p999: f64,
    /// All of them.
    pub max: f64,
}

/// How late timeout batches came, in ms. It is overstated by at most the time from one AddNewMsg to the next and the
/// latency of one, never understated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Lateness {
    /// Half of the messages came at most this late.
    pub p50: f64,
    /// 99 % of them.
    pub p99: f64,
    /// All of them.
    pub max: f64,
}

/// The resources that the server used, by its own metrics.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ServerFigures {
    /// CPU time while it was measured.
    pub cpu_seconds: f64,
    /// Resident memory at the end of that time.
    pub rss_bytes: u64,
}

#[expect(clippy::cast_precision_loss, reason = "a histogram holds 60 s at most")]
fn at(histogram: &Histogram<u64>, quantile: f64, ns: f64) -> f64 {
    histogram.value_at_quantile(quantile) as f64 / ns
}

impl Latency {
    /// That of a histogram in ns; none if nothing is in it.
    pub(super) fn of(histogram: &Histogram<u64>) -> Option<Latency> {
        let at = |quantile| at(histogram, quantile, 1e3);
        let latency = Latency { p50: at(0.5), p99: at(0.99), p999: at(0.999), max: at(1.0) };
        (!histogram.is_empty()).then_some(latency)
    }
}

impl Lateness {
    /// That of a histogram in ns.
    pub(super) fn of(histogram: &Histogram<u64>) -> Lateness {
        let at = |quantile| at(histogram, quantile, 1e6);
        Lateness { p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

impl Report {
    /// A report that says only what was asked for.
    pub(super) fn new(options: &BenchOptions) -> Report {
        Report {
            op: options.op,
            connections: options.connections,
            idle_connections: options.idle_connections,
            pipeline: options.pipeline(),
            ids_per_frame: options.ids_per_frame,
            in_flight: options.in_flight,
            acked: options.acked,
            rate: options.rate,
            burst_every_ms: options.rate.map(|_| options.burst_every.as_secs_f64() * 1e3),
            threads: options.threads,
            order: options.order,
            busy_poll: options.busy_poll,
            seconds: options.seconds,
            pairs_per_second: None,
            frames_per_second: 0.0,
            not_made: 0,
            latency_us: LatencyReport::default(),
            timeout_lateness_ms: None,
            timed_out: 0,
            timed_out_of_others: 0,
            redelivered_batches: 0,
            errors: 0,
            error_texts: Vec::new(),
            client_cpu_seconds: 0.0,
            server: None,
            server_problem: None,
        }
    }
}

/// How long the server may take to say it.
const PATIENCE: Duration = Duration::from_secs(5);

const CPU: &str = "process_cpu_seconds_total";
const MEMORY: &str = "process_resident_memory_bytes";

/// The resources of a process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figures {
    /// CPU time since its start, in seconds.
    pub(super) cpu_seconds: f64,
    /// Resident memory.
    pub(super) rss_bytes: f64,
}

/// Asks the admin endpoint at this address. Blocks.
pub(super) fn of_server(admin: &str) -> Result<Figures, String> {
    let url = format!("http://{admin}/metrics");
    let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).proxy(None).build();
    let text = ureq::Agent::new_with_config(config)
        .get(&url)
        .call()
        .and_then(|mut answer| answer.body_mut().read_to_string())
        .map_err(|error| format!("{url}: {error}; is --admin the admin address of the sidecar?"))?;
    parse(&text).ok_or_else(|| format!("{url} does not say {CPU} and {MEMORY}"))
}

fn parse(text: &str) -> Option<Figures> {
    let value = |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Some(Figures { cpu_seconds: value(CPU)?, rss_bytes: value(MEMORY)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_read_from_the_metrics_of_a_process() {
        let text = "# HELP process_cpu_seconds_total Total\n# TYPE process_cpu_seconds_total counter\n\
                    process_cpu_seconds_total 1.25\nprocess_resident_memory_bytes 41943040\n";
        assert_eq!(parse(text), Some(Figures { cpu_seconds: 1.25, rss_bytes: 41_943_040.0 }));
        assert_eq!(parse("process_cpu_seconds_total 1\n"), None);
    }
}
