//! Certificates of servers, and who vouches for them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use tempfile::TempDir;

/// The first days of years, in seconds since 1970 (`date -ud 2500-01-01 +%s`).
pub const YEAR_1999: u64 = 915_148_800;
pub const YEAR_2000: u64 = 946_684_800;
pub const YEAR_2500: u64 = 16_725_225_600;
pub const YEAR_3000: u64 = 32_503_680_000;

/// The certificate authority of the servers.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Unlike that of a server, or OpenSSL takes this for one that vouches for itself.
        params.distinguished_name.push(DnType::CommonName, "authority of a test");
        Authority { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    /// Writes the certificate to trust.
    fn write(&self, path: &Path) -> PathBuf {
        fs::write(path, self.issuer.pem()).unwrap();
        path.to_owned()
    }

    /// Writes a server's certificate and key, `age` seconds newer than whatever stood there.
    pub fn certify(&self, files: &Files, age: u64) {
        self.certify_for(files, age, (YEAR_2000, YEAR_3000));
    }

    /// Writes the certificate and the key of a client of this name, valid from one time to another, in seconds since 1970.
    pub fn certify_client(&self, files: &Files, name: &str, years: (u64, u64)) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        self.sign(params, files, years);
    }

    /// The same as `certify`, valid from one time to another, in seconds since 1970.
    pub fn certify_for(&self, files: &Files, age: u64, years: (u64, u64)) {
        self.sign(CertificateParams::new(vec![String::from("127.0.0.1")]).unwrap(), files, years);
        for path in [&files.certificate, &files.key] {
            let later = SystemTime::now() + Duration::from_secs(age);
            fs::File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
        }
    }

    fn sign(&self, mut params: CertificateParams, files: &Files, (from, to): (u64, u64)) {
        let key = KeyPair::generate().unwrap();
        let at = |seconds| date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
        (params.not_before, params.not_after) = (at(from), at(to));
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(&files.certificate, certificate.pem()).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        fs::set_permissions(&files.key, fs::Permissions::from_mode(0o600)).unwrap();
    }
}

/// Where a server's certificate and key are.
pub struct Files {
    folder: TempDir,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Files {
    pub fn new() -> Files {
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        Files { folder, certificate, key }
    }

    /// With a certificate and a key in them, and the certificate to trust.
    pub fn vouched_for() -> (Files, PathBuf) {
        let (files, authority) = (Files::new(), Authority::new());
        authority.certify(&files, 0);
        let trusted = files.authority("ca.pem", &authority);
        (files, trusted)
    }

    /// The flags of a sidecar that has them.
    pub fn flags(&self) -> [&str; 4] {
        ["--tls-cert", self.certificate.to_str().unwrap(), "--tls-key", self.key.to_str().unwrap()]
    }

    /// Writes the certificate to trust beside them.
    pub fn authority(&self, name: &str, authority: &Authority) -> PathBuf {
        authority.write(&self.folder.path().join(name))
    }
}
