//! The report of a bench.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use ureq::http::StatusCode;

use super::BenchOptions;

/// The report of a bench. Its JSON has these names.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The options.
    #[serde(flatten)]
    pub options: BenchOptions,
    /// How often each connection had requests due, in ms; none where it was as fast as possible.
    pub burst_every_ms: Option<f64>,
    /// Messages added and finished per second; none for Pings.
    pub pairs_per_second: Option<f64>,
    /// Requests answered per second.
    pub frames_per_second: f64,
    /// Pairs, or Pings, that were due at a fixed rate and never made, since the server was slower, or this load. Their
    /// latency counts until the load gave them up: it is understated.
    pub not_made: u64,
    /// From request to answer, in us; at a fixed rate from when the request was due. The keys are `add`, `del` and
    /// `ping`. A request that was not made is left out.
    pub latency_us: BTreeMap<&'static str, Latency>,
    /// From the end of a tick to the arrival of its batch, in ms, counted per message; none where nothing timed out. It
    /// is overstated by at most the time from one AddNewMsg to the next and the latency of one, never understated.
    pub timeout_lateness_ms: Option<Latency>,
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

/// The quantiles of a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Half of them are at most this.
    pub p50: f64,
    /// 99 % of them.
    pub p99: f64,
    /// 99.9 % of them; none for the lateness of timeouts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p999: Option<f64>,
    /// All of them.
    pub max: f64,
}

impl Latency {
    /// That of a histogram in ns, in a unit of so many ns; none if nothing is in it.
    pub(super) fn of(histogram: &Histogram<u64>, unit: f64) -> Option<Latency> {
        #[expect(clippy::cast_precision_loss, reason = "a histogram holds 60 s at most")]
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / unit;
        let latency = Latency { p50: at(0.5), p99: at(0.99), p999: Some(at(0.999)), max: at(1.0) };
        (!histogram.is_empty()).then_some(latency)
    }
}

/// The resources that the server used, by its own metrics.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ServerFigures {
    /// CPU time while it was measured.
    pub cpu_seconds: f64,
    /// Resident memory at the end of that time.
    pub rss_bytes: u64,
}

/// How long the server may take to report its figures.
const PATIENCE: Duration = Duration::from_secs(5);

const CPU: &str = "process_cpu_seconds_total";
const MEMORY: &str = "process_resident_memory_bytes";

/// Asks the admin endpoint at this address for the figures since the start of the server. Blocks.
pub(super) fn of_server(admin: &str) -> Result<ServerFigures, String> {
    let url = format!("http://{admin}/metrics");
    let (_, text) = get(&url, PATIENCE)?;
    parse(&text).ok_or_else(|| {
        format!("{url} does not say {CPU} and {MEMORY}; is --admin the admin address of a sidecar?")
    })
}

/// The answer of an admin endpoint: its status and its text. Blocks.
pub(crate) fn get(url: &str, timeout: Duration) -> Result<(StatusCode, String), String> {
    // The sidecar is near: no proxy lies between. The text of an error status is worth reading.
    let config =
        ureq::Agent::config_builder().timeout_global(Some(timeout)).proxy(None).http_status_as_error(false);
    let answer = ureq::Agent::new_with_config(config.build()).get(url).call();
    answer
        .and_then(|mut answer| Ok((answer.status(), answer.body_mut().read_to_string()?)))
        .map_err(|error| format!("{url}: {error}; is --admin the admin address of a sidecar?"))
}

fn parse(text: &str) -> Option<ServerFigures> {
    Some(ServerFigures { cpu_seconds: value(text, CPU)?, rss_bytes: value(text, MEMORY)? })
}

fn value<T: FromStr>(text: &str, name: &str) -> Option<T> {
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_read_from_the_metrics_of_a_process() {
        let text = "# HELP process_cpu_seconds_total Total\n# TYPE process_cpu_seconds_total counter\n\
                    process_cpu_seconds_total 1.25\nprocess_resident_memory_bytes 41943040\n";
        assert_eq!(parse(text), Some(ServerFigures { cpu_seconds: 1.25, rss_bytes: 41_943_040 }));
        assert_eq!(parse("process_cpu_seconds_total 1\n"), None);
    }
}
