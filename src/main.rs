//! The `ackwheel` program: the command line is parsed, then its verb carried out.
//!
//! `serve` is the story of the sidecar: settings are checked, the sidecar is built and announced, it serves
//! until a signal, and it drains. It stands in `ackwheel::cli`, with a file for each other verb.

use std::process::ExitCode;

fn main() -> ExitCode {
    match ackwheel::cli::parse() {
        Ok(cli) => ackwheel::cli::run(cli),
        Err(code) => code,
    }
}
