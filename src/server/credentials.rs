//! The TLS certificate of the server, and the authority of client certificates. Their files are read again when they
//! change.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::{CertificateError, Error, RootCertStore, ServerConfig};
use tokio_util::either::Either;
use tracing::warn;
use x509_parser::certificate::{Validity, X509Certificate};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;
use x509_parser::time::ASN1Time;

use super::socket::Stream;
use super::watched_files::{FileContent, WatchedFiles};

/// The maximum length of a name that is taken from a client certificate, in characters.
pub(super) const MAX_NAME_LENGTH: usize = 128;

/// The certificate chain of the server, its private key and, if clients need certificates, the authorities of those. The
/// PEM files are read again when the content changes.
#[derive(Debug)]
pub struct Certificate(WatchedFiles<Pair>);

/// A certificate and its key that belong together.
struct Pair {
    chain: PathBuf,
    config: Arc<ServerConfig>,
    /// The validity period of the server's own certificate, if it can be read. The certificates of authorities in the
    /// chain are ignored: this server cannot renew them, and a chain may contain an expired authority on purpose, for
    /// old clients.
    validity: Option<Validity>,
    requires_client_certificate: bool,
}

impl Certificate {
    /// Reads a certificate chain and its private key. With `client_ca`, clients must present a certificate that an
    /// authority in this file signed.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, if it contains no certificate or no key, or if the certificate and the key do not
    /// match.
    pub fn files(chain: PathBuf, key: PathBuf, client_ca: Option<PathBuf>) -> io::Result<Certificate> {
        let paths: Vec<PathBuf> = [chain, key].into_iter().chain(client_ca).collect();
        WatchedFiles::new(&paths, |files| Pair::new(&files[0], &files[1], files.get(2))).map(Certificate)
    }

    /// Returns whether clients must present a certificate.
    pub fn requires_client_certificate(&self) -> bool {
        self.0.current().value.requires_client_certificate
    }

    /// Returns an acceptor for TLS handshakes with the last certificate that could be used.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.0.current().value.config))
    }

    /// Returns when the certificate expires, in seconds since 1970. Returns `None` if its validity cannot be read.
    pub fn expiry(&self) -> Option<i64> {
        self.0.current().value.validity.as_ref().map(|validity| validity.not_after.timestamp())
    }

    /// Returns a warning if the certificate has expired or is not valid yet.
    pub fn untimely(&self) -> Option<String> {
        let current = self.0.current();
        let (now, chain) = (ASN1Time::now(), current.value.chain.display());
        let Validity { not_before, not_after } = current.value.validity.as_ref()?;
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

    /// Reads the files again whenever their content changes. Logs a warning when the certificate expires, and when a
    /// new certificate is not valid now. Never returns.
    pub async fn maintain(&self) -> Infallible {
        // The check of the settings has already warned about the certificate at the start.
        let mut was_untimely = self.untimely().is_some();
        loop {
            let remedy = "see that --tls-cert, --tls-key and --tls-client-ca can be read, and that the first two belong \
                          together; if only one of them was replaced so far, replace the other";
            let is_new = self.0.next_check("certificate", remedy).await;
            let untimely = self.untimely();
            if let Some(untimely) = untimely.as_ref().filter(|_| is_new || !was_untimely) {
                warn!("{untimely}");
            }
            was_untimely = untimely.is_some();
        }
    }
}

impl Pair {
    fn new(certificate: &FileContent, key: &FileContent, client_ca: Option<&FileContent>) -> io::Result<Pair> {
        let chain = certificates(certificate)?;
        let validity = X509Certificate::from_der(&chain[0]).ok().map(|(_, own)| own.validity().clone());
        let secret = PrivateKeyDer::from_pem_slice(&key.bytes).map_err(|error| match error {
            pem::Error::NoItemsFound => key.error(&"there is no private key in it: it must be a PEM file"),
            error => key.error(&error),
        })?;
        let verifier = client_ca.map_or_else(|| Ok(WebPkiClientVerifier::no_client_auth()), client_verifier)?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_client_cert_verifier(verifier).with_single_cert(chain, secret))
            .map_err(|error| match error {
                Error::InconsistentKeys(_) => key
                    .error(&"this private key is not that of the certificate: name the two that belong together"),
                error => certificate.error(&error),
            })?;
        if client_ca.is_some() {
            // A resumed session would not verify the client certificate again.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Pair {
            chain: certificate.path.clone(),
            config: Arc::new(config),
            validity,
            requires_client_certificate: client_ca.is_some(),
        })
    }
}

/// Returns the certificates in a PEM file, at least one.
fn certificates(file: &FileContent) -> io::Result<Vec<CertificateDer<'static>>> {
    let certificates = CertificateDer::pem_slice_iter(&file.bytes).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(|error| file.error(&error))?;
    if certificates.is_empty() {
        return Err(file.error(&"there is no certificate in it: it must be a PEM file"));
    }
    Ok(certificates)
}

fn client_verifier(client_ca: &FileContent) -> io::Result<Arc<dyn ClientCertVerifier>> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(client_ca)? {
        roots.add(certificate).map_err(|error| client_ca.error(&error))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(ring::default_provider()))
        .build()
        .map_err(|error| client_ca.error(&error))
}

/// Returns the name in the client certificate of a connection: the common name of its subject or, without one, its first
/// alternative name. Returns `None` if the connection has no client certificate.
pub(super) fn certificate_name(stream: &Stream) -> Option<Arc<str>> {
    let Either::Right(tls) = stream else { return None };
    let certificate = tls.get_ref().1.peer_certificates()?.first()?;
    let name = X509Certificate::from_der(certificate).ok().and_then(|(_, certificate)| {
        let common_name = certificate.subject().iter_common_name().find_map(|name| name.as_str().ok());
        let alternative = || match certificate.subject_alternative_name().ok()??.value.general_names.first()? {
            GeneralName::DNSName(name) | GeneralName::URI(name) | GeneralName::RFC822Name(name) => Some(*name),
            _ => None,
        };
        common_name.or_else(alternative).map(str::to_owned)
    });
    let name = name.unwrap_or_default();
    // One character more than a listed name may have, so that no cut name is in the list.
    let printable: String = name.replace(char::is_control, "\u{fffd}").chars().take(MAX_NAME_LENGTH + 1).collect();
    Some(Arc::from(if printable.is_empty() { "unnamed certificate" } else { &printable }))
}

/// Logs why the TLS handshake of a client failed.
pub(super) fn log_failed_handshake(error: &io::Error) {
    match error.get_ref().and_then(|cause| cause.downcast_ref::<Error>()) {
        Some(Error::NoCertificatesPresented) => {
            warn!("a client presented no certificate: give it one that an authority of --tls-client-ca signed");
        }
        Some(Error::InvalidCertificate(cause)) => {
            let cause = match cause {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                    "no authority of --tls-client-ca signed it"
                }
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => "it has expired: renew it",
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    "it is not valid yet: is the clock right?"
                }
                cause => &cause.to_string(),
            };
            warn!("the certificate of a client is not accepted: {cause}");
        }
        _ => warn!(
            %error,
            "a client made no TLS handshake: does it speak TLS, and trust the certificate of --tls-cert?"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[tokio::test]
    async fn a_certificate_that_is_written_in_two_parts_is_used_once_it_is_whole() {
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
        let certificate = Certificate::files(chain.clone(), key.clone(), None).unwrap();
        let used = || Arc::clone(&certificate.0.current().value.config);
        let before = used();

        let (second, second_key) = made();
        fs::write(&key, &second_key).unwrap();
        assert!(certificate.0.check().await.is_err(), "the new key does not belong to the old certificate");
        fs::write(&chain, &second[..second.len() / 2]).unwrap();
        assert!(certificate.0.check().await.is_err(), "half a PEM file contains no certificate");
        assert!(Arc::ptr_eq(&before, &used()));
        fs::write(&chain, &second).unwrap();
        assert!(certificate.0.check().await.unwrap());
        assert!(!Arc::ptr_eq(&before, &used()));
    }
}
