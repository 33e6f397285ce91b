//! The token and the TLS certificate of the server. Both are read again when their files change.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use subtle::ConstantTimeEq;
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
use crate::protocol::frame::MAX_TOKEN_LENGTH;

/// The token that clients must present. Its file is read again when the content changes.
#[derive(Debug)]
pub struct Token(WatchedFiles<Vec<u8>>);

impl Token {
    /// Reads the token in a file. White space around the token is ignored.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is empty, or is too long for a token. The error names the file.
    pub fn file(path: PathBuf) -> io::Result<Token> {
        WatchedFiles::new(&[path], |files| token(&files[0])).map(Token)
    }

    /// Returns whether `presented` is the token. The comparison takes the same time however many bytes are right, so
    /// that its duration does not reveal them.
    pub fn admits(&self, presented: &[u8]) -> bool {
        self.0.current().value.ct_eq(presented).into()
    }

    /// Reads the file again whenever its content changes. Never returns.
    pub async fn maintain(&self) -> Infallible {
        loop {
            self.0.next_check("token", "correct the token file, or its permissions").await;
        }
    }
}

/// Returns the token in a file, without the white space around it.
///
/// # Errors
///
/// When the file cannot be read, is empty, or is too long for a token. The error names the file.
pub fn token_in(path: &Path) -> io::Result<Vec<u8>> {
    token(&FileContent::read(path)?)
}

fn token(file: &FileContent) -> io::Result<Vec<u8>> {
    let token = file.bytes.trim_ascii();
    if (1..=MAX_TOKEN_LENGTH).contains(&token.len()) {
        return Ok(token.to_vec());
    }
    Err(file.error(&format_args!("a token has 1 to {MAX_TOKEN_LENGTH} bytes, and this file has {}", token.len())))
}

/// The certificate chain of the server and its private key. Their PEM files are read again when the content changes.
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
}

impl Certificate {
    /// Reads a certificate chain and its private key.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, if it contains no certificate or no key, or if the certificate and the key do not
    /// match.
    pub fn files(chain: PathBuf, key: PathBuf) -> io::Result<Certificate> {
        WatchedFiles::new(&[chain, key], |files| Pair::new(&files[0], &files[1])).map(Certificate)
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
            let remedy = "see that --tls-cert and --tls-key can be read and belong together; if only one of them was \
                          replaced so far, replace the other";
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
        Ok(Pair { chain: certificate.path.clone(), config: Arc::new(config), validity })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[tokio::test]
    async fn a_changed_file_changes_the_token_and_a_broken_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "first\n").unwrap();
        let token = Token::file(path.clone()).unwrap();
        assert!(token.admits(b"first") && !token.admits(b"second") && !token.admits(b""));
        fs::write(&path, "second").unwrap();
        assert!(token.0.check().await.unwrap());
        assert!(token.admits(b"second") && !token.admits(b"first"));
        fs::write(&path, "").unwrap();
        assert!(token.0.check().await.is_err());
        assert!(token.admits(b"second"), "an empty file does not change the token");
    }

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
        let certificate = Certificate::files(chain.clone(), key.clone()).unwrap();
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
