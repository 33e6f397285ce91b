//! The certificate with which the data listener speaks TLS: it is read again when its content changes, and says when it
//! runs out.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::{info, warn};
use x509_parser::certificate::{Validity, X509Certificate};
use x509_parser::prelude::FromDer;
use x509_parser::time::ASN1Time;

use crate::server::reloaded::{FileContent, Look, Reloaded};

/// A server's certificate and its key, in PEM files that are read again when their content changes.
#[derive(Debug)]
pub struct Certificate {
    chain: PathBuf,
    files: Reloaded<Pair>,
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
        let files = Reloaded::new(vec![chain.clone(), key], |files| Pair::new(&files[0], &files[1]))?;
        Ok(Certificate { chain, files })
    }

    /// Makes TLS handshakes with the certificate as it was read last.
    #[must_use]
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.files.current().config))
    }

    /// When the certificate runs out, in seconds since 1970, if it says so.
    #[must_use]
    pub fn expiry(&self) -> Option<i64> {
        self.files.current().validity.as_ref().map(|validity| validity.not_after.timestamp())
    }

    /// Why clients refuse the certificate today, if its time is not now.
    #[must_use]
    pub fn untimely(&self) -> Option<String> {
        self.files.current().untimely(&self.chain)
    }

    /// Reads the files again when their content changes, and logs once if the time of the certificate is not now; for as
    /// long as it is awaited.
    pub async fn maintain(&self) -> Infallible {
        // The settings warn of the one at the start.
        let mut was_untimely = self.untimely().is_some();
        loop {
            match self.files.next_look().await {
                Look::Unchanged => {}
                Look::Changed => {
                    info!(certificate = %self.chain.display(), "the certificate has changed and was read again");
                    was_untimely = false;
                }
                // Perhaps only one of the two files was replaced so far.
                Look::Unusable(error) => warn!(
                    %error,
                    "the changed certificate cannot be used yet, and the old one stays: see that --tls-cert and \
                     --tls-key can be read and belong together"
                ),
            }
            let untimely = self.untimely();
            if let Some(untimely) = untimely.as_ref().filter(|_| !was_untimely) {
                warn!("{untimely}");
            }
            was_untimely = untimely.is_some();
        }
    }
}

impl Pair {
    fn new(certificate: &FileContent, key: &FileContent) -> io::Result<Pair> {
        let chain = CertificateDer::pem_slice_iter(certificate.bytes())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| certificate.wrong(&error))?;
        let Some(own) = chain.first() else {
            return Err(certificate.wrong(&"there is no certificate in it: it must be a PEM file"));
        };
        let validity = X509Certificate::from_der(own).ok().map(|(_, own)| own.validity().clone());
        let secret = PrivateKeyDer::from_pem_slice(key.bytes()).map_err(|error| match error {
            pem::Error::NoItemsFound => key.wrong(&"there is no private key in it: it must be a PEM file"),
            error => key.wrong(&error),
        })?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret))
            .map_err(|error| match error {
                tokio_rustls::rustls::Error::InconsistentKeys(_) => key
                    .wrong(&"this private key is not that of the certificate: name the two that belong together"),
                error => certificate.wrong(&error),
            })?;
        Ok(Pair { config: Arc::new(config), validity })
    }

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

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn a_certificate_that_is_written_in_two_parts_is_used_once_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (chain, key) = (folder.path().join("chain.pem"), folder.path().join("key.pem"));
        let made = || {
            let pair = KeyPair::generate().unwrap();
            let chain =
                CertificateParams::new(vec![String::from("127.0.0.1")]).unwrap().self_signed(&pair).unwrap();
            (chain.pem(), pair.serialize_pem())
        };
        let (first, first_key) = made();
        fs::write(&chain, &first).unwrap();
        fs::write(&key, &first_key).unwrap();
        let certificate = Certificate::files(chain.clone(), key.clone()).unwrap();
        let used = || Arc::clone(&certificate.files.current().config);
        let before = used();

        let (second, second_key) = made();
        fs::write(&key, &second_key).unwrap();
        assert!(matches!(certificate.files.look(), Look::Unusable(_)), "the key is that of another");
        fs::write(&chain, &second[..second.len() / 2]).unwrap();
        assert!(matches!(certificate.files.look(), Look::Unusable(_)), "half of it is no certificate");
        assert!(Arc::ptr_eq(&before, &used()));
        fs::write(&chain, &second).unwrap();
        assert!(matches!(certificate.files.look(), Look::Changed));
        assert!(!Arc::ptr_eq(&before, &used()));
    }
}
