//! TLS for the data listener.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::{info, warn};

/// A certificate and its key, in PEM files that are read again when they change.
#[derive(Debug)]
pub struct TlsSource {
    certificate: PathBuf,
    key: PathBuf,
    read: Mutex<Read>,
}

#[derive(Debug)]
struct Read {
    config: Arc<ServerConfig>,
    modified: [Option<SystemTime>; 2],
}

impl TlsSource {
    /// Reads a certificate chain and its key.
    ///
    /// # Errors
    ///
    /// When a file cannot be read or holds no certificate or key, or the two do not belong together.
    pub fn files(certificate: PathBuf, key: PathBuf) -> io::Result<TlsSource> {
        let modified = [modified(&certificate), modified(&key)];
        let config = read(&certificate, &key)?;
        Ok(TlsSource { certificate, key, read: Mutex::new(Read { config, modified }) })
    }

    /// Who shakes hands with the files' present content.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let mut current = self.read.lock();
        let modified = [modified(&self.certificate), modified(&self.key)];
        if modified != current.modified {
            current.modified = modified;
            match read(&self.certificate, &self.key) {
                Ok(config) => {
                    info!(certificate = %self.certificate.display(), "the certificate has changed and was read again");
                    current.config = config;
                }
                // Perhaps only one of the two files was replaced so far.
                Err(error) => warn!(
                    %error,
                    "the changed certificate cannot be used yet, and the old one stays: see that --tls-cert and \
                     --tls-key can be read and belong together"
                ),
            }
        }
        TlsAcceptor::from(Arc::clone(&current.config))
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|metadata| metadata.modified()).ok()
}

fn read(certificate: &Path, key: &Path) -> io::Result<Arc<ServerConfig>> {
    let in_file = |path: &Path, error: &dyn std::fmt::Display| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
    };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| in_file(certificate, &error))?;
    if chain.is_empty() {
        return Err(in_file(certificate, &"there is no certificate in it: it must be a PEM file"));
    }
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| match error {
        pem::Error::NoItemsFound => in_file(key, &"there is no private key in it: it must be a PEM file"),
        error => in_file(key, &error),
    })?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret))
        .map_err(|error| match error {
            tokio_rustls::rustls::Error::InconsistentKeys(_) => {
                in_file(key, &"this private key is not that of the certificate: name the two that belong together")
            }
            error => in_file(certificate, &error),
        })?;
    Ok(Arc::new(config))
}
