//! The command-line flags of all verbs (subcommands) that connect to a sidecar, and the parsers of their values.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use tokio::time::{sleep, timeout};

use super::Failure;
use crate::client::{Address, Client, ClientError, ClientOptions, Tls, read_token};
use crate::config::MAX_DURATION;
use crate::core::Reason;

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

/// The pause before another attempt to reach a sidecar that starts.
pub(super) const RETRY: Duration = Duration::from_millis(100);

#[derive(Args, Clone, Debug)]
pub(super) struct Connect {
    /// The sidecar: HOST:PORT, or unix:PATH
    #[arg(long, env = "ACKWHEEL_ADDR", default_value = DEFAULT_ADDRESS, value_name = "ADDRESS")]
    pub(super) addr: Address,
    /// How long to wait for a connection and for an answer; a sidecar may start meanwhile
    #[arg(long, default_value = "5s", value_name = "DURATION", value_parser = patience)]
    pub(super) timeout: Duration,
    /// File with the token, if the sidecar requires one; of a file with several, the first is presented
    #[arg(long, env = "ACKWHEEL_TOKEN_FILE", value_name = "FILE", value_hint = ValueHint::FilePath)]
    token_file: Option<PathBuf>,
    /// PEM file with the certificates to trust, if the sidecar uses TLS
    #[arg(long, env = "ACKWHEEL_TLS_CA", value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_ca: Option<PathBuf>,
    /// PEM file with the certificate to present, if the sidecar requires one; it needs --tls-ca and --tls-client-key
    #[arg(long, env = "ACKWHEEL_TLS_CLIENT_CERT", value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_client_cert: Option<PathBuf>,
    /// PEM file with the private key of --tls-client-cert
    #[arg(long, env = "ACKWHEEL_TLS_CLIENT_KEY", value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_client_key: Option<PathBuf>,
}

impl Connect {
    pub(super) fn options(&self) -> Result<ClientOptions, Failure> {
        let mut options = ClientOptions::default()
            .client_name(concat!("ackwheel-cli/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(self.timeout)
            .request_timeout(self.timeout);
        if let Some(tls) = self.tls()? {
            options = options.tls(tls);
        }
        if let Some(path) = &self.token_file {
            options = options.token_file(path);
            options.check_token_file().map_err(|error| Failure::Usage(format!("--token-file: {error}")))?;
        }
        Ok(options)
    }

    /// Returns the token to present.
    pub(super) fn token(&self) -> Result<Option<String>, Failure> {
        let Some(path) = &self.token_file else { return Ok(None) };
        let token = read_token(path).map_err(|error| Failure::Usage(format!("--token-file: {error}")))?;
        Ok(Some(String::from_utf8_lossy(&token).into_owned()))
    }

    pub(super) fn tls(&self) -> Result<Option<Tls>, Failure> {
        let trusted = self.tls_ca.as_deref().map(Tls::trusting).transpose();
        let trusted = trusted.map_err(|error| Failure::Usage(format!("--tls-ca {error}")))?;
        match (trusted, &self.tls_client_cert, &self.tls_client_key) {
            (trusted, None, None) => Ok(trusted),
            (Some(tls), Some(certificate), Some(key)) => tls
                .presenting(certificate, key)
                .map(Some)
                .map_err(|error| Failure::Usage(format!("--tls-client-cert and --tls-client-key: {error}"))),
            _ => Err(Failure::Usage(String::from(
                "--tls-client-cert, --tls-client-key and --tls-ca belong together: give all three, or neither of the first \
                 two",
            ))),
        }
    }

    pub(super) async fn client(&self) -> Result<Client, Failure> {
        let options = self.options()?;
        self.wait_for_start(async || Client::connect(self.addr.clone(), options.clone()).await).await
    }

    /// Connects with `connect`. While the sidecar starts, tries again and again, for as long as `--timeout` says.
    pub(super) async fn wait_for_start<T>(
        &self,
        connect: impl AsyncFn() -> Result<T, ClientError>,
    ) -> Result<T, Failure> {
        let mut connected = connect().await;
        let trying = async {
            while connected.as_ref().is_err_and(may_start) {
                sleep(RETRY).await;
                connected = connect().await;
            }
        };
        // If the time is up, the last error says why.
        let _ = timeout(self.timeout, trying).await;
        Ok(connected?)
    }
}

/// Returns whether a sidecar perhaps starts: it is not listening yet, or its store is not open yet.
fn may_start(error: &ClientError) -> bool {
    let ClientError::Connect { cause, .. } = error else { return error.reason() == Some(Reason::Starting) };
    matches!(cause.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
}
