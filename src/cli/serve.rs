//! The arguments of the verb `serve`, and their check. `main.rs` then runs the sidecar (the ackwheel server).

use std::io::{Write, stderr, stdout};
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::{Failure, setting_sources};
use crate::app::StartError;
use crate::config::{Config, Settings};
use crate::process::files::exposure;
use crate::redis::{RedisStoreError, StoreUrl};

/// Run a sidecar that tracks messages in flight
///
/// Every flag is also an environment variable, and, without its dashes, a key of the TOML file of --config. Precedence:
/// flag, environment variable, file, default. A DURATION is written 200ms, 3s, 5m or 24h.
///
/// SIGTERM, SIGINT and SIGHUP drain: new messages are refused, and messages in flight are delivered, or kept with
/// --journal and in Redis. The process exits within 10 s: with 0, or with 1 if messages, batches or Acks are lost.
#[derive(Args, Debug)]
pub struct Serve {
    /// TOML file with settings; examples/ackwheel.toml has every key with its default [default: none]
    #[arg(long, env = "ACKWHEEL_CONFIG", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(super) config: Option<PathBuf>,
    /// Check the settings, say whether they are right, and stop, without listening or writing to a file
    #[arg(long)]
    check_config: bool,
    #[command(flatten)]
    settings: Settings,
}

impl Serve {
    /// Reads the settings file, if there is one, and checks all settings. With `--check-config`, prints the warnings
    /// and a confirmation, and returns `None`.
    ///
    /// # Errors
    ///
    /// Fails if the settings file cannot be read, if a setting is wrong, or if the texts cannot be printed.
    pub fn check(self) -> Result<Option<Config>, Failure> {
        let file = self.config.as_deref().map(Settings::from_file).transpose().map_err(Failure::usage)?;
        let has_password =
            file.as_ref().and_then(|file| file.store.as_ref()).is_some_and(StoreUrl::may_have_password);
        let exposure = self.config.as_deref().filter(|_| has_password).and_then(|path| exposure("--config", path));
        let mut config = self.settings.or(file.unwrap_or_default()).check().map_err(Failure::usage)?;
        config.warnings.splice(0..0, setting_sources::unknown_variables().into_iter().chain(exposure));
        if !self.check_config {
            return Ok(Some(config));
        }
        for text in config.notes.iter().chain(&config.warnings) {
            writeln!(stderr(), "ackwheel: {text}")?;
        }
        writeln!(stdout(), "the configuration is right")?;
        Ok(None)
    }
}

/// Creates [`Failure::Usage`] for a wrong Redis address, and for settings that differ from those stored in Redis.
/// Creates [`Failure::Run`] for any other error.
impl From<StartError> for Failure {
    fn from(error: StartError) -> Failure {
        match &error {
            StartError::Redis { cause: RedisStoreError::Address(_) | RedisStoreError::Differs(_), .. } => {
                Failure::usage(error)
            }
            _ => Failure::run(error),
        }
    }
}
