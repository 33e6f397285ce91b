//! Decides at Hello whether a connection is admitted, under which name, and with which rights.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::throttle::Throttle;
use super::tokens::{Right, Rights, Tokens};
use super::watched_files::WatchedFiles;
use crate::core::{Reason, Refusal};
use crate::metrics::Listener;

/// The number of open connections of each name.
type Connections = Arc<Mutex<BTreeMap<Arc<str>, u64>>>;

/// The tokens that clients may present, and the connections that were admitted.
#[derive(Debug, Default)]
pub struct Access {
    /// With `None`, clients need no token.
    tokens: Option<WatchedFiles<Tokens>>,
    throttle: Mutex<Throttle>,
    connections: Connections,
}

/// The peer of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Unix,
    Tcp(SocketAddr),
}

/// The properties of a client that are known before its Hello.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) peer: Peer,
    pub(super) listener: Listener,
    /// The name in the client certificate, if the client has one that was verified.
    pub(super) certificate_name: Option<Arc<str>>,
}

/// The name and the rights of an admitted connection. While it exists, it counts as a connection of its name.
#[derive(Debug)]
pub(super) struct Grant {
    /// The name of the token or, without tokens, of the client certificate. `None` if the server requires neither.
    pub(super) name: Option<Arc<str>>,
    rights: Rights,
    connections: Connections,
}

impl Access {
    /// Reads a file of tokens. With `None`, clients need no token.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or has a line that is wrong. The error names the file and the line.
    pub fn new(token_file: Option<PathBuf>) -> io::Result<Access> {
        let read = |path| WatchedFiles::new(&[path], |files| Tokens::parse(&files[0]));
        Ok(Access { tokens: token_file.map(read).transpose()?, ..Access::default() })
    }

    /// Returns whether clients need a token.
    pub fn requires_token(&self) -> bool {
        self.tokens.is_some()
    }

    /// Returns a warning for each token that is easy to guess.
    pub fn weak_tokens(&self) -> Vec<String> {
        self.tokens.iter().flat_map(|tokens| tokens.current().value.weak().collect::<Vec<_>>()).collect()
    }

    /// Admits a connection that presents `token`.
    ///
    /// # Errors
    ///
    /// If the token is missing or wrong. Also if the token is easy to guess, and the address of the peer sent too many
    /// wrong tokens.
    pub(super) fn admit(&self, token: &[u8], client: &Client, now: Instant) -> Result<Grant, Refusal> {
        let Client { peer, certificate_name, .. } = client;
        let Some(tokens) = &self.tokens else {
            return Ok(self.grant(certificate_name.clone(), Rights::ALL));
        };
        if token.is_empty() {
            return Err(Refusal::new(
                Reason::Unauthorized,
                "this server asks for a token: send one of its --token-file",
            ));
        }
        let throttled = match peer {
            Peer::Tcp(address) if certificate_name.is_none() => Some(address.ip()),
            _ => None,
        };
        let tokens = tokens.current();
        let found = tokens.value.find(token);
        // A strong token cannot be guessed. So wrong tokens of other clients at the same address cannot lock it out.
        if found.is_none_or(|token| token.is_weak)
            && let Some(wait) = throttled.and_then(|address| self.throttle.lock().wait(address, now))
        {
            return Err(too_many_attempts(wait));
        }
        if let Some(token) = found {
            return Ok(self.grant(Some(Arc::clone(&token.name)), token.rights));
        }
        if let Some(address) = throttled {
            self.throttle.lock().count(address, now);
        }
        Err(Refusal::new(Reason::Unauthorized, "the token is not in the server's --token-file"))
    }

    /// Returns the names of all tokens and connections, each with the number of its open connections.
    pub fn connections(&self) -> BTreeMap<Arc<str>, u64> {
        let mut connections = self.connections.lock().clone();
        if let Some(tokens) = &self.tokens {
            for name in tokens.current().value.names() {
                connections.entry(Arc::clone(name)).or_default();
            }
        }
        connections
    }

    /// Reads the file again whenever its content changes. Returns at once if there is none, and otherwise never.
    pub async fn maintain(&self) -> Option<Infallible> {
        let tokens = self.tokens.as_ref()?;
        loop {
            if tokens.next_check("token", "correct the token file, or its permissions").await {
                self.weak_tokens().iter().for_each(|warning| warn!("{warning}"));
            }
        }
    }

    fn grant(&self, name: Option<Arc<str>>, rights: Rights) -> Grant {
        if let Some(name) = &name {
            *self.connections.lock().entry(Arc::clone(name)).or_default() += 1;
        }
        Grant { name, rights, connections: Arc::clone(&self.connections) }
    }
}

impl Grant {
    /// Checks that the connection has the right that a request needs.
    ///
    /// # Errors
    ///
    /// If the connection does not have the right.
    pub(super) fn check(&self, right: Right) -> Result<(), Refusal> {
        if self.rights.contains(right) {
            return Ok(());
        }
        let text = format!(
            "this request needs the right {right}, and the token {} has only {}: use a token with this right, or add the \
             right in the server's --token-file and connect again",
            self.name.as_deref().unwrap_or_default(),
            self.rights
        );
        Err(Refusal::new(Reason::NotPermitted, text))
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let Some(name) = &self.name else { return };
        let mut connections = self.connections.lock();
        if let Some(count) = connections.get_mut(name) {
            *count -= 1;
            if *count == 0 {
                connections.remove(name);
            }
        }
    }
}

fn too_many_attempts(wait: Duration) -> Refusal {
    let text = format!(
        "this address sent too many wrong tokens: send the right token in {} ms or later",
        wait.as_millis().max(1)
    );
    Refusal::new(Reason::TooManyAttempts, text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    const PEER: Peer = Peer::Tcp(SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 7));

    fn client(peer: Peer, certificate_name: Option<&str>) -> Client {
        let listener = if peer == Peer::Unix { Listener::Socket } else { Listener::Listen };
        Client { peer, listener, certificate_name: certificate_name.map(Arc::from) }
    }

    #[tokio::test]
    async fn a_changed_file_changes_the_tokens_and_a_broken_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "first\n").unwrap();
        let access = Access::new(Some(path.clone())).unwrap();
        let admits =
            |token: &str| access.admit(token.as_bytes(), &client(Peer::Unix, None), Instant::now()).is_ok();
        assert!(admits("first") && !admits("second") && !admits(""));
        let check = || access.tokens.as_ref().unwrap().check();
        fs::write(&path, "first\nsecond").unwrap();
        assert!(check().await.unwrap());
        assert!(admits("second") && admits("first"));
        fs::write(&path, "").unwrap();
        assert!(check().await.is_err());
        assert!(admits("second"), "an empty file does not change the tokens");
    }

    #[test]
    fn wrong_tokens_are_throttled_except_over_a_unix_socket_and_with_a_certificate() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "right\nstrong:0123456789abcdefghij").unwrap();
        let (access, now) = (Access::new(Some(file.path().to_owned())).unwrap(), Instant::now());
        let reason = |token: &[u8], peer, certificate| {
            access.admit(token, &client(peer, certificate), now).map_err(|e| e.reason)
        };
        for _ in 0..200 {
            assert_eq!(reason(b"", PEER, None).unwrap_err(), Reason::Unauthorized);
            assert_eq!(reason(b"wrong", Peer::Unix, None).unwrap_err(), Reason::Unauthorized);
            assert_eq!(reason(b"wrong", PEER, Some("node")).unwrap_err(), Reason::Unauthorized);
        }
        let refused: Vec<Reason> = (0..200).map(|_| reason(b"wrong", PEER, None).unwrap_err()).collect();
        assert_eq!(refused.iter().filter(|reason| **reason == Reason::Unauthorized).count(), 100);
        assert_eq!(reason(b"right", PEER, None).unwrap_err(), Reason::TooManyAttempts, "it is easy to guess");
        assert!(reason(b"0123456789abcdefghij", PEER, None).is_ok(), "others cannot lock out a strong token");
        assert!(reason(b"right", PEER, Some("node")).is_ok() && reason(b"right", Peer::Unix, None).is_ok());
    }

    #[test]
    fn connections_are_counted_by_name_until_they_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "node:right\naudit:other").unwrap();
        let access = Access::new(Some(file.path().to_owned())).unwrap();
        let counts = || access.connections().into_values().collect::<Vec<_>>();
        let first = access.admit(b"right", &client(PEER, None), Instant::now()).unwrap();
        let second = access.admit(b"right", &client(PEER, None), Instant::now()).unwrap();
        assert_eq!(counts(), [0, 2], "audit and node");
        drop((first, second));
        assert_eq!(counts(), [0, 0]);
    }
}
