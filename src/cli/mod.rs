//! Parses the command line and runs the verb that it names, such as `serve` or `ping`.

mod admin_address;
mod bench;
mod check;
mod connect;
mod generate;
mod requests;
mod serve;
mod setting_sources;
mod status;
mod text;
mod watch;

use std::io::{Write, stderr};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

pub use self::serve::Serve;
use crate::client::ClientError;
use crate::logging;
use crate::process::panics;

/// The exit code of a failure at run time.
const EXIT_FAILURE: u8 = 1;

/// The exit code of a wrong command line or configuration: `EX_USAGE` of sysexits.h.
const EXIT_USAGE: u8 = 64;

/// Learn which pushed messages were never acknowledged.
///
/// ackwheel tracks messages that are pushed to phones. A logic node adds a message before it pushes
/// it and deletes it when its Ack arrives. A message that is not acknowledged in time (15 seconds by default)
/// comes back in a timeout batch. docs/INTEGRATION.md says how to judge from that whether a client is offline.
#[derive(Debug, Parser)]
#[command(name = "ackwheel", version, after_help = FIRST_STEPS)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

const FIRST_STEPS: &str = "\
First steps, in three terminals:
  ackwheel serve                      run a sidecar, in memory
  ackwheel watch                      see which messages time out
  ackwheel add 101 102 103            three messages are pushed …
  ackwheel del 102                    … one is acknowledged; the others time out after 15 s

Exit codes: 0, 1 for a failure at run time, 64 for a wrong command line or configuration.";

/// Stands in place of a value that contains a URL.
const HIDDEN: &str = "(not shown, because it contains a URL)";

#[derive(Debug, Subcommand)]
enum Verb {
    Serve(Box<serve::Serve>),
    Add(requests::Add),
    Del(requests::Del),
    Get(requests::Get),
    Watch(watch::Watch),
    Consume(watch::Consume),
    Ping(requests::Ping),
    Status(status::Status),
    Check(check::Check),
    #[command(subcommand)]
    Group(requests::Group),
    Bench(Box<bench::Bench>),
    Completions(generate::Completions),
    Man(generate::Manual),
}

/// The reason why a verb failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line or the configuration is wrong.
    #[error("{0}")]
    Usage(String),
    /// Something went wrong at run time.
    #[error("{0}")]
    Run(String),
    /// The reader of the output has closed the pipe, so nothing more can be printed.
    #[error("the reader of the output has gone")]
    ReaderGone,
}

impl Failure {
    /// Creates a failure at run time.
    pub fn run(error: impl std::fmt::Display) -> Failure {
        Failure::Run(error.to_string())
    }

    fn usage(error: impl std::fmt::Display) -> Failure {
        Failure::Usage(error.to_string())
    }
}

impl From<ClientError> for Failure {
    /// The error may quote a server, so its text is escaped.
    fn from(error: ClientError) -> Failure {
        Failure::Run(text::escaped(&error.to_string()))
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        if error.kind() == std::io::ErrorKind::BrokenPipe { Failure::ReaderGone } else { Failure::run(error) }
    }
}

/// Parses the command line. If it asks for help or the version, or is wrong, prints a text and returns an exit code as
/// `Err`.
///
/// # Errors
///
/// The exit code is 0 after help or the version, and 64 after a wrong command line.
pub fn parse() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|mut error| {
        name_right_flag(&mut error);
        let sources = if matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation) {
            setting_sources::of_flags_in(&error.to_string(), None)
        } else {
            String::new()
        };
        let exit_code = if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        print_without_urls(error);
        let _ = if sources.is_empty() { Ok(()) } else { writeln!(stderr(), "{sources}") };
        exit_code
    })
}

/// Returns whether a value contains a URL with a password, perhaps. A web address without a user has none.
fn may_have_password(text: &str) -> bool {
    let is_web = text.starts_with("http://") || text.starts_with("https://");
    text.contains("://") && (!is_web || text.contains('@'))
}

/// Prints the error without the values that contain a URL, because a URL may contain a password.
fn print_without_urls(mut error: clap::Error) {
    let texts = |value: &ContextValue| match value {
        ContextValue::String(text) => vec![text.clone()],
        ContextValue::Strings(texts) => texts.clone(),
        _ => Vec::new(),
    };
    let values: Vec<_> = error.context().map(|(kind, value)| (kind, texts(value))).collect();
    let mut urls: Vec<String> = Vec::new();
    for (kind, texts) in values {
        let of_kind: Vec<String> = texts.into_iter().filter(|text| may_have_password(text)).collect();
        if !of_kind.is_empty() {
            error.insert(kind, ContextValue::String(String::from(HIDDEN)));
            urls.extend(of_kind);
        }
    }
    // The cause may quote the value too.
    let text = error.to_string();
    // A failure to print cannot be reported anywhere, so it is ignored.
    let _ = if urls.iter().any(|url| text.contains(url)) {
        let shown = urls.iter().fold(text, |text, url| text.replace(url, HIDDEN));
        write!(stderr(), "{shown}")
    } else {
        // This writes help to stdout and errors to stderr.
        error.print()
    };
}

/// Adds a tip with the right flag or verb to the error, if the verb does not take an address or a flag of `consume`.
fn name_right_flag(error: &mut clap::Error) {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return };
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let tip = match flag.as_str() {
        "--addr" if ["ackwheel status", "group list"].iter().any(|verb| usage.contains(verb)) => {
            "the status is asked for at the admin address: --admin HOST:PORT (by default 127.0.0.1:7416)"
        }
        "--addr" if usage.contains("ackwheel serve") => "a sidecar listens where --listen says",
        "--group" | "--no-ack" | "--credit" if usage.contains("ackwheel watch") => {
            "watch looks on and takes no batch from any consumer, so it joins no group; consume --group NAME takes batches"
        }
        "--admin" => "requests and batches go over the address that the sidecar listens at: --addr HOST:PORT",
        _ => return,
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
}

/// Runs the verb and returns the exit code of the process. For the verb `serve`, calls the function `serve`.
pub fn run(cli: Cli, serve: fn(Serve) -> Result<(), Failure>) -> ExitCode {
    panics::explain_refused_threads(|text| {
        print_failure(text, EXIT_FAILURE);
    });
    let file = if let Verb::Serve(arguments) = &cli.verb { arguments.config.clone() } else { None };
    let outcome = match cli.verb {
        Verb::Serve(arguments) => serve(*arguments),
        Verb::Add(add) => block_on(add.run()),
        Verb::Del(del) => block_on(del.run()),
        Verb::Get(get) => block_on(get.run()),
        Verb::Watch(watch) => block_on(watch.run()),
        Verb::Consume(consume) => block_on(consume.run()),
        Verb::Ping(ping) => block_on(ping.run()),
        Verb::Status(status) => status.run(),
        Verb::Check(check) => check.run(),
        Verb::Group(group) => block_on(group.run()),
        Verb::Bench(bench) => bench.run(),
        Verb::Completions(completions) => completions.run(),
        Verb::Man(manual) => manual.run(),
    };
    let exit_code = match outcome {
        Ok(()) | Err(Failure::ReaderGone) => ExitCode::SUCCESS,
        Err(Failure::Run(text)) => print_failure(&text, EXIT_FAILURE),
        Err(Failure::Usage(text)) => {
            let sources = setting_sources::of_flags_in(&text, file.as_deref());
            print_failure(&(text + &sources), EXIT_USAGE)
        }
    };
    logging::flush();
    exit_code
}

fn print_failure(failure: &str, exit_code: u8) -> ExitCode {
    // The text may quote a server. Only lines of this program are broken.
    let lines: Vec<String> = failure.split('\n').map(text::escaped).collect();
    // If stderr is closed, the exit code still shows the failure.
    logging::print(&format!("ackwheel: {}", lines.join("\n")));
    ExitCode::from(exit_code)
}

/// Runs an async verb on the current thread. A client needs no other threads.
fn block_on(verb: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::run)?;
    let outcome = runtime.block_on(verb);
    // Do not wait for blocking threads: a name lookup, or a write to a slow reader of the output, may take longer than
    // --timeout.
    runtime.shutdown_background();
    outcome
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
