//! Checks the host names of requests to the admin port, against DNS rebinding: a page in a browser gives its own name
//! the address of this sidecar, and then reads the answers as its own. docs/decisions/admin-host.md has the reason for
//! each name.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{self, HeaderValue};
use axum::http::uri::Authority;
use axum::http::{StatusCode, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use rustix::system::uname;

/// Ends of names that the public DNS does not have.
const PRIVATE_ENDS: [&str; 4] = [".localhost", ".local", ".internal", ".svc"];

/// The host names that requests to the admin port may have in addition to those that no public DNS has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedHosts(Vec<String>);

impl AllowedHosts {
    /// Parses a list of names that are separated by commas, and adds the name of this host.
    ///
    /// # Errors
    ///
    /// Returns the first entry that is not a host name.
    pub fn parse(list: &str) -> Result<AllowedHosts, String> {
        let is_name = |name: &str| {
            name.len() <= 253 && name.contains(char::is_alphanumeric) && name.bytes().all(is_in_names)
        };
        let names = list.split(',').map(|name| name.trim().trim_end_matches('.').to_ascii_lowercase());
        let mut names: Vec<String> = names.filter(|name| !name.is_empty()).collect();
        if let Some(wrong) = names.iter().find(|name| !is_name(name)) {
            return Err(wrong.clone());
        }
        names.push(uname().nodename().to_string_lossy().to_ascii_lowercase());
        Ok(AllowedHosts(names))
    }

    /// Returns whether a request with this host, which may end in a port, is answered.
    fn allows(&self, host: &str) -> bool {
        if let Some((address, port)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            return address.parse::<Ipv6Addr>().is_ok() && (port.is_empty() || is_port(port));
        }
        let name =
            host.find(':').map_or(host, |colon| if is_port(&host[colon..]) { &host[..colon] } else { host });
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let is_private = !name.contains('.') || PRIVATE_ENDS.iter().any(|end| name.ends_with(end));
        let is_name = !name.is_empty() && name.bytes().all(is_in_names);
        is_name && (is_private || name.parse::<Ipv4Addr>().is_ok() || self.0.contains(&name))
    }
}

fn is_in_names(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_')
}

fn is_port(text: &str) -> bool {
    text.strip_prefix(':').is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Answers the request if its host is allowed. Gives every answer the headers that keep it out of caches and out of
/// other uses in a browser.
pub(super) async fn check(State(hosts): State<Arc<AllowedHosts>>, request: Request, next: Next) -> Response {
    let mut answer = match refusal(&hosts, &request) {
        Some(refusal) => refusal.into_response(),
        None => next.run(request).await,
    };
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

fn refusal(hosts: &AllowedHosts, request: &Request) -> Option<(StatusCode, &'static str)> {
    let named: Vec<&HeaderValue> = request.headers().get_all(header::HOST).iter().collect();
    let in_target = request.uri().authority().map(Authority::as_str);
    let hosts_of_request = match named[..] {
        [] if request.version() == Version::HTTP_10 => in_target.into_iter().collect::<Vec<_>>(),
        [host] => [host.to_str().unwrap_or_default()].into_iter().chain(in_target).collect(),
        _ => return Some((StatusCode::BAD_REQUEST, "a request names its host once, in the header Host\n")),
    };
    let is_foreign = hosts_of_request.iter().any(|host| !hosts.allows(host));
    is_foreign.then_some((
        StatusCode::MISDIRECTED_REQUEST,
        "this sidecar does not answer under this host name: use its IP address, or add the name to --admin-host\n",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_no_stranger_can_own_are_allowed() {
        let hosts = AllowedHosts::parse("Metrics.Example.com., b.example").unwrap();
        for host in [
            "127.0.0.1",
            "10.1.2.3:7416",
            "[::1]",
            "[fe80::1]:7416",
            "localhost",
            "LOCALHOST:7416",
            "a.localhost",
            "ackwheel-a:7416",
            "a.monitoring.svc",
            "a.b.svc.cluster.local:7416",
            "node.c.project.internal",
            "mac.local",
            "metrics.example.com",
            "METRICS.example.com.:80",
            "b.example:",
            "localhost.",
        ] {
            assert!(hosts.allows(host), "{host}");
        }
        for host in [
            "",
            ":7416",
            "evil.example",
            "evil.example:7416",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evil.example.com",
            "a.metrics.example.com",
            "[::1",
            "[evil.example]",
            "[::1].evil.example",
            "[::1]x",
            "evil.example:7416:1",
            "a@b",
            "a b",
            "evil.example:x",
            "127.0.0.1:x",
            "xlocal.example",
            ".",
        ] {
            assert!(!hosts.allows(host), "{host}");
        }
    }

    #[test]
    fn a_wrong_name_in_the_list_is_found() {
        for (list, wrong) in
            [("a.example,b:7416", "b:7416"), ("https://a.example", "https://a.example"), ("*", "*")]
        {
            assert_eq!(AllowedHosts::parse(list), Err(String::from(wrong)));
        }
        assert_eq!(AllowedHosts::parse("").unwrap().0.len(), 1, "the name of this host");
    }
}
