//! The `ackwheel` program. A sidecar (the ackwheel server) runs in five steps: check the settings, build, announce,
//! serve, drain.
//!
//! The verb `serve` of the command line runs the function [`serve`]. The module `cli` runs all other verbs.

use std::process::ExitCode;
use std::sync::Arc;

use ackwheel::app::{self, Sidecar};
use ackwheel::cli::{self, Failure, Serve};
use ackwheel::config::Config;
use ackwheel::process::panics;
use ackwheel::process::parking;
use ackwheel::process::stop_signals::StopSignals;
use ackwheel::process::systemd::ServiceManager;
use ackwheel::{clock, logging};
use tracing::field::display;
use tracing::{info, warn};

fn main() -> ExitCode {
    match cli::parse() {
        Ok(cli) => cli::run(cli, serve),
        Err(exit_code) => exit_code,
    }
}

/// Checks the settings and starts the log and the Tokio runtime. Then runs a sidecar until it has drained: until its
/// messages in flight are delivered or kept.
fn serve(arguments: Serve) -> Result<(), Failure> {
    let Some(config) = arguments.check()? else { return Ok(()) };
    logging::start(&config.log, config.log_format, clock::monotonic)?;
    panics::end_the_process(logging::flush);
    config.notes.iter().for_each(|note| info!("{note}"));
    config.warnings.iter().for_each(|warning| warn!("{warning}"));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.threads)
        .on_thread_park(parking::hook())
        .enable_all()
        .build()?;
    runtime.spawn(logging::report_left_out());
    let outcome = runtime.block_on(run_sidecar(config));
    // Do not wait for Tokio's blocking threads: they run only name lookups, and a resolver may never answer.
    runtime.shutdown_background();
    outcome
}

async fn run_sidecar(config: Config) -> Result<(), Failure> {
    app::raise_open_files_limit(&config);
    // Listen for signals before the announcement: a process that waits for the announcement may send a signal at once.
    let mut signals = StopSignals::listen()?;
    let manager = ServiceManager::of_process();

    // Build. Until the store is open, the sidecar admits no client and has no message in flight. So a signal during
    // this step needs no drain.
    manager.starting("opening the store").await;
    let socket = config.socket.clone();
    let sidecar = tokio::select! {
        started = Sidecar::start(config) => started?,
        signal = signals.next() => {
            info!("{signal}, while the store was not open yet");
            return Ok(());
        }
    };

    // Announce.
    let (listen, admin, health) = (sidecar.address, sidecar.admin_address, Arc::clone(&sidecar.health));
    let socket = socket.as_ref().map(|path| display(path.display()));
    let resp = sidecar.resp_address.map(display);
    info!(%listen, resp, %admin, socket, name = health.name, "listening");
    manager.ready(&format!("listening on {listen}, admin on {admin}")).await;

    // Serve.
    tokio::select! {
        signal = signals.next() => info!("{signal}"),
        never = manager.watch(|| health.stalled()) => match never {},
    }

    // Drain and notify the service manager at the same time: a manager that does not respond must not delay the drain.
    let drain = async { tokio::join!(manager.stopping("draining: new messages are refused"), sidecar.drain()).1 };
    tokio::select! {
        drained = drain => drained.map_err(Failure::run),
        signal = signals.next_request() => Err(Failure::Run(format!(
            "{signal} ended the drain, before all messages in flight were kept or delivered"
        ))),
    }
}
