//! The report of a bench.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use ureq::http::StatusCode;

use super::BenchOptions;

/// The report of a bench. The names of its fields are the keys of the JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The options of the bench.
    #[serde(flatten)]
    pub options: BenchOptions,
    /// The option `burst_every` in ms; `None` without a fixed rate.
    pub burst_every_ms: Option<f64>,
    /// Messages that this load added, from its first request to its last: those in flight before the measurement too.
    pub adds: u64,
    /// Messages that this load acknowledged, from its first request to its last.
    pub dels: u64,
    /// Pairs of an added and an acknowledged message, per second. If messages must time out, this is the number of
    /// added messages per second. `None` for Pings.
    pub pairs_per_second: Option<f64>,
    /// Requests answered per second.
    pub frames_per_second: f64,
    /// Pairs of an add and a delete, or Pings, that were due at a fixed rate and never made. The server or the bench
    /// was too slow for them. Their latency is understated, because it counts only until the bench gave them up.
    pub not_made: u64,
    /// The latency from request to answer, in us. At a fixed rate, it counts from the time at which the request was
    /// due. The keys are `add`, `del` and `ping`. A kind of request that was not made has no key.
    pub latency_us: BTreeMap<&'static str, Latency>,
    /// The time from the end of a tick (the server's unit of time) to the arrival of its timeout batch, in ms, counted
    /// per message. `None` if nothing timed out. The time is never understated. Unless the server stalls, it is
    /// overstated by at most 2 ms plus the latency of a GetMsg.
    pub timeout_lateness_ms: Option<Latency>,
    /// How many messages of this load timed out. Messages that the load had to acknowledge do not count.
    pub timed_out: u64,
    /// How many messages of other clients timed out at the same server.
    pub timed_out_of_others: u64,
    /// How many times a batch was redelivered.
    pub redelivered_batches: u64,
    /// The number of errors: answers with a wrong outcome, refusals, missing messages.
    pub errors: u64,
    /// The first different error texts.
    pub error_texts: Vec<String>,
    /// The CPU time of this process during the measurement, in seconds.
    pub client_cpu_seconds: f64,
    /// The server's own figures; `None` if its admin endpoint was not asked or not reached.
    pub server: Option<ServerFigures>,
    /// The reason why the server's figures are missing.
    #[serde(skip)]
    pub server_problem: Option<String>,
}

/// The quantiles of a measured time, in the unit of the report's field.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The 99.9th percentile; `None` for the lateness of timeouts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p999: Option<f64>,
    /// The maximum.
    pub max: f64,
}

impl Latency {
    /// Returns the quantiles of a histogram of times in ns. Converts them to a unit of `unit` ns. Returns `None` if the
    /// histogram is empty.
    pub(super) fn of(histogram: &Histogram<u64>, unit: f64) -> Option<Latency> {
        #[expect(clippy::cast_precision_loss, reason = "a histogram holds 60 s at most")]
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / unit;
        let latency = Latency { p50: at(0.5), p99: at(0.99), p999: Some(at(0.999)), max: at(1.0) };
        (!histogram.is_empty()).then_some(latency)
    }
}

/// The resources that the server used, according to its metrics.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ServerFigures {
    /// The CPU time of the measurement, in seconds.
    pub cpu_seconds: f64,
    /// The resident memory at the end of the measurement, in bytes.
    pub rss_bytes: u64,
}

/// The timeout of a request for the server's figures.
const PATIENCE: Duration = Duration::from_secs(5);

const CPU: &str = "process_cpu_seconds_total";
const MEMORY: &str = "process_resident_memory_bytes";

/// Reads the figures since the start of the server from its admin endpoint. Blocks.
pub(super) fn of_server(admin: &str) -> Result<ServerFigures, String> {
    let url = format!("http://{admin}/metrics");
    let (status, text) = get(&url, PATIENCE)?;
    if !status.is_success() {
        return Err(format!("{url} answers {status}; is --admin the admin address of a sidecar?"));
    }
    parse(&text).ok_or_else(|| {
        format!("{url} does not contain {CPU} and {MEMORY}; is --admin the admin address of a sidecar?")
    })
}

/// Sends a GET request to an admin endpoint. Returns the status and the text of the answer. Blocks.
pub(crate) fn get(url: &str, timeout: Duration) -> Result<(StatusCode, String), String> {
    // The sidecar is on the same network, so no proxy is used. An error status is no failure here: the
    // caller decides.
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
