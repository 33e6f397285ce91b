//! The certificate of the TCP listener: it is read again when its files change, and knows when it runs out.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::warn;
use x509_parser::certificate::{Validity, X509Certificate};
use x509_parser::prelude::FromDer;
use x509_parser::time::ASN1Time;

use super::watched_files::{FileContent, WatchedFiles};

/// A server's certificate and its key, in PEM files that are read again when their content changes.
#[derive(Debug)]
pub struct Certificate {
    chain: PathBuf,
    files: WatchedFiles<Pair>,
}

/// A certificate and its key that belong together.
#[derive(Debug)]
struct Pair {
    config: Arc<ServerConfig>,
    /// When the server's own certificate is valid, if that can be read. Those of its authorities do not count: this server
    /// cannot renew them, and one that ran out may be there for old clients alone.
    validity: Option<Validity>,
}

impl Certificate {
    /// Reads a certificate chain and its key.
    ///
    /// # Errors
    ///
    /// When a file cannot be read or has no certificate or key in it, or the two do not belong together.
    pub fn files(chain: PathBuf, key: PathBuf) -> io::Result<Certificate> {
        let files = WatchedFiles::new(vec![chain.clone(), key], |files| Pair::new(&files[0], &files[1]))?;
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

    /// Why clients refuse the certificate today, if it has run out or is not valid yet.
    #[must_use]
    pub fn untimely(&self) -> Option<String> {
        self.files.current().untimely(&self.chain)
    }

    /// Reads the files again when their content changes, and logs once if clients refuse the certificate today; for as
    /// long as it is awaited.
    pub async fn maintain(&self) -> Infallible {
        // The warnings of the settings name that of the start.
        let mut was_untimely = self.untimely().is_some();
        let remedy = "see that --tls-cert and --tls-key can be read and belong together; if only one of them was \
                      replaced so far, replace the other";
        let log_untimely = |is_new| {
            let untimely = self.untimely();
            if let Some(untimely) = untimely.as_ref().filter(|_| is_new || !was_untimely) {
                warn!("{untimely}");
            }
            was_untimely = untimely.is_some();
        };
        self.files.watch("certificate", remedy, log_untimely).await
    }
}

impl Pair {
    fn new(certificate: &FileContent, key: &FileContent) -> io::Result<Pair> {
        let chain = CertificateDer::pem_slice_iter(&certificate.bytes)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| certificate.error(&error))?;
        let Some(own) = chain.first() else {
            return Err(certificate.error(&"there is no certificate in it: it must be a PEM file"));
        };
        let validity = X509Certificate::from_der(own).ok().map(|(_, own)| own.validity().clone());
        let secret = PrivateKeyDer::from_pem_slice(&key.bytes).map_err(|error| match error {
            pem::Error::NoItemsFound => key.error(&"there is no private key in it: it must be a PEM file"),
            error => key.error(&error),
        })?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret))
            .map_err(|error| match error {
                tokio_rustls::rustls::Error::InconsistentKeys(_) => key
                    .error(&"this private key is not that of the certificate: name the two that belong together"),
                error => certificate.error(&error),
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
    use crate::server::watched_files::Change;

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
        assert!(matches!(certificate.files.check(), Change::Unusable(_)), "the key is that of another");
        fs::write(&chain, &second[..second.len() / 2]).unwrap();
        assert!(matches!(certificate.files.check(), Change::Unusable(_)), "half of it is no certificate");
        assert!(Arc::ptr_eq(&before, &used()));
        fs::write(&chain, &second).unwrap();
        assert!(matches!(certificate.files.check(), Change::Used));
        assert!(!Arc::ptr_eq(&before, &used()));
    }
}
