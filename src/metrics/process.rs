//! The metrics of the process, with CPU time to the microsecond.
//!
//! The collector of the prometheus crate counts CPU time in whole seconds. Over the ten seconds of a measurement that is
//! an error of a tenth, and more than a whole core's worth for a scrape every second.

use std::time::Duration;

use prometheus::Counter;
use prometheus::core::{Collector, Desc};
#[cfg(target_os = "linux")]
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::MetricFamily;
use rustix::time::{ClockId, clock_gettime};

const CPU: &str = "process_cpu_seconds_total";

/// CPU time that this process has used, user and system, in all its threads.
#[must_use]
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// What the operating system knows of this process: on others than Linux, its CPU time only.
pub(super) struct Process {
    #[cfg(target_os = "linux")]
    collector: ProcessCollector,
    cpu: Counter,
}

impl Process {
    pub(super) fn new() -> Process {
        let cpu = Counter::new(CPU, "Total user and system CPU time spent in seconds.");
        Process {
            #[cfg(target_os = "linux")]
            collector: ProcessCollector::for_self(),
            cpu: cpu.expect("the name is a constant that is right"),
        }
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        let descs = self.cpu.desc().into_iter();
        #[cfg(target_os = "linux")]
        let descs = descs.chain(self.collector.desc().into_iter().filter(|desc| desc.fq_name != CPU));
        descs.collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        // Where two scrapes meet, the later one may have counted already what the earlier one sees.
        self.cpu.inc_by((cpu_time().as_secs_f64() - self.cpu.get()).max(0.0));
        let families = self.cpu.collect().into_iter();
        #[cfg(target_os = "linux")]
        let families = families.chain(self.collector.collect().into_iter().filter(|family| family.name() != CPU));
        families.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_told_once_and_in_fractions_of_a_second() {
        let process = Process::new();
        let before = cpu_time().as_secs_f64();
        let families = process.collect();
        let told: Vec<f64> = families
            .iter()
            .filter(|family| family.name() == CPU)
            .map(|family| family.get_metric()[0].get_counter().get_value())
            .collect();
        assert!(matches!(told[..], [told] if before <= told && told <= cpu_time().as_secs_f64()), "{told:?}");
        assert!(before > 0.0 && families.iter().any(|family| family.name() == "process_resident_memory_bytes"));
    }
}
