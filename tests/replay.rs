//! A trace of real messages through the real protocol: `examples/im_replay` on the CollegeMsg trace.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::process::Run;
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;

/// The example, which `cargo test` builds beside the tests.
pub fn example() -> Command {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().and_then(Path::parent).unwrap().join("examples/im_replay");
    assert!(program.exists(), "{} is missing: run all tests with `cargo test`", program.display());
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn im_replay() -> Command {
    let mut command = example();
    command.args(["--seconds", "4", "--json"]);
    command
}

fn report(command: &mut Command) -> serde_json::Value {
    let run = Run::of(command);
    assert_eq!(run.code, 0, "{run:?}");
    serde_json::from_str(run.stdout.lines().last().unwrap()).unwrap()
}

/// The CollegeMsg trace, where it is there.
pub fn real_trace() -> Option<PathBuf> {
    let trace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data/college-msg.txt.gz");
    if trace.exists() {
        return Some(trace);
    }
    crate::support::skipped::skip(&format!(
        "the replay of the CollegeMsg trace of SNAP: {} is missing",
        trace.display()
    ));
    None
}

fn assert_all_of_the_real_trace(report: &serde_json::Value) {
    let figure = |name: &str| report[name].as_u64().unwrap();
    assert_eq!((figure("pushed"), figure("mismatches")), (59_835, 0), "{report}");
    // Counted by hand from the trace: whose user sent something within 600 seconds of the message.
    assert_eq!((figure("acked"), figure("timed_out")), (23_013, 36_822), "{report}");
}

#[test]
fn every_message_of_the_real_trace_ends_as_the_trace_says() {
    let Some(trace) = real_trace() else { return };
    assert_all_of_the_real_trace(&report(im_replay().arg("--trace").arg(trace)));
}

#[test]
fn every_message_of_the_real_trace_through_three_sidecars_ends_as_the_trace_says() {
    let Some(trace) = real_trace() else { return };
    let redis = Redis::start();
    let sidecars = ["a", "b", "c"].map(|name| Sidecar::on(&redis, name, &["--tick", "200ms"]));
    let mut command = im_replay();
    command.args(["--connections", "6"]).arg("--trace").arg(trace);
    for sidecar in &sidecars {
        command.args(["--addr", &sidecar.listen.to_string()]);
    }
    assert_all_of_the_real_trace(&report(&mut command));
    for sidecar in &sidecars {
        assert!(sidecar.metrics().count("messages_added_total") > 10_000, "the connections are spread over all");
        sidecar.wait_for_settled("default");
    }
}

#[test]
fn every_message_of_a_made_up_trace_ends_as_the_trace_says() {
    let report = report(&mut im_replay());
    let figure = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(figure("mismatches"), 0, "{report}");
    assert!(figure("acked") > 1_000 && figure("timed_out") > 1_000, "{report}");
    assert_eq!(figure("pushed"), figure("acked") + figure("timed_out"), "{report}");
}
