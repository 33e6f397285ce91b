//! The admin endpoints, asked in plain HTTP/1.1.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::PATIENCE;

/// GETs a path; returns the status and the body.
pub fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let (status, _, body) = ask(address, "GET", path);
    (status, body)
}

/// Asks for a path; returns the status, the headers with names in small letters, and the body.
pub fn ask(address: SocketAddr, method: &str, path: &str) -> (u16, BTreeMap<String, String>, String) {
    let mut stream = TcpStream::connect(address).expect("the admin listener accepts");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout above 0 is possible");
    let request = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("the admin listener reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the admin listener answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head ends with an empty line");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let headers = head.lines().skip(1).filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
    (status.expect("a head begins with the version and the status"), headers, body.to_owned())
}

/// One scrape of the metrics: `name` or `name{label="value"}` and its value.
#[derive(Debug)]
pub struct Metrics {
    values: BTreeMap<String, f64>,
}

impl Metrics {
    pub fn parse(text: &str) -> Metrics {
        let values = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line}"));
            (name.to_owned(), value.parse().unwrap_or_else(|error| panic!("{line}: {error}")))
        });
        Metrics { values: values.collect() }
    }

    /// The value of a series, given without the prefix of all names.
    #[track_caller]
    pub fn value(&self, series: &str) -> f64 {
        let name = format!("ackwheel_{series}");
        self.find(&name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// The value of a counter or gauge of whole numbers.
    #[track_caller]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be a whole number")]
    pub fn count(&self, series: &str) -> u64 {
        let value = self.value(series);
        assert!(value >= 0.0 && value.fract() == 0.0, "{series} is {value}");
        value as u64
    }

    /// The connections of clients over all listeners.
    pub fn connections(&self) -> u64 {
        ["listen", "socket", "resp"]
            .iter()
            .map(|name| self.count(&format!("connections{{listener=\"{name}\"}}")))
            .sum()
    }

    pub fn refusals(&self, reason: &str) -> u64 {
        self.count(&format!("refusals_total{{reason=\"{reason}\"}}"))
    }

    pub fn acked(&self, outcome: &str) -> u64 {
        self.count(&format!("messages_acked_total{{outcome=\"{outcome}\"}}"))
    }

    /// The sum of a metric over its labels, if it has any.
    #[track_caller]
    pub fn sum(&self, metric: &str) -> f64 {
        let (name, labelled) = (format!("ackwheel_{metric}"), format!("ackwheel_{metric}{{"));
        let belongs = |series: &&String| **series == name || series.starts_with(&labelled);
        let values: Vec<f64> =
            self.values.iter().filter(|(series, _)| belongs(series)).map(|(_, value)| *value).collect();
        assert!(!values.is_empty(), "there is no {name}");
        values.into_iter().sum()
    }

    pub fn find(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }
}
