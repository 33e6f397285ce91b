//! The address of a server, with its parser and printer.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The address at which an ackwheel server listens: `host:port` or `unix:/path`.
///
/// ```
/// # use ackwheel::client::Address;
/// let address: Address = "127.0.0.1:7415".parse()?;
/// assert_eq!(address.to_string(), "127.0.0.1:7415");
/// # Ok::<(), ackwheel::client::AddressError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A TCP listener. The host is a name, or an IP address without brackets.
    Tcp {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// The error for text that is neither `host:port` nor `unix:/path`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not an address: {problem}; write host:port, as 127.0.0.1:7415 or [::1]:7415, or unix:/path, \
     as unix:/run/ackwheel.sock"
)]
pub struct AddressError {
    text: String,
    problem: &'static str,
}

const UNIX: &str = "unix:";

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        let wrong = |problem| AddressError { text: text.to_owned(), problem };
        match text.strip_prefix(UNIX) {
            Some("") => return Err(wrong("the path is missing")),
            Some(path) => return Ok(Address::Unix(path.into())),
            None => {}
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong("the port is missing"))?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = bracketed.unwrap_or(host);
        if host.is_empty() {
            return Err(wrong("the host is missing"));
        }
        if bracketed.is_none() && host.contains(':') {
            return Err(wrong("an IPv6 address needs brackets"));
        }
        if host.contains(|c: char| c.is_whitespace() || matches!(c, '/' | '[' | ']')) {
            return Err(wrong("the host is not a name and not an IP address"));
        }
        match port.parse() {
            Ok(port) if port > 0 => Ok(Address::Tcp { host: host.to_owned(), port }),
            _ => Err(wrong("the port is not a number from 1 to 65535")),
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address::Tcp { host: address.ip().to_string(), port: address.port() }
    }
}

/// Prints an address in the form that `Address::from_str` parses.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_as_they_print() {
        for text in ["127.0.0.1:7415", "ackwheel.local:1", "[::1]:65535", "unix:/run/a b.sock", "unix:relative"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        let socket: SocketAddr = "[fe80::1]:7415".parse().unwrap();
        assert_eq!(Address::from(socket).to_string(), "[fe80::1]:7415");
    }

    #[test]
    fn what_is_no_address_is_refused_with_what_to_write() {
        for text in
            ["", "host", ":1", "[]:1", "::1:7415", "host:", "host:0", "host:65536", "http://host:1", "unix:"]
        {
            let error = text.parse::<Address>().expect_err(text).to_string();
            assert!(error.contains("write host:port") && error.contains("unix:/"), "{error}");
        }
    }
}
