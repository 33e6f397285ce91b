//! The verb `check`: finds what is wrong with a sidecar and its store, and says what to do.

mod findings;
mod resp_login;

use std::io::{Write, stdout};
use std::time::Duration;

use clap::Args;
use ureq::http::StatusCode;

use self::findings::{Finding, Level, findings};
use self::resp_login::resp_login;
use super::connect::{Connect, DEFAULT_ADMIN, admin, patience};
use super::text::{escaped_json, plain};
use super::{Failure, block_on};
use crate::admin::status::StatusReport;
use crate::bench;
use crate::client::{Client, ClientError, ClientOptions};
use crate::clock::Clock;
use crate::core::Reason;

/// Check a sidecar: what is wrong, and what to do
///
/// Connects as a logic node does, with this token and certificate, and asks the admin address. Prints one line per
/// finding: level, subject, text, remedy. The levels are ok, warn and fail. Exit codes: 0 if nothing failed, 1 if a
/// finding has the level fail, 64 for a wrong command line. A warning does not change the exit code.
#[derive(Args, Debug)]
pub(super) struct Check {
    #[command(flatten)]
    connect: Connect,
    /// The sidecar's admin address
    #[arg(long, env = "ACKWHEEL_ADMIN", default_value = DEFAULT_ADMIN, value_name = "HOST:PORT", value_parser = admin)]
    admin: String,
    /// The sidecar's address of the RESP protocol: checks that a Redis client library can connect
    #[arg(long, env = "ACKWHEEL_RESP", value_name = "HOST:PORT")]
    resp: Option<String>,
    /// Print a JSON list of objects with the keys level, subject, text and remedy
    #[arg(long)]
    json: bool,
    /// The age above which an unacknowledged batch is a failure
    #[arg(long, default_value = "60s", value_name = "DURATION", value_parser = patience)]
    max_batch_age: Duration,
}

impl Check {
    pub(super) fn run(self) -> Result<(), Failure> {
        let options = self.connect.options()?;
        let mut found = Vec::new();
        block_on(async {
            found.push(self.connection(options).await);
            if let Some(address) = &self.resp {
                found.push(self.resp_connection(address).await?);
            }
            Ok(())
        })?;
        found.extend(self.state());
        let mut out = stdout().lock();
        if self.json {
            let json = serde_json::to_string_pretty(&found).expect("findings can be written");
            writeln!(out, "{}", escaped_json(&json))?;
        } else {
            for Finding { level, subject, text, remedy } in &found {
                let separator = if remedy.is_empty() { "" } else { "; " };
                // The texts of a server could control the terminal.
                let line: String = format!("{text}{separator}{remedy}").chars().map(plain).collect();
                writeln!(out, "{:<4}  {subject}: {line}", level.as_str())?;
            }
        }
        out.flush()?;
        match found.iter().filter(|finding| finding.level == Level::Fail).count() {
            0 => Ok(()),
            1 => Err(Failure::run("something must be done: 1 finding has the level fail")),
            count => Err(Failure::Run(format!("something must be done: {count} findings have the level fail"))),
        }
    }

    /// Connects as a logic node does.
    async fn connection(&self, options: ClientOptions) -> Finding {
        let address = &self.connect.addr;
        let answered = async {
            let client = Client::connect(address.clone(), options).await?;
            client.ping(b"ackwheel check").await
        };
        match answered.await {
            Ok(took) => {
                let ms = took.as_secs_f64() * 1_000.0;
                Finding::ok(
                    "connection",
                    format!("{address} accepts this token and certificate, and answered in {ms:.2} ms"),
                )
            }
            Err(error) => {
                let text = error.to_string();
                failed("connection", &text, connection_remedy(&error, &text))
            }
        }
    }

    /// Logs in over the RESP protocol, as a Redis client library does.
    async fn resp_connection(&self, address: &str) -> Result<Finding, Failure> {
        const REMEDY: &str = "is the sidecar running with this --resp, and does --tls-ca match its --tls-cert?";
        let Connect { timeout, .. } = self.connect;
        let clock = Clock::start();
        let login = resp_login(address, self.connect.tls()?, self.connect.token()?, timeout, || clock.now());
        Ok(match login.await {
            Ok(took) => {
                let ms = took.as_secs_f64() * 1_000.0;
                Finding::ok("resp", format!("{address} accepts this token, and answered in {ms:.2} ms"))
            }
            Err(error) => {
                let text = format!("no login over RESP at {address}: {error}");
                let reason = match error.code() {
                    Some("WRONGPASS" | "NOAUTH") => Some(Reason::Unauthorized),
                    Some("LOADING") => Some(Reason::Starting),
                    _ if text.contains("max number of clients") => Some(Reason::TooManyConnections),
                    code => code.and_then(|code| Reason::from_word(&code.to_lowercase())),
                };
                failed("resp", &text, reason.map_or(REMEDY, Reason::remedy))
            }
        })
    }

    /// Asks the admin address for the state of the sidecar.
    fn state(&self) -> Vec<Finding> {
        const LOOK: &str = "look at the log of the sidecar";
        let refused = |text: String| {
            let is_of_store = text.contains("store");
            let remedy =
                if is_of_store { "does the store run, and does the sidecar reach it? see its log" } else { LOOK };
            Finding::fail(if is_of_store { "store" } else { "sidecar" }, text, remedy)
        };
        let mut found = Vec::new();
        for path in ["/livez", "/readyz"] {
            match self.get(path) {
                Ok((StatusCode::OK, _)) => {}
                Ok((_, text)) => found.push(refused(format!("{path} answers: {text}"))),
                Err(error) => return vec![failed("sidecar", &error, "is --admin its admin address?")],
            }
        }
        let report = match self.get("/status") {
            Ok((StatusCode::OK, text)) => serde_json::from_str::<StatusReport>(&text).map_err(|error| {
                Finding::fail("sidecar", format!("/status is no status of ackwheel: {error}"), "correct --admin")
            }),
            // This refusal names the cause, which the probe did not.
            Ok((StatusCode::SERVICE_UNAVAILABLE, text)) => {
                found.retain(|finding| finding.subject != "store");
                Err(refused(format!("no status of the store: {text}")))
            }
            Ok((code, _)) => {
                Err(failed("sidecar", &format!("/status answers {code}"), "is --admin its admin address?"))
            }
            Err(error) => Err(failed("sidecar", &error, LOOK)),
        };
        let now = Clock::start().moment().unix_time.as_secs();
        match report {
            Ok(report) => found.extend(findings(&report, self.max_batch_age, now)),
            Err(finding) => found.push(finding),
        }
        found
    }

    fn get(&self, path: &str) -> Result<(StatusCode, String), String> {
        let (code, text) = bench::get(&format!("http://{}{path}", self.admin), self.connect.timeout)?;
        // Another server may send a whole page. A status report is not shortened.
        let most = if code == StatusCode::OK { usize::MAX } else { 300 };
        Ok((code, text.trim().chars().take(most).collect()))
    }
}

/// Returns a failure. If the text of the error ends with a question, that question is the remedy.
fn failed(subject: &'static str, error: &str, remedy: &str) -> Finding {
    let asked = error.rsplit_once("; ").filter(|(_, question)| question.ends_with('?'));
    let (text, remedy) = asked.unwrap_or((error, remedy));
    Finding::fail(subject, text.to_owned(), remedy)
}

/// Returns the remedy for a failed connection. `text` is the text of the error.
fn connection_remedy(error: &ClientError, text: &str) -> &'static str {
    match error {
        ClientError::Refused(refused) => refused.reason().map_or("update this program", Reason::remedy),
        _ if text.contains("certificate") => {
            "renew the certificate, or correct --tls-ca and the client certificate"
        }
        ClientError::TokenFile(_) => "correct --token-file",
        _ => "is the sidecar running at --addr, and does --tls-ca match its --tls-cert?",
    }
}
