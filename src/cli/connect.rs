//! The command-line flags of all verbs (subcommands) that connect to a sidecar, and the parsers of their values.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};

use super::Failure;
use crate::client::{Address, Client, ClientOptions, Tls};
use crate::config::MAX_DURATION;
use crate::server::token_in;

/// The default address for requests and subscriptions.
pub(super) const DEFAULT_ADDRESS: &str = "127.0.0.1:7415";
/// The default address of a sidecar's admin endpoint, which serves metrics, health and status over HTTP.
pub(super) const DEFAULT_ADMIN: &str = "127.0.0.1:7416";

/// Parses the value of a `--timeout` flag. The timeout must be above zero. It must be at most [`MAX_DURATION`], so that
/// adding it to the current time cannot overflow.
pub(super) fn patience(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match time {
        Duration::ZERO => Err(String::from("the time must be above 0")),
        time if time > MAX_DURATION => Err(String::from("the time must be at most a year")),
        time => Ok(time),
    }
}

/// Checks that the address of an admin endpoint has the form HOST:PORT, and returns it unchanged.
pub(super) fn admin(text: &str) -> Result<String, String> {
    let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
    let is_one = !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok();
    if is_one { Ok(text.to_owned()) } else { Err(String::from("write HOST:PORT, as in 127.0.0.1:7416")) }
}

#[derive(Args, Clone, Debug)]
pub(super) struct Connect {
    /// The sidecar: HOST:PORT, or unix:PATH
    #[arg(long, env = "ACKWHEEL_ADDR", default_value = DEFAULT_ADDRESS, value_name = "ADDRESS")]
    pub(super) addr: Address,
    /// How long to wait for a connection and for an answer
    #[arg(long, default_value = "5s", value_name = "DURATION", value_parser = patience)]
    timeout: Duration,
    /// File with the token, if the sidecar requires one
    #[arg(long, env = "ACKWHEEL_TOKEN_FILE", value_name = "FILE", value_hint = ValueHint::FilePath)]
    token_file: Option<PathBuf>,
    /// PEM file with the certificates to trust, if the sidecar uses TLS
    #[arg(long, env = "ACKWHEEL_TLS_CA", value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_ca: Option<PathBuf>,
}

impl Connect {
    pub(super) fn options(&self) -> Result<ClientOptions, Failure> {
        let mut options = ClientOptions::default()
            .client_name(concat!("ackwheel-cli/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(self.timeout)
            .request_timeout(self.timeout);
        if let Some(path) = &self.tls_ca {
            let tls = Tls::trusting(path).map_err(|error| Failure::Usage(format!("--tls-ca {error}")))?;
            options = options.tls(tls);
        }
        let Some(path) = &self.token_file else { return Ok(options) };
        let token = token_in(path).map_err(|error| Failure::Usage(format!("--token-file: {error}")))?;
        Ok(options.token(token))
    }

    pub(super) async fn client(&self) -> Result<Client, Failure> {
        Ok(Client::connect(self.addr.clone(), self.options()?).await?)
    }
}
