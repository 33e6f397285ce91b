//! The output of `ackwheel status` in the documents has the lines of a real run, in their order.

use super::{Kind, Page, Piece, assert_nothing_wrong, pages};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

/// The lines that a page shows behind each call of `ackwheel status`, with the number of the line of the call.
fn shown(page: &Page) -> Vec<(usize, Vec<&str>)> {
    let mut runs: Vec<(usize, Vec<&str>)> = Vec::new();
    let mut next = 0;
    for Piece { line, kind, text } in page.pieces() {
        if kind != Kind::Fenced {
            continue;
        }
        if text.starts_with("$ ackwheel status") {
            runs.push((line, Vec::new()));
        } else if line == next && !text.starts_with("$ ") {
            runs.last_mut().expect("a call is before its output").1.push(text);
        } else {
            continue;
        }
        next = line + 1;
    }
    runs.retain(|(_, lines)| !lines.is_empty());
    runs
}

/// The words of a line, without figures and without the name of who leads.
fn shape(line: &str) -> Vec<&str> {
    let mut words: Vec<&str> = line
        .split_whitespace()
        .map(|word| if word.contains(|character: char| character.is_ascii_digit()) { "#" } else { word })
        .collect();
    if let Some(by) = words.windows(3).position(|three| three[..2] == ["led", "by"] && three[2] != "nobody:") {
        words[by + 2] = "NAME";
    }
    words
}

/// Whether all lines that are shown come in a real output, in this order, however much was left out.
fn is_of(shown: &[&str], real: &str) -> bool {
    let mut real = real.lines().map(shape);
    let mut lines = shown.iter().map(|line| shape(line)).filter(|shape| !matches!(&shape[..], [] | ["…"]));
    lines.all(|shown| real.any(|real| real == shown))
}

/// The output of `ackwheel status` for a shared wheel with a leader, and for one that has lost its leader.
fn real() -> [String; 2] {
    let redis = Redis::start();
    let mut leader = Sidecar::on(&redis, "leader", &[]);
    wait_until("it leads", || leader.leader().is_some());
    let led = leader.run(&["status"]).output().to_owned();
    leader.terminate();
    let follower = Sidecar::on(&redis, "follower", &["--never-lead"]);
    wait_until("nobody leads", || follower.leader().is_none());
    [led, follower.run(&["status"]).output().to_owned()]
}

#[test]
fn a_status_that_is_shown_is_one_of_the_program() {
    let (mut checked, mut faults) = (0, Vec::new());
    let real = real();
    for page in pages() {
        for (line, lines) in shown(&page) {
            checked += 1;
            if !real.iter().any(|real| is_of(&lines, real)) {
                faults.push(format!("{}: no status looks like this:\n{}", page.at(line), lines.join("\n")));
            }
        }
    }
    assert_nothing_wrong(checked, 3, &faults);
}

#[test]
fn a_status_of_another_time_is_noticed() {
    let real = "store redis, 15 slots of 1s\nok: all\n\nring 0, led by a for 2s\n0 in flight, 0 closing\n";
    assert!(is_of(&["store redis, 30 slots of 1s", "…", "ring 3, led by other for 1h", "…"], real));
    assert!(!is_of(&["ring 0, led by a for 2s", "ok: all"], real), "in another order");
    assert!(!is_of(&["pointer 5, 0 in flight, 0 closing"], real), "with other words");
}
