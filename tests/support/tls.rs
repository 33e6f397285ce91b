//! A TLS client that blocks.

use std::io::Read;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::support::PATIENCE;
use crate::support::frames::Frame;

pub type Tls = StreamOwned<ClientConnection, TcpStream>;

/// Makes the handshake with a server on 127.0.0.1 whose authority is in the file `trusted`.
pub fn connect(trusted: &Path, tcp: TcpStream) -> Tls {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(trusted).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    tcp.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut stream = StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), tcp);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).unwrap();
    }
    stream
}

/// Reads the next frame and no byte more. Returns `None` at the end of the stream.
pub fn read_frame(stream: &mut Tls) -> Option<Frame> {
    let mut bytes = vec![0; 4];
    stream.read_exact(&mut bytes).ok()?;
    let length = u32::from_be_bytes(bytes[..].try_into().unwrap()) as usize;
    bytes.resize(4 + length, 0);
    stream.read_exact(&mut bytes[4..]).ok()?;
    Frame::take(&mut bytes)
}
