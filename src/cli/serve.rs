//! `serve`: check, build, announce, serve, drain.

use std::future::pending;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::field::display;
use tracing::{info, warn};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, registry};

use super::{Failure, origin};
use crate::admin;
use crate::app::{Sidecar, StartError};
use crate::clock::Clock;
use crate::config::{Config, LogFormat, Settings};
use crate::logging::{self, Limit, LogWriter};
use crate::process::panics;
use crate::process::systemd::ServiceManager;
use crate::redis::RedisStoreError;

/// Files that are open beside connections: listeners, links to Redis, timers, and the process' own.
const OTHER_FILES: u64 = 64;

/// Keep the account of messages in flight
///
/// Every flag can also stand in the environment, and, without its dashes, in a TOML file given with --config: a flag
/// comes before the environment, that before the file, that before the default. A DURATION is written 200ms, 3s, 5m
/// or 24h.
///
/// SIGTERM, SIGINT and SIGHUP drain: new messages are refused, what is in flight is handed out (with --state or in
/// Redis it is kept), exit 0 within 10 s.
#[derive(Args, Debug)]
pub(super) struct Serve {
    /// TOML file with settings; examples/ackwheel.toml has every key with its default [default: none]
    #[arg(long, env = "ACKWHEEL_CONFIG", value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
    /// Check the settings, say whether they are right, and stop: nothing is listened on, nothing written
    #[arg(long)]
    check_config: bool,
    #[command(flatten)]
    settings: Settings,
}

impl Serve {
    pub(super) fn run(self) -> Result<(), Failure> {
        let file = self.config.clone();
        self.check_and_serve().map_err(|failure| match failure {
            Failure::Usage(text) => {
                let origins = origin::of_flags_in(&text, file.as_deref());
                Failure::Usage(text + &origins)
            }
            failure => failure,
        })
    }

    fn check_and_serve(self) -> Result<(), Failure> {
        let file = self.config.as_deref().map(Settings::from_file).transpose();
        let settings = self.settings.or(file.map_err(usage)?.unwrap_or_default());
        let (log, log_format) = (settings.log.clone(), settings.log_format.unwrap_or_default());
        let config = settings.check().map_err(usage)?;
        let filter = filter(log.as_deref().unwrap_or("info"))?;
        let strangers = origin::strangers();
        if self.check_config {
            for warning in strangers.iter().chain(&config.warnings) {
                writeln!(stderr(), "ackwheel: {warning}")?;
            }
            return Ok(writeln!(stdout(), "the configuration is right")?);
        }
        let limit = start_logging(filter, log_format)?;
        let last_lines = limit.clone();
        panics::end_the_process(move || {
            last_lines.say_all();
            logging::flush();
        });
        for stranger in strangers {
            warn!("{stranger}");
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.threads)
            .enable_all()
            .build()
            .map_err(Failure::run)?;
        let outcome = runtime.block_on(async {
            tokio::select! {
                outcome = serve(config) => outcome,
                never = limit.maintain() => match never {},
            }
        });
        limit.say_all();
        // Not to wait for a resolver that does not answer: nothing else is done on threads of its own.
        runtime.shutdown_background();
        outcome
    }
}

async fn serve(config: Config) -> Result<(), Failure> {
    for warning in &config.warnings {
        warn!("{warning}");
    }
    let wanted =
        (config.server.max_connections as u64).saturating_add(admin::MAX_CONNECTIONS as u64 + OTHER_FILES);
    match rlimit::increase_nofile_limit(u64::MAX) {
        Ok(limit) if limit >= wanted => {}
        Ok(limit) => warn!(
            "only {limit} files may be open, and --max-connections needs {wanted}: raise the limit (ulimit -n, LimitNOFILE \
             of systemd), or lower --max-connections"
        ),
        Err(error) => {
            warn!(%error, "the limit of open files could not be raised: raise it (ulimit -n, LimitNOFILE of systemd)");
        }
    }
    // Before anything is announced, so that whoever saw the announcement can signal.
    let mut stops = Stops::heed()?;
    // Heeded by nobody: a file that may not grow any more (ulimit -f, LimitFSIZE) is an error where it is written, and
    // not the end of the process with what is in flight.
    let _file_too_large = on(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?;
    let manager = service_manager();
    manager.starting("opening the store").await;
    let socket = config.socket.clone();
    // Nothing is accepted before the store is open, and no state file is read: there is nothing to drain.
    let went = |signal: &str| {
        info!("{signal}, while the store was not open yet");
        Ok(())
    };
    let sidecar = tokio::select! {
        started = Sidecar::start(config) => started.map_err(not_started)?,
        signal = stops.next() => return went(signal),
    };
    let socket = socket.as_ref().map(|path| display(path.display()));
    info!(listen = %sidecar.address(), admin = %sidecar.admin_address(), socket, name = sidecar.name(), "listening");
    manager.ready(&format!("listening on {}, admin on {}", sidecar.address(), sidecar.admin_address())).await;
    let health = sidecar.health();
    tokio::select! {
        signal = stops.next() => info!("{signal}"),
        never = manager.watch(|| health.stalled()) => match never {},
    }
    // At the same time: a manager that does not listen must not hold the drain up.
    let going = async { tokio::join!(manager.stopping("draining: new messages are refused"), sidecar.drain()).1 };
    tokio::select! {
        drained = going => drained.map_err(Failure::run),
        signal = stops.again() => Err(Failure::Run(format!(
            "{signal} ended the drain, before what was in flight could be kept or handed out"
        ))),
    }
}

/// For how long after a signal others mean the same: a process manager sends one to the process and then to its group,
/// a terminal sends one beside that of whoever started the process.
const SAME_STOP: Duration = Duration::from_secs(1);

/// The signals that end a sidecar.
struct Stops {
    terminate: Signal,
    interrupt: Signal,
    /// The terminal is gone; heeded unless whoever started the process wants it ignored, as nohup does.
    hangup: Option<Signal>,
}

impl Stops {
    fn heed() -> Result<Stops, Failure> {
        let hangup = if hangup_is_ignored() { None } else { Some(on(SignalKind::hangup())?) };
        Ok(Stops { terminate: on(SignalKind::terminate())?, interrupt: on(SignalKind::interrupt())?, hangup })
    }

    /// The next one.
    async fn next(&mut self) -> &'static str {
        let hangup = async {
            match &mut self.hangup {
                Some(signal) => signal.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = hangup => "SIGHUP",
        }
    }

    /// The next one that does not mean the same as the first.
    async fn again(&mut self) -> &'static str {
        let same = tokio::time::sleep(SAME_STOP);
        tokio::pin!(same);
        loop {
            tokio::select! {
                () = &mut same => return self.next().await,
                _ = self.next() => {}
            }
        }
    }
}

/// Whether this process was started with SIGHUP ignored. Where the system does not say, it was not.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 << (rustix::process::Signal::HUP.as_raw() - 1) != 0)
}

/// The service manager that started this process, if it wants to be notified.
fn service_manager() -> ServiceManager {
    let variable = |name: &str| std::env::var_os(name);
    let (manager, wrong) = ServiceManager::of_environment(variable, std::process::id());
    if let Some(wrong) = wrong {
        warn!("{wrong}");
    }
    manager
}

/// Settings that do not fit what is in Redis are wrong settings; all else is a failure at run time.
fn not_started(error: StartError) -> Failure {
    match &error {
        StartError::Redis { cause: RedisStoreError::Address(_) | RedisStoreError::Differs(_), .. } => usage(error),
        _ => Failure::run(error),
    }
}

fn usage(error: impl std::fmt::Display) -> Failure {
    Failure::Usage(error.to_string())
}

/// The filter of the log. Lines about omitted lines always pass.
fn filter(text: &str) -> Result<EnvFilter, Failure> {
    let wrong = |why: &dyn std::fmt::Display| {
        Failure::Usage(format!(
            "--log {text:?}: {why}; write error, warn, info, debug, trace or off, or a filter as in \
             info,ackwheel::server=debug"
        ))
    };
    // A word that is no level counts as the name of a module, and then nothing else is logged.
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    let is_known = |word: &str| word.contains(['=', '[']) || is_level(word);
    if let Some(word) = text.split(',').map(str::trim).find(|word| !is_known(word)) {
        return Err(wrong(&format_args!("{word:?} is no level")));
    }
    let filter = EnvFilter::try_new(text).map_err(|error| wrong(&error))?;
    let counts = format!("{}=info", logging::TARGET).parse().expect("a target and a level make a directive");
    Ok(filter.add_directive(counts))
}

fn on(kind: SignalKind) -> Result<Signal, Failure> {
    signal(kind).map_err(Failure::run)
}

fn start_logging(filter: EnvFilter, format: LogFormat) -> Result<Limit, Failure> {
    let clock = Clock::start();
    let limit = Limit::new(move || clock.now());
    let writer = LogWriter::of_process().map_err(|error| {
        Failure::Run(format!(
            "no thread to write the log could be started: {error}; look at the limit of processes"
        ))
    })?;
    // Errors of the formatter itself would go to stderr around the writer.
    let lines = tracing_subscriber::fmt::layer().with_writer(writer).log_internal_errors(false);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    registry().with(filter).with(limit.clone()).with(lines).init();
    Ok(limit)
}
