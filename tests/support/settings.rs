//! The settings as their type knows them.

use std::collections::BTreeSet;
use std::fs;

use ackwheel::config::Settings;

/// The settings of a file with this text.
pub fn parsed(text: &str) -> Result<Settings, String> {
    let file = tempfile::NamedTempFile::new().expect("a file can be made");
    fs::write(file.path(), text).expect("a file can be written");
    Settings::from_file(file.path()).map_err(|error| error.to_string())
}

/// Every key of the configuration file, as the error for an unknown key lists them.
pub fn keys() -> BTreeSet<String> {
    let error = parsed("no-such-key = 1\n").expect_err("there is no such key");
    let (_, list) = error.split_once("expected one of ").unwrap_or_else(|| panic!("no list: {error}"));
    let keys: BTreeSet<String> = list
        .lines()
        .next()
        .into_iter()
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .map(String::from)
        .collect();
    assert!(keys.len() > 30 && keys.contains("listen") && keys.contains("log-format"), "{keys:?}");
    keys
}
