//! The certificate with which the data listener speaks TLS: it is read again when it changes, and says when it runs out.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, MutexGuard};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::{info, warn};
use x509_parser::certificate::{Validity, X509Certificate};
use x509_parser::prelude::FromDer;
use x509_parser::time::ASN1Time;

/// A server's certificate and its key, in PEM files that are read again when they change.
#[derive(Debug)]
pub struct Certificate {
    chain: PathBuf,
    key: PathBuf,
    read: Mutex<Read>,
}

#[derive(Debug)]
struct Read {
    pair: Pair,
    /// Whether it was said of this one that its time is not now.
    told: bool,
    modified: [Option<SystemTime>; 2],
    /// Whether the files have changed since, to what cannot be used.
    is_unusable: bool,
}

/// A certificate and its key that belong together.
#[derive(Debug)]
struct Pair {
    config: Arc<ServerConfig>,
    /// From when to when the server's own certificate is valid: those of its authorities are not this server's to renew,
    /// and one that has run out may be there for old clients alone. Unknown where it cannot be read.
    validity: Option<Validity>,
}

impl Certificate {
    /// Reads a certificate chain and its key.
    ///
    /// # Errors
    ///
    /// When a file cannot be read or holds no certificate or key, or the two do not belong together.
    pub fn files(chain: PathBuf, key: PathBuf) -> io::Result<Certificate> {
        let modified = [modified(&chain), modified(&key)];
        let pair = read(&chain, &key)?;
        // Whoever starts with it says so of this one.
        let told = pair.untimely(&chain).is_some();
        Ok(Certificate { chain, key, read: Mutex::new(Read { pair, told, modified, is_unusable: false }) })
    }

    /// Who shakes hands with the files' present content.
    #[must_use]
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.look().pair.config))
    }

    /// When the certificate runs out, in seconds since 1970, if it says so.
    #[must_use]
    pub fn expiry(&self) -> Option<i64> {
        self.look().pair.validity.as_ref().map(|validity| validity.not_after.timestamp())
    }

    /// Why clients refuse the certificate today, if its time is not now.
    #[must_use]
    pub fn untimely(&self) -> Option<String> {
        self.read.lock().pair.untimely(&self.chain)
    }

    /// Reads the files again if they have changed, and says once if the time of the certificate is not now.
    fn look(&self) -> MutexGuard<'_, Read> {
        let mut current = self.read.lock();
        let modified = [modified(&self.chain), modified(&self.key)];
        if modified == current.modified {
            current.is_unusable = false;
        } else {
            match read(&self.chain, &self.key) {
                Ok(pair) => {
                    info!(certificate = %self.chain.display(), "the certificate has changed and was read again");
                    *current = Read { pair, told: false, modified, is_unusable: false };
                }
                Err(error) => {
                    // Perhaps only one of the two files was replaced so far, or one is just being written, and that may end
                    // within the grain of its time: they are read again with the next look.
                    if !std::mem::replace(&mut current.is_unusable, true) {
                        warn!(
                            %error,
                            "the changed certificate cannot be used yet, and the old one stays: see that --tls-cert \
                             and --tls-key can be read and belong together"
                        );
                    }
                }
            }
        }
        let untimely = current.pair.untimely(&self.chain);
        if let Some(untimely) = untimely.as_ref().filter(|_| !current.told) {
            warn!("{untimely}");
        }
        current.told = untimely.is_some();
        current
    }
}

impl Pair {
    fn untimely(&self, chain: &Path) -> Option<String> {
        let Validity { not_before, not_after } = self.validity.as_ref()?;
        let (now, chain) = (ASN1Time::now(), chain.display());
        if now > *not_after {
            return Some(format!("--tls-cert: {chain} ran out on {not_after}, and clients refuse it: renew it"));
        }
        (now < *not_before).then(|| {
            format!(
                "--tls-cert: {chain} is valid from {not_before} on, and clients refuse it until then: is the \
                 clock right?"
            )
        })
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|metadata| metadata.modified()).ok()
}

fn read(certificate: &Path, key: &Path) -> io::Result<Pair> {
    let in_file = |path: &Path, error: &dyn std::fmt::Display| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
    };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| in_file(certificate, &error))?;
    let Some(own) = chain.first() else {
        return Err(in_file(certificate, &"there is no certificate in it: it must be a PEM file"));
    };
    let validity = X509Certificate::from_der(own).ok().map(|(_, own)| own.validity().clone());
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
    Ok(Pair { config: Arc::new(config), validity })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn a_certificate_that_was_being_written_is_read_again_though_its_time_does_not_change() {
        let folder = tempfile::tempdir().unwrap();
        let (chain, key) = (folder.path().join("chain.pem"), folder.path().join("key.pem"));
        let made = || {
            let pair = KeyPair::generate().unwrap();
            let chain =
                CertificateParams::new(vec![String::from("127.0.0.1")]).unwrap().self_signed(&pair).unwrap();
            (chain.pem(), pair.serialize_pem())
        };
        let begun = SystemTime::now();
        let write = |path: &Path, text: &str, seconds: u64| {
            fs::write(path, text).unwrap();
            let later = begun + Duration::from_secs(seconds);
            fs::File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
        };
        let (first, first_key) = made();
        write(&chain, &first, 0);
        write(&key, &first_key, 0);
        let certificate = Certificate::files(chain.clone(), key.clone()).unwrap();
        let used = || Arc::clone(&certificate.look().pair.config);
        let before = used();
        assert!(Arc::ptr_eq(&before, &used()), "nothing has changed");

        let (second, second_key) = made();
        write(&key, &second_key, 10);
        write(&chain, &second[..second.len() / 2], 10);
        assert!(Arc::ptr_eq(&before, &used()), "half of it is no certificate");
        write(&chain, &second, 10);
        assert!(!Arc::ptr_eq(&before, &used()));
    }
}
