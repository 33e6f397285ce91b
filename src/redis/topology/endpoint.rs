//! The address and the credentials of a Redis, a Sentinel or a Cluster node.

use std::fmt::Display;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redis::{ConnectionAddr, ConnectionInfo, RedisConnectionInfo};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::process::files::open_regular;

/// The maximum length of a file, in bytes.
const MAX_LENGTH: u64 = 1024 * 1024;

/// Files with credentials for Redis. They are read for each new connection, so that a changed file needs no restart.
#[derive(Clone, Debug, Default)]
pub struct CredentialFiles {
    /// The password of the user in the URL.
    pub password: Option<PathBuf>,
    /// The password of the user at the Sentinels.
    pub sentinel_password: Option<PathBuf>,
    /// The certificates of the authorities that may sign the certificate of Redis. Those of the system if there is none.
    pub authority: Option<PathBuf>,
    /// The certificate of this sidecar and its private key.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

/// The address of a Redis, a Sentinel or a Cluster node, with the settings of connections to it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(crate) info: ConnectionInfo,
    password: Option<PathBuf>,
    files: Arc<CredentialFiles>,
}

impl Endpoint {
    pub(super) fn new(info: ConnectionInfo) -> Endpoint {
        Endpoint { info, password: None, files: Arc::default() }
    }

    /// Returns the same endpoint with files. `password` is the file with its password.
    pub(super) fn with(&self, password: Option<&PathBuf>, files: &Arc<CredentialFiles>) -> Endpoint {
        Endpoint { info: self.info.clone(), password: password.cloned(), files: Arc::clone(files) }
    }

    /// Returns the endpoint at `host` and `port`, with the credentials and other settings of this endpoint.
    pub(crate) fn at(&self, host: &str, port: u16) -> Endpoint {
        let mut address = self.info.addr().clone();
        if let ConnectionAddr::Tcp(of, at) | ConnectionAddr::TcpTls { host: of, port: at, .. } = &mut address {
            (*of, *at) = (host.to_owned(), port);
        }
        Endpoint { info: self.info.clone().set_addr(address), ..self.clone() }
    }

    pub(crate) fn address(&self) -> &ConnectionAddr {
        self.info.addr()
    }

    pub(super) fn is_tls(&self) -> bool {
        matches!(self.address(), ConnectionAddr::TcpTls { .. })
    }

    pub(super) fn has_password(&self) -> bool {
        self.info.redis_settings().password().is_some()
    }

    /// Returns whether [`Endpoint::read`] reads files.
    pub(super) fn has_files(&self) -> bool {
        self.is_tls() || self.password.is_some()
    }

    /// Reads the files: returns the settings with the password, and how to begin TLS.
    pub(super) fn read(&self) -> io::Result<(RedisConnectionInfo, Option<TlsConnector>)> {
        let mut settings = self.info.redis_settings().clone();
        if let Some(path) = &self.password {
            settings = settings.set_password(password(path)?);
        }
        Ok((settings, if self.is_tls() { Some(self.files.connector()?) } else { None }))
    }
}

impl CredentialFiles {
    /// Reads the certificates, and returns how to begin TLS with them.
    fn connector(&self) -> io::Result<TlsConnector> {
        let mut roots = RootCertStore::empty();
        let wrong = |error: &dyn Display| io::Error::other(format!("TLS cannot be used: {error}"));
        if let Some(path) = &self.authority {
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| at(path, &error))?;
            }
        } else {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                return Err(wrong(&"this system has no certificates of authorities; give --redis-ca"));
            }
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(&error))?
            .with_root_certificates(roots);
        let config = match &self.certificate {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates(certificate)?;
                let secret = PrivateKeyDer::from_pem_slice(&content(key)?)
                    .map_err(|_| at(key, &"there is no private key in PEM in it"))?;
                config.with_client_auth_cert(chain, secret).map_err(|error| at(certificate, &error))?
            }
        };
        Ok(TlsConnector::from(Arc::new(config)))
    }
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let bytes = content(path)?;
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(&bytes).collect::<Result<_, _>>().map_err(|error| at(path, &error))?;
    if certificates.is_empty() { Err(at(path, &"there is no certificate in PEM in it")) } else { Ok(certificates) }
}

/// Reads a password. White space around it is not a part of it.
fn password(path: &Path) -> io::Result<String> {
    let text = String::from_utf8(content(path)?).map_err(|_| at(path, &"it is not text in UTF-8"))?;
    match text.trim() {
        "" => Err(at(path, &"there is no password in it")),
        password => Ok(password.to_owned()),
    }
}

/// Reads a regular file. Refuses a pipe, so that the call never waits for its writer.
fn content(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)
        .and_then(|file| file.take(MAX_LENGTH + 1).read_to_end(&mut bytes))
        .map_err(|error| at(path, &error))?;
    if bytes.len() as u64 > MAX_LENGTH {
        return Err(at(path, &format_args!("it is longer than {MAX_LENGTH} bytes")));
    }
    Ok(bytes)
}

fn at(path: &Path, why: &dyn Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
}
