//! Resolves the address of a listener.

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use super::settings::ConfigError;

/// Resolves `text`, the value of `flag`. Refuses a name of several addresses.
pub(super) fn address(flag: &str, text: &str) -> Result<SocketAddr, ConfigError> {
    let addresses = text.to_socket_addrs().map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::InvalidInput => String::from("is not an address"),
            _ => format!("cannot be resolved ({error})"),
        };
        ConfigError(format!(
            "{flag} {text:?} {why}: write HOST:PORT, as in 127.0.0.1:7415 (port 0 chooses a free port)"
        ))
    })?;
    only_address(flag, text, &addresses.collect())
}

/// Returns the only address in `addresses`, which are all addresses of the name `text`. Refuses several addresses,
/// because only the user knows which of them is meant.
fn only_address(flag: &str, text: &str, addresses: &BTreeSet<SocketAddr>) -> Result<SocketAddr, ConfigError> {
    if let (Some(first), 1) = (addresses.first(), addresses.len()) {
        return Ok(*first);
    }
    let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    Err(ConfigError(format!(
        "{flag} {text:?} is the name of several addresses, and only one can be listened on: write {flag} {}",
        names.join(&format!(" or {flag} "))
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_several_addresses_is_refused_and_one_address_is_not() {
        let [v4, v6] = ["127.0.0.1:7415", "[::1]:7415"];
        let only = |texts: &[&str]| {
            let addresses = texts.iter().map(|text| text.parse().unwrap()).collect();
            only_address("--listen", "localhost:7415", &addresses)
        };
        assert_eq!(only(&[v4, v4]).unwrap().to_string(), v4);
        let error = only(&[v4, v6]).unwrap_err().to_string();
        assert!(error.contains("\"localhost:7415\"") && error.contains("several addresses"), "{error}");
        assert!(error.ends_with(&format!("write --listen {v4} or --listen {v6}")), "{error}");
    }
}
