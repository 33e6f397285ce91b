//! `status`: the ring at a glance.

use std::fmt::Write as _;
use std::io::{Write, stdout};
use std::time::Duration;

use clap::Args;
use ureq::http::StatusCode;

use super::Failure;
use crate::admin::status::{GroupReport, RingReport, StatusReport};

/// Columns of the longest bar.
const BAR: usize = 48;

/// Characters of a leader's name that are drawn: a line has 80 columns.
const NAME: usize = 48;

/// Characters of a refusal that are printed. A sidecar says less; whatever else listens there may say a page.
const MAX_WORDS: usize = 1_000;

/// Show the ring, slot by slot, and the groups
#[derive(Args, Debug)]
pub(super) struct Status {
    /// The sidecar's admin address
    #[arg(long, env = "ACKWHEEL_ADMIN", default_value = "127.0.0.1:7416", value_name = "HOST:PORT")]
    admin: String,
    /// Print JSON, as GET /status does
    #[arg(long)]
    json: bool,
    /// How long to wait for the answer
    #[arg(long, default_value = "5s", value_name = "DURATION", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

impl Status {
    pub(super) fn run(self) -> Result<(), Failure> {
        let url = format!("http://{}/status", self.admin);
        // The sidecar is near: no proxy lies between. What it says with an error status is worth reading.
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(self.timeout))
            .proxy(None)
            .http_status_as_error(false)
            .build();
        let (code, text) = ureq::Agent::new_with_config(config)
            .get(&url)
            .call()
            .and_then(|mut answer| Ok((answer.status(), answer.body_mut().read_to_string()?)))
            .map_err(|error| {
                Failure::Run(format!("{url}: {error}; is --admin the admin address of a sidecar?"))
            })?;
        if code != StatusCode::OK {
            let words: String = text.trim().chars().take(MAX_WORDS).collect();
            return Err(Failure::Run(format!("{url} answers {code}: {words}")));
        }
        let report: StatusReport = serde_json::from_str(&text)
            .map_err(|error| Failure::Run(format!("{url} is no status of ackwheel: {error}")))?;
        let shown = if self.json { text } else { draw(&report) };
        let mut out = stdout().lock();
        write!(out, "{shown}")?;
        Ok(out.flush()?)
    }
}

fn draw(report: &StatusReport) -> String {
    let tick = humantime::format_duration(Duration::from_millis(u64::from(report.tick_ms)));
    let mut text = format!("store {}, {} slots of {tick}\n", report.store, report.slots);
    for ring in &report.rings {
        draw_ring(&mut text, ring);
    }
    let _ = writeln!(
        text,
        "\n{:<28} {:>16} {:>8} {:>8} {:>9}",
        "group", "subscribers here", "batches", "unacked", "oldest"
    );
    for group in &report.groups {
        draw_group(&mut text, group);
    }
    text
}

fn draw_ring(text: &mut String, ring: &RingReport) {
    let _ = write!(text, "\nring {}, ", ring.ring);
    let _ = match (&ring.leader, ring.lease_age_seconds) {
        (None, _) => writeln!(text, "led by nobody: its pointer stands until a sidecar is elected"),
        (Some(name), None) => writeln!(text, "led by {}", shortened(name)),
        (Some(name), Some(seconds)) => writeln!(text, "led by {} for {seconds:.0} s", shortened(name)),
    };
    let RingReport { pointer, epoch, in_flight, closing, .. } = ring;
    let _ = writeln!(text, "pointer {pointer}, epoch {epoch}, {in_flight} in flight, {closing} closing");
    let slots = ring.slots.len() as u64;
    let pointer = ring.pointer.checked_rem(slots).unwrap_or_default();
    let most = ring.slots.iter().copied().max().unwrap_or_default().max(1);
    for (slot, count) in (0..).zip(&ring.slots) {
        let mark = if slot == pointer { '>' } else { ' ' };
        let length = usize::try_from((count * BAR as u64).div_ceil(most)).unwrap_or(BAR);
        let bar = "#".repeat(length);
        let _ = writeln!(text, "{mark} slot {slot:>4} |{bar:<BAR$}| {count:>9}");
    }
}

fn shortened(name: &str) -> String {
    if name.chars().count() <= NAME {
        return name.to_owned();
    }
    let begin: String = name.chars().take(NAME - 1).collect();
    begin + "…"
}

fn draw_group(text: &mut String, group: &GroupReport) {
    let name: String = group.group.chars().take(28).collect();
    let _ = writeln!(
        text,
        "{name:<28} {:>16} {:>8} {:>8} {:>8.1}s",
        group.subscribers, group.outbox_batches, group.unacked_batches, group.oldest_seconds
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(number: u16, leader: Option<&str>) -> RingReport {
        RingReport {
            ring: number,
            pointer: 1_792_000_001,
            epoch: 1_792_000_000_000,
            leader: leader.map(String::from),
            lease_age_seconds: leader.map(|_| 86_399.6),
            leads: false,
            pointer_lag_seconds: 0.0,
            in_flight: 4_000_012,
            slots: vec![4_000_000, 0, 5],
            closing: 7,
            recent: Vec::new(),
        }
    }

    #[test]
    fn the_drawing_fits_80_columns_and_marks_the_pointer() {
        let long = "n".repeat(128);
        let leaders = [Some("logic-node-17:7415"), None, Some(long.as_str()), Some("b")];
        let report = StatusReport {
            sidecar: String::new(),
            store: "redis".into(),
            slots: 3,
            tick_ms: 1_000,
            rings: (0..).zip(leaders).map(|(number, leader)| ring(number, leader)).collect(),
            groups: vec![GroupReport {
                group: "g".repeat(64),
                subscribers: 2,
                outbox_batches: 10_000,
                unacked_batches: 3,
                oldest_seconds: 86_400.0,
            }],
        };
        let text = draw(&report);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("\n\nring 0, led by logic-node-17:7415 for 86400 s\n"), "{text}");
        assert!(text.contains("\n\nring 1, led by nobody: "), "{text}");
        assert!(
            text.contains("n… for 86400 s\npointer 1792000001, epoch 1792000000000, 4000012 in flight"),
            "{text}"
        );
        let pointer = format!("> slot {:>4}", 1_792_000_001_u64 % 3);
        assert_eq!(text.matches(&pointer).count(), 4, "{text}");
        assert!(text.contains(&"#".repeat(BAR)), "{text}");
        assert!(text.contains("subscribers here"), "{text}");
    }
}
