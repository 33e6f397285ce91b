//! Every command of README.md is run, and its output compared with the output that is shown there.

use std::sync::mpsc::Receiver;
use std::time::Instant;

use crate::support::process::{Process, assert_names, lines};
use crate::support::sidecar::Sidecar;
use crate::support::{PATIENCE, wait_until};

/// Commands that build and test the project. `.ci/run` runs the tests, and this test is one of them.
const CARGO: [&str; 2] = ["cargo run --release -- serve", "cargo test --release"];

/// A command, or an output that comes later, with its line.
enum Step {
    Command(usize, String, Vec<String>),
    Output(usize, Vec<String>),
}

/// The blocks of console and text, in their order.
fn steps(document: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut block = "";
    for (number, line) in (1..).zip(document.lines()) {
        if let Some(kind) = line.strip_prefix("```") {
            block = if block.is_empty() { kind } else { "" };
            if kind == "text" && !block.is_empty() {
                steps.push(Step::Output(number, Vec::new()));
            }
        } else if let ("console", Some(command)) = (block, line.strip_prefix("$ ")) {
            let command = command.split(" #").next().unwrap().trim().to_owned();
            steps.push(Step::Command(number, command, Vec::new()));
        } else if let ("console" | "text", Some(Step::Command(.., output) | Step::Output(_, output))) =
            (block, steps.last_mut())
        {
            output.push(line.to_owned());
        }
    }
    // The picture at the top is a text too.
    steps.retain(|step| !matches!(step, Step::Output(_, output) if output.iter().any(|line| line.contains('─'))));
    steps
}

/// A line without the number of its tick.
fn without_tick(line: &str) -> String {
    let words = line.split(' ').scan("", |before, word| {
        let is_tick = *before == "tick";
        *before = word;
        Some(if is_tick { "N" } else { word })
    });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn every_command_of_the_readme_does_what_is_shown() {
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let mut sidecar: Option<Sidecar> = None;
    let mut watch: Option<(Process, Receiver<(Instant, String)>)> = None;
    let mut run = 0;
    for step in steps(&document) {
        match step {
            Step::Command(line, command, shown) => {
                if CARGO.contains(&command.as_str()) {
                    continue;
                }
                let words: Vec<&str> = command.split(' ').collect();
                let ["ackwheel", verb, arguments @ ..] = &words[..] else { panic!("line {line}: {command}") };
                match (*verb, &sidecar) {
                    ("serve", _) => sidecar = Some(Sidecar::start(arguments)),
                    ("watch", Some(sidecar)) => {
                        let mut process = Process::spawn(&mut sidecar.command(&words[1..]));
                        let printed = lines(process.stdout());
                        watch = Some((process, printed));
                        wait_until("it watches", || {
                            sidecar.metrics().count("frames_total{type=\"subscribe\"}") == 1
                        });
                    }
                    (_, Some(sidecar)) => {
                        let output = sidecar.run(&words[1..]).output().to_owned();
                        let same = |lines: Vec<&str>| lines.into_iter().map(without_tick).collect::<Vec<_>>();
                        let shown = shown.iter().map(String::as_str).collect();
                        assert_eq!(same(output.lines().collect()), same(shown), "line {line}: {command}");
                    }
                    (_, None) => panic!("line {line}: {command} has no sidecar yet"),
                }
                run += 1;
            }
            Step::Output(line, shown) => {
                let (_, printed) = watch.as_ref().unwrap_or_else(|| panic!("line {line}: nothing prints that"));
                for shown in shown {
                    let (_, line) = printed.recv_timeout(PATIENCE).expect("the watch prints a batch");
                    assert_eq!(without_tick(&line), without_tick(&shown));
                }
            }
        }
    }
    assert!(run >= 5, "only {run} commands were run: the test is blind");
    // The session leaves a batch without a consumer, which is not a failure yet.
    let checked = sidecar.expect("the session starts a sidecar").run(&["check"]);
    assert_names(checked.output(), &["warn  groups: group default has 1 batch and no subscriber"]);
}
