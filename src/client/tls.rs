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
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{CertificateError, ClientConfig, Error, RootCertStore};

/// The certificates that a client trusts when a server uses TLS.
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
        let wrong = |error: &dyn fmt::Display| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", file.display()))
        };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(file).map_err(|error| wrong(&error))? {
            let certificate = certificate.map_err(|error| wrong(&error))?;
            roots.add(certificate).map_err(|error| wrong(&error))?;
        }
        if roots.is_empty() {
            return Err(wrong(&"there is no certificate in it"));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(&error))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Tls { config: Arc::new(config) })
    }

    /// Performs the TLS handshake. The server's certificate must be valid for `host`, a name or an IP address.
    pub(super) async fn shake_hands(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
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
