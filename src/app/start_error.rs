//! The reasons why a sidecar cannot start.

use std::io;

use crate::memory::StateError;
use crate::redis::RedisStoreError;

/// The reason why a sidecar could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address could not be listened on.
    #[error("cannot listen on {address}: {cause}{}; choose another {flag}", likely_cause(cause))]
    Listen {
        /// The flag that names the address.
        flag: &'static str,
        /// The address.
        address: String,
        /// The cause.
        cause: io::Error,
    },
    /// A thread for the tickers, or for the admin endpoints, could not be started.
    #[error(
        "a thread for the wheel or for --admin could not be started: {0}; look at the limits of processes and open files"
    )]
    Thread(io::Error),
    /// The memory store could not be opened.
    #[error(transparent)]
    Memory(#[from] StateError),
    /// The Redis store could not be opened.
    #[error("--store {url}: {cause}")]
    Redis {
        /// Its URL, without a password.
        url: String,
        /// The cause.
        cause: RedisStoreError,
    },
}

/// The likely reason why an address cannot be listened on.
fn likely_cause(cause: &io::Error) -> &'static str {
    if cause.kind() == io::ErrorKind::AddrInUse { "; is another sidecar running there?" } else { "" }
}
