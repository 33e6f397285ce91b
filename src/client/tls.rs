//! TLS for the connection to a server.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::{AlertDescription, CertificateError, ClientConfig, Error, RootCertStore};

use super::files::{read, wrong};

/// The certificates that a client trusts when a server uses TLS, and the certificate that it presents, if it has one.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ClientConfig>,
}

impl Tls {
    /// Creates a configuration that trusts servers whose certificate is signed by a certificate in a PEM file.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, has no certificate, or has a certificate that cannot be used as the
    /// certificate of an authority.
    pub fn trusting(file: &Path) -> io::Result<Tls> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(file)? {
            roots.add(certificate).map_err(|error| wrong(file, &error))?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(file, &error))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Tls { config: Arc::new(config) })
    }

    /// Adds the certificate that this client presents, with its private key. Both are PEM files, and are read now only.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read, has no certificate or no key, or if the two do not belong together.
    pub fn presenting(self, certificate: &Path, key: &Path) -> io::Result<Tls> {
        let secret = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| wrong(key, &error))?;
        let pair = CertifiedKey::from_der(certificates(certificate)?, secret, &ring::default_provider());
        let pair = pair.map_err(|error| match error {
            Error::InconsistentKeys(_) => wrong(key, &"this private key is not that of the certificate"),
            error => wrong(certificate, &error),
        })?;
        let mut config = Arc::unwrap_or_clone(self.config);
        config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(pair));
        Ok(Tls { config: Arc::new(config) })
    }

    /// Performs the TLS handshake. The server's certificate must be valid for `host`, a name or an IP address.
    pub(crate) async fn shake_hands(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, format!("{host:?}: {error}")))?;
        TlsConnector::from(Arc::clone(&self.config)).connect(name, stream).await.map_err(|error| {
            match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
                Some(Error::InvalidMessage(_)) => {
                    io::Error::new(error.kind(), "the server speaks no TLS there: connect without it")
                }
                Some(Error::InvalidCertificate(cause)) => io::Error::new(error.kind(), not_trusted(cause)),
                _ => error,
            }
        })
    }
}

fn certificates(file: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let certificates = CertificateDer::pem_slice_iter(&read(file)?).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(|error| wrong(file, &error))?;
    if certificates.is_empty() {
        return Err(wrong(file, &"there is no certificate in it"));
    }
    Ok(certificates)
}

/// Replaces the error of a server that refused the client certificate by one that says so. With TLS 1.3, this error
/// arrives after the handshake.
pub(super) fn explain_refused_certificate(error: io::Error) -> io::Error {
    let cause = match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::AlertReceived(AlertDescription::CertificateRequired | AlertDescription::HandshakeFailure)) => {
            "the server requires a client certificate: give the client one that its --tls-client-ca signed"
        }
        Some(Error::AlertReceived(AlertDescription::CertificateExpired)) => {
            "the server refused the client certificate because it has expired: renew it"
        }
        Some(Error::AlertReceived(
            AlertDescription::UnknownCA | AlertDescription::DecryptError | AlertDescription::BadCertificate,
        )) => "the server refused the client certificate: no authority of its --tls-client-ca signed it",
        _ => return error,
    };
    io::Error::new(io::ErrorKind::InvalidData, cause)
}

fn not_trusted(cause: &CertificateError) -> String {
    let cause = match cause {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => "no trusted authority signed it",
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "it has expired: renew it there",
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet: are the clocks of client and server right?"
        }
        CertificateError::Other(other) if format!("{other:?}").contains("CaUsedAsEndEntity") => {
            "it is that of an authority; a self-signed server certificate needs basicConstraints CA:FALSE"
        }
        cause => &cause.to_string(),
    };
    format!("the server's certificate is not accepted: {cause}")
}

impl PartialEq for Tls {
    fn eq(&self, other: &Tls) -> bool {
        Arc::ptr_eq(&self.config, &other.config)
    }
}

impl Eq for Tls {}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}
