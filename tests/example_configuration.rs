//! examples/ackwheel.toml: it holds every key once, and what it calls a default is one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use ackwheel::cli::Cli;
use ackwheel::config::Settings;
use clap::CommandFactory;
use rcgen::generate_simple_self_signed;

use crate::support::process::{Run, program};
use crate::support::settings;

const EXAMPLE: &str = include_str!("../examples/ackwheel.toml");

/// Keys without a default that a file could name, and why.
const EXAMPLES: [(&str, &str); 16] = [
    ("admin-host", "no further name is allowed"),
    ("socket", "there is no socket unless one is asked for"),
    ("resp", "there is no RESP listener unless one is asked for"),
    ("name", "it is made of the host's name and the port"),
    ("token-file", "no token is asked for"),
    ("tls-cert", "there is no TLS"),
    ("tls-key", "there is no TLS"),
    ("tls-client-ca", "no client certificate is asked for"),
    ("tls-client-names", "all names are accepted"),
    ("journal", "nothing is kept"),
    ("threads", "it depends on the number of processors"),
    ("redis-password-file", "there is no password"),
    ("sentinel-password-file", "there is no password"),
    ("redis-ca", "the system has authorities"),
    ("redis-cert", "there is no certificate"),
    ("redis-key", "there is no certificate"),
];

/// Keys with credentials for Redis. The program refuses each that the store does not need.
const CREDENTIALS: [&str; 5] =
    ["redis-password-file", "sentinel-password-file", "redis-ca", "redis-cert", "redis-key"];

/// Keys that the memory store refuses, even where they say their default.
const REDIS_ONLY: [&str; 5] = ["namespace", "lease", "outage-grace", "catch-up-max-ticks", "max-held-acks"];

/// The `# key = value` lines, with the comment above each.
fn entries() -> Vec<(String, String, String)> {
    let keys = settings::keys();
    let (mut found, mut comment) = (Vec::new(), String::new());
    for line in EXAMPLE.lines() {
        let words = line.strip_prefix("# ").unwrap_or_default();
        match words.split_once(" = ") {
            Some((key, value)) if keys.contains(key) => {
                found.push((key.to_owned(), value.to_owned(), std::mem::take(&mut comment)));
            }
            _ if words.is_empty() => comment.clear(),
            _ => comment = comment + words + "\n",
        }
    }
    found
}

/// A file with the keys that `wanted` takes, uncommented.
fn uncommented(wanted: impl Fn(&str) -> bool) -> String {
    let lines = entries().into_iter().filter(|(key, ..)| wanted(key));
    lines.flat_map(|(key, value, _)| [key, String::from(" = "), value, String::from("\n")]).collect()
}

fn is_example(key: &str) -> bool {
    EXAMPLES.iter().any(|(example, _)| *example == key)
}

/// The checked configuration of a file, as far as it shows itself; and that is all but secrets.
fn checked(text: &str) -> String {
    let settings = settings::parsed(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    format!("{:#?}", settings.check().unwrap_or_else(|error| panic!("{error}: {text}")))
}

#[test]
fn it_holds_every_key_once_each_with_its_comment_and_changes_nothing() {
    assert_eq!(format!("{:?}", settings::parsed(EXAMPLE).unwrap()), format!("{:?}", Settings::default()));
    let entries = entries();
    let keys: BTreeSet<String> = entries.iter().map(|(key, ..)| key.clone()).collect();
    assert_eq!((keys.len(), &keys), (entries.len(), &settings::keys()));
    for (key, _, comment) in &entries {
        assert!(comment.len() >= 40, "{key} is not explained: {comment:?}");
        assert_eq!(comment.contains("(An example.)"), is_example(key), "{key}: {comment}");
        assert_eq!(EXAMPLE.matches(&format!("\n# {key} = ")).count(), 1, "{key}");
    }
    assert!(EXAMPLE.lines().all(|line| line.len() <= 120));
}

#[test]
fn the_defaults_in_it_are_the_defaults() {
    let memory = uncommented(|key| !is_example(key) && !REDIS_ONLY.contains(&key));
    assert_eq!(checked(&memory), checked(""));
    let store = "store = \"redis://127.0.0.1:6379/0\"\n";
    let redis = uncommented(|key| !is_example(key) && key != "store");
    assert_eq!(checked(&(redis + store)), checked(store));
    // Each kind of error in a file is noticed: the comparison is not blind.
    for (key, value) in
        [("slots", "16"), ("storm-share", "0.25"), ("hello-timeout", "\"6s\""), ("log", "\"warn\"")]
    {
        assert_ne!(checked(&format!("{key} = {value}\n")), checked(""), "{key}");
    }
    for (key, value) in [("lease", "\"4s\""), ("max-held-acks", "5"), ("never-lead", "true")] {
        assert_ne!(checked(&format!("{store}{key} = {value}\n")), checked(store), "{key}");
    }
}

#[test]
fn the_help_names_the_same_defaults() {
    let mut cli = Cli::command();
    cli.build();
    let serve = cli.find_subcommand("serve").unwrap();
    let help: BTreeMap<&str, String> =
        serve.get_arguments().filter_map(|flag| Some((flag.get_long()?, flag.get_help()?.to_string()))).collect();
    for (key, value, _) in entries().iter().filter(|(key, ..)| !is_example(key)) {
        let default = format!(" [default: {}]", value.trim_matches('"'));
        assert!(help[key.as_str()].ends_with(&default), "{key}: {default} is not in {}", help[key.as_str()]);
    }
}

#[test]
fn every_key_uncommented_is_right_in_the_eyes_of_the_program() {
    assert!(settings::parsed(&uncommented(|_| true)).is_ok());
    let folder = tempfile::tempdir().unwrap();
    let certified = generate_simple_self_signed(vec![String::from("127.0.0.1")]).unwrap();
    let files = [
        ("token-file", "token", String::from("0123456789abcdef")),
        ("tls-cert", "tls.crt", certified.cert.pem()),
        ("tls-key", "tls.key", certified.signing_key.serialize_pem()),
        ("tls-client-ca", "clients.crt", certified.cert.pem()),
        ("tls-client-names", "clients", String::from("node-7")),
    ];
    // These five are read when they are checked; the others need not be there yet.
    let mut here = String::new();
    for (key, name, content) in &files {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let _ = writeln!(here, "{key} = {path:?}");
    }
    let others = |key: &str| !CREDENTIALS.contains(&key) && !files.iter().any(|(file, ..)| *file == key);
    let memory = uncommented(|key| others(key) && !REDIS_ONLY.contains(&key));
    let redis = uncommented(|key| others(key) && !key.starts_with("journal") && key != "store");
    let mut secured = redis.clone() + "store = \"rediss-sentinel://im@127.0.0.1?master=im&sentinel_user=im\"\n";
    for (key, name) in CREDENTIALS.iter().zip(["token", "token", "tls.crt", "tls.crt", "tls.key"]) {
        let _ = writeln!(secured, "{key} = {:?}", folder.path().join(name));
    }
    for text in [memory, redis + "store = \"redis://127.0.0.1:6379/0\"\n", secured] {
        let path = folder.path().join("ackwheel.toml");
        fs::write(&path, text + &here).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let run = Run::of(program(&["serve", "--check-config", "--config"]).arg(&path));
        assert_eq!(run.output(), "the configuration is right\n");
    }
    let run = Run::of(&mut program(&[
        "serve",
        "--check-config",
        "--config",
        concat!(env!("CARGO_MANIFEST_DIR"), "/examples/ackwheel.toml"),
    ]));
    assert_eq!(run.output(), "the configuration is right\n");
}
