//! What the server has used, by its metrics.

use std::time::Duration;

/// How long the server may take to say it.
const PATIENCE: Duration = Duration::from_secs(5);

const CPU: &str = "process_cpu_seconds_total";
const MEMORY: &str = "process_resident_memory_bytes";

/// What a process has used.
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
