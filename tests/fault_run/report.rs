//! Prints what a run found, as a section of docs/RELIABILITY.md.

use std::fmt::Write;

use hdrhistogram::Histogram;

use super::faults::Kind;
use super::history::Breach;
use super::timeline::Timeline;
use super::verdict::{Counts, Verdict};

/// The findings of a run beside its messages.
#[derive(Debug)]
pub struct Batches {
    pub count: u64,
    pub deliveries: u64,
    pub ids_with_two_contents: usize,
    /// Batches that a group did not get, with a fault that allows it and without.
    pub missing_allowed: usize,
    pub missing_broken: usize,
}

/// The columns of a row, in the order of the document.
const COLUMNS: [Breach; 6] = [
    Breach::Lost,
    Breach::Doubled,
    Breach::Early,
    Breach::AckedAndReported,
    Breach::LateInTime,
    Breach::WrongOutcome,
];

/// Prints the section of the document for this run.
pub fn print(timeline: &Timeline, verdict: &Verdict, batches: &Batches, command: &str) {
    println!("\n### {}\n\n```console", timeline.topology.name());
    println!("$ {}\n```\n", command.replace(" cargo", " \\\n    cargo"));
    println!(
        "| fault | times | messages | lost | doubled | early | acked and reported | in time and late | wrong answer \
         | late: p50, p99, max |\n|---|---|---|---|---|---|---|---|---|---|"
    );
    println!("{}", row("**all**", timeline.caused(), &verdict.all));
    let none = Counts::default();
    for kind in Kind::ALL.into_iter().filter(|kind| timeline.count(*kind) > 0) {
        let counts = verdict.by_kind.get(&kind).unwrap_or(&none);
        println!("{}", row(kind.name(), timeline.count(kind), counts));
    }
    let Batches { count, deliveries, ids_with_two_contents, missing_allowed, missing_broken } = batches;
    println!(
        "\n- Steady state: {} timeouts, late by {} ms.",
        grouped(verdict.steady.messages),
        late(&verdict.steady.late_ms)
    );
    println!("- Batches: {} in {} deliveries.", grouped(*count), grouped(*deliveries));
    println!("- Batch ids with two contents: {ids_with_two_contents}.");
    println!("- Batches that not every group got: {missing_broken} + {missing_allowed}.\n");
}

fn row(name: &str, faults: usize, counts: &Counts) -> String {
    let mut row = format!("| {name} | {faults} | {} |", grouped(counts.messages));
    for breach in COLUMNS {
        let (broken, allowed) = (counts.broken[breach as usize], counts.allowed[breach as usize]);
        // Nothing is written of zeros that the contract allows.
        let text =
            if allowed == 0 { grouped(broken) } else { format!("{} + {}", grouped(broken), grouped(allowed)) };
        write!(row, " {text} |").expect("a text can grow");
    }
    write!(row, " {} |", late(&counts.late_ms)).expect("a text can grow");
    row
}

fn late(late_ms: &Histogram<u32>) -> String {
    if late_ms.is_empty() {
        return String::from("-");
    }
    let of = |share| late_ms.value_at_quantile(share);
    format!("{}, {}, {}", of(0.5), of(0.99), late_ms.max())
}

/// A number with a comma at every thousand.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
