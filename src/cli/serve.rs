//! `serve`: check, build, announce, serve, drain.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;

use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::field::display;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

use super::Failure;
use crate::app::{Sidecar, StartError};
use crate::config::{Config, LogFormat, Settings};
use crate::redis::RedisStoreError;
use crate::systemd::ServiceManager;

/// Keep the account of messages in flight
///
/// Every flag can also stand in the environment, and, without its dashes, in a TOML file given with
/// --config: a flag comes before the environment, that before the file, that before the default. SIGTERM
/// drains: new messages are refused, what is in flight is handed out (or kept with --state), exit 0.
#[derive(Args, Debug)]
pub(super) struct Serve {
    /// TOML file with settings
    #[arg(long, env = "ACKWHEEL_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the settings, say whether they are right, and stop
    #[arg(long)]
    check_config: bool,
    #[command(flatten)]
    settings: Settings,
}

impl Serve {
    pub(super) fn run(self) -> Result<(), Failure> {
        let file = self.config.as_deref().map(Settings::from_file).transpose();
        let settings = self.settings.or(file.map_err(usage)?.unwrap_or_default());
        let (log, log_format) = (settings.log.clone(), settings.log_format.unwrap_or_default());
        let config = settings.check().map_err(usage)?;
        let filter = filter(log.as_deref().unwrap_or("info"))?;
        if self.check_config {
            return Ok(writeln!(stdout(), "the configuration is right")?);
        }
        start_logging(filter, log_format);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.threads)
            .enable_all()
            .build()
            .map_err(Failure::run)?;
        runtime.block_on(serve(config))
    }
}

async fn serve(config: Config) -> Result<(), Failure> {
    for warning in &config.warnings {
        warn!("{warning}");
    }
    let wanted = config.server.max_connections as u64 + 64;
    match rlimit::increase_nofile_limit(u64::MAX) {
        Ok(limit) if limit >= wanted => {}
        Ok(limit) => warn!("only {limit} files may be open, fewer than --max-connections needs: raise ulimit -n"),
        Err(error) => warn!(%error, "the limit of open files could not be raised; see ulimit -n"),
    }
    // Before anything is announced, so that whoever saw the announcement can signal.
    let (mut terminate, mut interrupt) = (on(SignalKind::terminate())?, on(SignalKind::interrupt())?);
    let manager = service_manager();
    manager.starting("opening the store").await;
    let socket = config.socket.clone();
    let sidecar = Sidecar::start(config).await.map_err(not_started)?;
    let socket = socket.as_ref().map(|path| display(path.display()));
    info!(listen = %sidecar.address(), admin = %sidecar.admin_address(), socket, name = sidecar.name(), "listening");
    manager.ready(&format!("listening on {}, admin on {}", sidecar.address(), sidecar.admin_address())).await;
    let health = sidecar.health();
    tokio::select! {
        _ = terminate.recv() => info!("SIGTERM"),
        _ = interrupt.recv() => info!("SIGINT"),
        never = manager.watch(|| health.stalled()) => match never {},
    }
    manager.stopping("draining: new messages are refused").await;
    tokio::select! {
        drained = sidecar.drain() => drained.map_err(Failure::run),
        _ = terminate.recv() => Err(Failure::Run(String::from("a second SIGTERM ended the drain"))),
        _ = interrupt.recv() => Err(Failure::Run(String::from("a second SIGINT ended the drain"))),
    }
}

/// Whoever started this process and wants to be told how it does.
fn service_manager() -> ServiceManager {
    ServiceManager::of_environment(|name| std::env::var_os(name), std::process::id()).unwrap_or_else(|error| {
        warn!("{error}");
        ServiceManager::default()
    })
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

fn filter(text: &str) -> Result<EnvFilter, Failure> {
    EnvFilter::try_new(text).map_err(|error| {
        Failure::Usage(format!(
            "--log {text:?}: {error}; write a level, or a filter as in info,ackwheel::server=debug"
        ))
    })
}

fn on(kind: SignalKind) -> Result<Signal, Failure> {
    signal(kind).map_err(Failure::run)
}

fn start_logging(filter: EnvFilter, format: LogFormat) {
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    match format {
        LogFormat::Text => lines.with_ansi(stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().init(),
    }
}
