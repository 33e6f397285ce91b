//! The flags of the verbs that ask the admin address of a sidecar, and the request for its status.

use std::thread::sleep;
use std::time::Duration;

use clap::Args;
use ureq::http::StatusCode;

use super::Failure;
use super::connect::{DEFAULT_ADMIN, RETRY, admin, patience};
use super::text::{escaped, plain};
use crate::admin::OPENING;
use crate::admin::status::StatusReport;
use crate::bench;
use crate::clock::Clock;

/// How many characters of an error answer are printed. A sidecar's answer is shorter, but another server may send a
/// whole page.
const MAX_WORDS: usize = 1_000;

/// The flags of all verbs that ask the admin address of a sidecar.
#[derive(Args, Debug)]
pub(super) struct AdminAddress {
    /// The sidecar's admin address
    #[arg(long, env = "ACKWHEEL_ADMIN", default_value = DEFAULT_ADMIN, value_name = "HOST:PORT", value_parser = admin)]
    admin: String,
    /// How long to wait for the answer; a sidecar may start meanwhile
    #[arg(long, default_value = "5s", value_name = "DURATION", value_parser = patience)]
    pub(super) timeout: Duration,
}

impl AdminAddress {
    /// Asks for the status. While the sidecar starts, asks again and again for the time `wait`. Returns the report, and
    /// the text that the sidecar has sent.
    pub(super) fn report(&self, wait: Duration) -> Result<(StatusReport, String), Failure> {
        let url = format!("http://{}/status", self.admin);
        let clock = Clock::start();
        let until = clock.now() + wait;
        let mut answer = bench::get(&url, self.timeout);
        while may_start(&answer) && clock.now() < until {
            sleep(RETRY);
            answer = bench::get(&url, self.timeout);
        }
        let (code, text) = answer.map_err(Failure::Run)?;
        if code != StatusCode::OK {
            let words = text.trim().chars().take(MAX_WORDS);
            let words: String = words.map(|one| if one == '\n' { one } else { plain(one) }).collect();
            return Err(Failure::Run(format!("{url} answers {code}: {words}")));
        }
        let report = serde_json::from_str(&text)
            .map_err(|error| Failure::Run(escaped(&format!("{url} is no status of ackwheel: {error}"))))?;
        Ok((report, text))
    }
}

/// Returns whether a sidecar perhaps starts: it is not listening yet, or its store is not open yet.
fn may_start(answer: &Result<(StatusCode, String), String>) -> bool {
    answer.as_ref().map_or_else(|error| error.contains("Connection refused"), |(_, text)| text == OPENING)
}
