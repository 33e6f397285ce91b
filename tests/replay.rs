//! A trace of real messages through the real protocol: `examples/im_replay` on the CollegeMsg trace.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::process::Run;

/// The example, which `cargo test` builds beside the tests.
fn im_replay() -> Command {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().and_then(Path::parent).unwrap().join("examples/im_replay");
    assert!(program.exists(), "{} is missing: run all tests with `cargo test`", program.display());
    let mut command = Command::new(program);
    command.args(["--seconds", "4", "--json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn report(command: &mut Command) -> serde_json::Value {
    let run = Run::of(command);
    assert_eq!(run.code, 0, "{run:?}");
    serde_json::from_str(run.stdout.lines().last().unwrap()).unwrap()
}

#[test]
fn every_message_of_the_real_trace_ends_as_the_trace_says() {
    let trace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data/college-msg.txt.gz");
    if !trace.exists() {
        println!("skipped: {} is missing (the CollegeMsg trace of SNAP, gzipped)", trace.display());
        return;
    }
    let report = report(im_replay().arg("--trace").arg(&trace));
    let figure = |name: &str| report[name].as_u64().unwrap();
    assert_eq!((figure("pushed"), figure("mismatches")), (59_835, 0), "{report}");
    // Counted by hand from the trace: whose user sent something within 600 seconds of the message.
    assert_eq!((figure("acked"), figure("timed_out")), (23_013, 36_822), "{report}");
}

#[test]
fn every_message_of_a_made_up_trace_ends_as_the_trace_says() {
    let report = report(&mut im_replay());
    let figure = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(figure("mismatches"), 0, "{report}");
    assert!(figure("acked") > 1_000 && figure("timed_out") > 1_000, "{report}");
    assert_eq!(figure("pushed"), figure("acked") + figure("timed_out"), "{report}");
}
