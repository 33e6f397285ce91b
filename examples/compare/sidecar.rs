//! Sidecars of its own, and our load on them.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{ChildStderr, Stdio};

use ackwheel::app::{self, StartError};
use ackwheel::bench::{self, BenchOptions};
use ackwheel::config::{Config, Settings};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use tracing::info;

use crate::child::{Child, end_with_stdin};

/// A sidecar in a process of its own.
#[derive(Debug)]
pub struct Sidecar {
    process: Child,
    address: SocketAddr,
    admin: String,
}

impl Sidecar {
    /// Starts it on free ports, with further flags of `ackwheel serve`.
    ///
    /// # Errors
    ///
    /// When it does not start, with what it said.
    pub fn start(flags: &[&str]) -> anyhow::Result<Sidecar> {
        Sidecar::in_role(&[&["sidecar"], flags].concat())
    }

    /// Starts one whose ring is on dashmap, on free ports.
    ///
    /// # Errors
    ///
    /// When it does not start, with what it said.
    pub fn on_dashmap() -> anyhow::Result<Sidecar> {
        Sidecar::in_role(&["dashed"])
    }

    fn in_role(role: &[&str]) -> anyhow::Result<Sidecar> {
        let ports = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
        let mut process = Child::in_role(&[role, &ports].concat(), |command| {
            command.stdout(Stdio::null()).stderr(Stdio::piped());
            let ours = std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ACKWHEEL_"));
            for (name, _) in ours {
                command.env_remove(name);
            }
        })?;
        let mut log = BufReader::new(process.stderr().context("its log is piped")?);
        let (address, admin) = addresses(&mut log).context("a sidecar does not start")?;
        // Its log is read on, lest it wait for us; what goes wrong is passed on.
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                if ["\"WARN\"", "\"ERROR\""].iter().any(|level| line.contains(level)) {
                    eprintln!("  a sidecar says: {line}");
                }
            }
        });
        Ok(Sidecar { process, address, admin })
    }

    /// Bytes that it has in memory.
    ///
    /// # Errors
    ///
    /// When the system does not tell.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        self.process.resident_bytes()
    }

    /// Seconds of a processor that it has had.
    ///
    /// # Errors
    ///
    /// When the system does not tell.
    pub fn cpu_seconds(&self) -> anyhow::Result<f64> {
        self.process.cpu_seconds()
    }

    /// The usual load on it.
    pub fn load(&self) -> BenchOptions {
        BenchOptions { address: self.address.into(), admin: Some(self.admin.clone()), ..BenchOptions::default() }
    }
}

/// Puts a load on a server of our protocol.
///
/// # Errors
///
/// When the load cannot be, or any answer was wrong.
pub fn run(options: &BenchOptions) -> anyhow::Result<bench::Report> {
    let report = bench::run(options, &|_| ())?;
    ensure!(report.errors == 0, "{} wrong answers, as {}", report.errors, report.error_texts.join("; "));
    Ok(report)
}

/// The addresses for logic nodes and for scrapes, as the log says them.
fn addresses(log: &mut BufReader<ChildStderr>) -> anyhow::Result<(SocketAddr, String)> {
    let mut said = String::new();
    for line in log.lines() {
        let line = line?;
        let fields = serde_json::from_str::<Value>(&line).unwrap_or_default()["fields"].take();
        if fields["message"] == "listening"
            && let (Some(listen), Some(admin)) = (fields["listen"].as_str(), fields["admin"].as_str())
        {
            return Ok((listen.parse()?, admin.to_owned()));
        }
        said = said + "\n" + &line;
    }
    bail!("it ended:{said}")
}

/// Is a sidecar on the store that `start` opens for the settings, until stdin ends.
///
/// # Errors
///
/// When it cannot start.
pub fn serve(
    settings: Settings,
    start: impl AsyncFnOnce(Config) -> Result<app::Sidecar, StartError>,
) -> anyhow::Result<()> {
    end_with_stdin();
    tracing_subscriber::fmt().json().with_writer(std::io::stderr).init();
    let config = settings.check()?;
    app::raise_open_files_limit(&config);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(config.threads).enable_all().build()?;
    runtime.block_on(async {
        let sidecar = start(config).await?;
        info!(listen = %sidecar.address, admin = %sidecar.admin_address, "listening");
        std::future::pending().await
    })
}

/// The larger of a figure of the adds and of the dels.
///
/// # Errors
///
/// When one of them was not measured.
pub fn larger(report: &bench::Report, figure: fn(&bench::Latency) -> f64) -> anyhow::Result<f64> {
    let of = |name| report.latency_us.get(name).map(figure);
    of("add").zip(of("del")).map(|(add, del)| add.max(del)).context("adds and dels were measured")
}
