//! Decides at Hello whether a connection is admitted, under which name, and with which rights. Decides again when the
//! files of tokens and names change.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::credentials::MAX_NAME_LENGTH;
use super::throttle::Throttle;
use super::tokens::{Right, Rights, Token, Tokens};
use super::watched_files::{FileContent, WatchedFiles};
use crate::core::{Reason, Refusal};
use crate::metrics::Listener;

/// The tokens that clients may present, the names of their certificates, and the connections that were admitted.
#[derive(Debug, Default)]
pub struct Access {
    /// With `None`, clients need no token.
    tokens: Option<WatchedFiles<Tokens>>,
    /// The names of client certificates that are admitted. With `None`, all names are.
    certificate_names: Option<WatchedFiles<BTreeSet<Arc<str>>>>,
    throttle: Mutex<Throttle>,
    /// The number of open connections of each name at each listener.
    connections: Mutex<BTreeMap<(Arc<str>, Listener), u64>>,
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
    /// The token that the client presented. `None` if the server requires none, and then the client has all rights.
    token: Option<Arc<Token>>,
    client: Client,
    access: Arc<Access>,
}

impl Access {
    /// Reads a file of tokens, and a file with the names of client certificates that are admitted. Without the first,
    /// clients need no token; without the second, all names are admitted.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or has a line that is wrong. The error names the flag, the file and the line.
    pub fn new(token_file: Option<PathBuf>, certificate_names: Option<PathBuf>) -> Result<Access, String> {
        Ok(Access {
            tokens: watched("--token-file", token_file, |files| Tokens::parse(&files[0]))?,
            certificate_names: watched("--tls-client-names", certificate_names, |files| parse_names(&files[0]))?,
            ..Access::default()
        })
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
    /// If the token is missing or wrong, or if the certificate has a name that is not admitted. Also if the token is
    /// easy to guess, and the address of the peer sent too many wrong tokens.
    pub(super) fn admit(self: &Arc<Self>, token: &[u8], client: &Client, now: Instant) -> Result<Grant, Refusal> {
        let unauthorized = |text| Err(Refusal::new(Reason::Unauthorized, text));
        if !self.admits_certificate(client) {
            return unauthorized("the name of this client certificate is not in the server's --tls-client-names");
        }
        let Some(tokens) = &self.tokens else { return Ok(self.grant(None, client)) };
        if token.is_empty() {
            return unauthorized("this server asks for a token: send one of its --token-file");
        }
        let throttled = match client.peer {
            Peer::Tcp(address) if client.certificate_name.is_none() => Some(address.ip()),
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
            return Ok(self.grant(Some(token), client));
        }
        if let Some(address) = throttled {
            self.throttle.lock().count(address, now);
        }
        unauthorized("the token is not in the server's --token-file")
    }

    /// Returns the names of all tokens and connections, each with the number of its open connections.
    pub fn connections(&self) -> BTreeMap<Arc<str>, u64> {
        let mut connections: BTreeMap<_, _> = self.names().into_iter().map(|name| (name, 0)).collect();
        for ((name, _), count) in &*self.connections.lock() {
            *connections.entry(Arc::clone(name)).or_default() += count;
        }
        connections
    }

    /// Reads the files again whenever their content changes, and calls `changed` then. Returns at once if there are none,
    /// and otherwise never.
    pub async fn maintain(&self, changed: impl Fn()) {
        let tokens = maintain(self.tokens.as_ref(), "token", "correct the token file, or its permissions", || {
            self.weak_tokens().iter().for_each(|warning| warn!("{warning}"));
            changed();
        });
        let remedy = "correct the file of --tls-client-names, or its permissions";
        let names = maintain(self.certificate_names.as_ref(), "list of names", remedy, &changed);
        tokio::join!(tokens, names);
    }

    /// Returns the names in the files: those of the tokens or, without tokens, those of the client certificates.
    fn names(&self) -> BTreeSet<Arc<str>> {
        match (&self.tokens, &self.certificate_names) {
            (Some(tokens), _) => tokens.current().value.names().cloned().collect(),
            (None, Some(names)) => names.current().value.clone(),
            (None, None) => BTreeSet::new(),
        }
    }

    fn admits_certificate(&self, client: &Client) -> bool {
        let (Some(names), Some(name)) = (&self.certificate_names, &client.certificate_name) else { return true };
        names.current().value.contains(name)
    }

    fn grant(self: &Arc<Self>, token: Option<&Arc<Token>>, client: &Client) -> Grant {
        let name = token.map(|token| &token.name).or(client.certificate_name.as_ref()).cloned();
        if let Some(name) = &name {
            *self.connections.lock().entry((Arc::clone(name), client.listener)).or_default() += 1;
        }
        Grant { name, token: token.cloned(), client: client.clone(), access: Arc::clone(self) }
    }
}

/// Reads a file, and makes a value of it. An error names the flag and the file.
fn watched<T: Send + Sync + 'static>(
    flag: &str,
    path: Option<PathBuf>,
    make: fn(&[FileContent]) -> io::Result<T>,
) -> Result<Option<WatchedFiles<T>>, String> {
    let watched = path.map(|path| WatchedFiles::new(&[path], make)).transpose();
    watched.map_err(|error| format!("{flag}: {error}"))
}

/// Reads a file again whenever its content changes, and calls `changed` then.
async fn maintain<T: Send + Sync + 'static>(
    file: Option<&WatchedFiles<T>>,
    what: &str,
    remedy: &str,
    changed: impl Fn(),
) {
    let Some(file) = file else { return };
    loop {
        if file.next_check(what, remedy).await {
            changed();
        }
    }
}

/// Parses a file with one name a line. Blank lines and lines that begin with `#` are ignored.
fn parse_names(file: &FileContent) -> io::Result<BTreeSet<Arc<str>>> {
    let text = str::from_utf8(&file.bytes).map_err(|error| file.error(&error))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let names: BTreeSet<Arc<str>> = lines.map(Arc::from).collect();
    if let Some(name) = names.iter().find(|name| name.chars().count() > MAX_NAME_LENGTH) {
        return Err(file
            .error(&format_args!("a name has at most {MAX_NAME_LENGTH} characters, and this has more: {name}")));
    }
    if names.is_empty() { Err(file.error(&"there is no name in it: write one a line")) } else { Ok(names) }
}

impl Grant {
    /// Checks that the connection has the right that a request needs.
    ///
    /// # Errors
    ///
    /// If the connection does not have the right.
    pub(super) fn check(&self, right: Right) -> Result<(), Refusal> {
        let rights = self.token.as_ref().map_or(Rights::ALL, |token| token.rights);
        if rights.contains(right) {
            return Ok(());
        }
        let text = format!(
            "this request needs the right {right}, and the token {} has only {rights}: use a token with this right, or add \
             the right in the server's --token-file and connect again",
            self.name.as_deref().unwrap_or_default()
        );
        Err(Refusal::new(Reason::NotPermitted, text))
    }

    /// Returns whether the files still admit the connection, with the same name and rights.
    pub(super) fn is_current(&self) -> bool {
        let has_token = match (&self.access.tokens, &self.token) {
            (Some(tokens), Some(token)) => {
                let tokens = tokens.current();
                let found = tokens.value.find(&token.secret.0);
                found.is_some_and(|found| found.name == token.name && found.rights == token.rights)
            }
            _ => true,
        };
        has_token && self.access.admits_certificate(&self.client)
    }

    /// Returns whether the connection may have its place, which leaves `free` of the `max` places of the listener. Half
    /// of the places are kept for the names in the files, the same number for each. So no name can keep out another one.
    pub(super) fn may_have_place(&self, free: usize, max: usize) -> bool {
        let Some(name) = &self.name else { return true };
        let names = self.access.names();
        let share = (max / (2 * names.len().max(1))) as u64;
        let connections = self.access.connections.lock();
        let has = |name: &Arc<str>| {
            connections.get(&(Arc::clone(name), self.client.listener)).copied().unwrap_or_default()
        };
        let others = names.iter().filter(|other| *other != name);
        let kept: u64 = others.map(|other| share.saturating_sub(has(other))).sum();
        has(name) <= share || free as u64 >= kept
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let Some(name) = self.name.take() else { return };
        let mut connections = self.access.connections.lock();
        if let Entry::Occupied(mut count) = connections.entry((name, self.client.listener)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
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
        let access = Arc::new(Access::new(Some(path.clone()), None).unwrap());
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
        let (access, now) = (Arc::new(Access::new(Some(file.path().to_owned()), None).unwrap()), Instant::now());
        let reason = |token: &[u8], peer, certificate| {
            access.admit(token, &client(peer, certificate), now).map_err(|refusal| refusal.reason)
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
        let access = Arc::new(Access::new(Some(file.path().to_owned()), None).unwrap());
        let counts = || access.connections().into_values().collect::<Vec<_>>();
        let first = access.admit(b"right", &client(PEER, None), Instant::now()).unwrap();
        let second = access.admit(b"right", &client(Peer::Unix, None), Instant::now()).unwrap();
        assert_eq!(counts(), [0, 2], "audit and node");
        drop((first, second));
        assert_eq!(counts(), [0, 0]);
    }
}
