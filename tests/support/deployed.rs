//! Settings that files outside of the program name: each must be one, and together they must be right.

use std::collections::BTreeMap;

use ackwheel::cli::Cli;
use clap::CommandFactory;

use super::process::{Run, program};

/// Asserts that `serve` knows every flag and every variable of ackwheel's, and takes their values.
#[track_caller]
pub fn assert_right(arguments: &[&str], environment: &BTreeMap<String, String>) {
    let mut command = Cli::command();
    command.build();
    let serve = command.find_subcommand("serve").expect("it is a verb");
    for variable in environment.keys().filter(|variable| variable.starts_with("ACKWHEEL_")) {
        let known = serve.get_arguments().any(|argument| argument.get_env().is_some_and(|env| env == &**variable));
        assert!(known, "{variable} is no setting of ackwheel serve");
    }
    let run = Run::of(program(arguments).arg("--check-config").envs(environment));
    let said = (run.code, run.stdout.as_str());
    assert_eq!(said, (0, "the configuration is right\n"), "{arguments:?} {environment:?}: {run:?}");
}
