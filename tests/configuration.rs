//! Settings: from where they come, and what is said of wrong ones.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::process::{Run, assert_names, program};
use crate::support::sidecar::{Sidecar, serve};

/// Asserts that `serve` with these flags is refused as usage, with words that name value and remedy; checked and
/// served alike.
fn assert_refused(flags: &[&str], words: &[&str]) {
    for mode in [&["serve", "--check-config"][..], &["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]]
    {
        let own_listen = flags.contains(&"--listen") || flags.contains(&"--admin");
        let mode = if own_listen { &mode[..1] } else { mode };
        let run = Run::of(program(mode).args(flags));
        assert_names(run.error(64), words);
    }
}

#[test]
fn a_wrong_setting_ends_with_64_and_names_value_and_remedy() {
    assert_refused(&["--slots", "0"], &["0 slots", "15 is usual"]);
    assert_refused(&["--store", "redis://127.0.0.1:1/?db=3"], &["\"db\"", "redis://USER:PASSWORD@HOST:PORT/DB"]);
    assert_refused(&["--store", "redis://127.0.0.1:1?auth=se"], &["redis://***", "a word behind the `?`"]);
    assert_refused(&["--store", "redis://me:?1secret@h:1/0"], &["redis://***"]);
    assert_refused(
        &["--log", "ackwheel:debug"],
        &["ackwheel:debug", "is no level", "info,ackwheel::server=debug"],
    );
    assert_refused(&["--slots", "3601"], &["3601", "3600"]);
    assert_refused(&["--slots", "many"], &["many", "--slots"]);
    assert_refused(&["--tick", "0s"], &["--tick"]);
    assert_refused(&["--tick", "soon"], &["soon", "--tick"]);
    assert_refused(
        &["--max-in-flight", "4M"],
        &["4M", "--max-in-flight", "a whole number is wanted, such as 1000000"],
    );
    assert_refused(&["--max-in-flight", "0"], &["--max-in-flight 0", "at least 1"]);
    assert_refused(&["--max-connections", "0"], &["--max-connections 0", "at least 1"]);
    assert_refused(&["--max-frame-length", "1000"], &["1000", "1048576"]);
    assert_refused(&["--hello-timeout", "0s"], &["--hello-timeout 0s", "above 0"]);
    assert_refused(&["--storm-share", "1.5"], &["1.5", "0 to 1"]);
    assert_refused(&["--threads", "0"], &["--threads 0", "at least 1"]);
    assert_refused(&["--drain-timeout", "10s"], &["10s", "at most 8s"]);
    assert_refused(&["--store", "postgres://here"], &["***", "memory", "redis://HOST:PORT/DB"]);
    assert_refused(&["--rings", "2"], &["--rings", "Redis", "memory"]);
    assert_refused(&["--never-lead"], &["--never-lead", "Redis", "memory"]);
    assert_refused(&["--namespace", "im"], &["--namespace", "Redis", "memory"]);
    assert_refused(&["--name", ""], &["--name", "1 to 128"]);
    for (flag, value) in
        [("--lease", "5s"), ("--outage-grace", "1s"), ("--catch-up-max-ticks", "3"), ("--max-held-acks", "9")]
    {
        assert_refused(&[flag, value], &[flag, "Redis", "memory"]);
    }
    assert_refused(&["--store", "redis://h:notaport"], &["redis://***", "redis://USER:PASSWORD@HOST:PORT/DB"]);
    let redis = ["--store", "redis://127.0.0.1:1/0"];
    for (flags, words) in [
        (["--rings", "65"], ["65", "1 to 64"]),
        (["--namespace", "a b"], ["a b", "1 to 64"]),
        (["--lease", "100ms"], ["100ms", "500ms to 60s"]),
        (["--catch-up-max-ticks", "17"], ["17", "0 to 16"]),
        (["--slots", "241"], ["241", "240"]),
        (["--journal", "folder"], ["--journal folder", "Redis keeps"]),
    ] {
        assert_refused(&[redis, flags].concat(), &words);
    }
    for (text, word) in [("a=b=c", "a=b=c"), ("warning", "warning"), ("info, verbose", "verbose"), ("", "\"\"")] {
        assert_refused(&["--log", text], &[word, "--log", "warn", "off"]);
    }
    for flag in ["--redeliver-after", "--hello-timeout", "--outbox-retention"] {
        assert_refused(&[flag, "500000000000years"], &[flag, "500000000000years", "a year"]);
    }
    assert_refused(&["--threads", "3000"], &["--threads 3000", "1024"]);
    assert_refused(&["--listen", "127.0.0.1"], &["127.0.0.1", "HOST:PORT"]);
    assert_refused(&["--token-file", "/nonexistent/token"], &["/nonexistent/token", "--token-file"]);
    assert_refused(&["--config", "/nonexistent/file"], &["/nonexistent/file"]);
}

#[test]
fn beyond_loopback_a_token_is_needed_or_a_word_that_none_is() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        assert_refused(&["--listen", address], &[address, "--token-file", "127.0.0.1", "--insecure"]);
        let insecure = check(&["--listen", address, "--insecure"]);
        assert_eq!((insecure.code, insecure.stdout.as_str()), (0, "the configuration is right\n"));
        assert_names(&insecure.stderr, &["--insecure", address, "anyone"]);
    }
    assert_refused(&["--listen", "here"], &["here", "HOST:PORT"]);
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let with_token = ["--listen", "0.0.0.0:0", "--token-file", token.to_str().unwrap()];
    let without_tls = check(&with_token);
    assert_eq!((without_tls.code, without_tls.stdout.as_str()), (0, "the configuration is right\n"));
    assert_names(&without_tls.stderr, &["--listen 0.0.0.0:0 has no TLS", "--tls-cert"]);
    fs::write(&token, " \n").unwrap();
    assert_refused(&["--token-file", token.to_str().unwrap()], &[token.to_str().unwrap(), "1 to 1024 bytes"]);

    let mut command = program(&["serve", "--insecure", "--listen", "0.0.0.0:0", "--admin", "0.0.0.0:0"]);
    let sidecar = Sidecar::spawn(&mut command);
    sidecar.log().assert_names(&["WARN", "--insecure", "anyone", "--admin 0.0.0.0:0"]);
}

#[test]
fn a_password_in_the_store_is_never_shown() {
    let run = Run::of(&mut program(&["serve", "--check-config", "--store", "nats://me:secret@here"]));
    assert_names(run.error(64), &["\"***\"", "is not a store"]);
    assert!(!run.stderr.contains("secret"), "{}", run.stderr);
    let unread = Run::of(&mut program(&["serve", "--check-config", "--store", "redis://me:secret@here:port"]));
    assert_names(unread.error(64), &["redis://***"]);
    assert!(!unread.stderr.contains("secret"), "{}", unread.stderr);
    for store in
        ["secret", "redis:secret@here", "redis://secret@here:port", "redis://:secret", "redis://me:secret"]
    {
        let wrong = Run::of(&mut program(&["serve", "--check-config", "--store", store]));
        assert_names(wrong.error(64), &["--store", "***"]);
        assert!(!wrong.stderr.contains("secret"), "{}", wrong.stderr);
    }
    let nobody_there = Run::of(&mut serve(&["--store", "redis://secret@127.0.0.1:1"]));
    assert_names(nobody_there.error(1), &["redis://***@127.0.0.1:1/0"]);
    assert!(!nobody_there.stderr.contains("secret"), "{}", nobody_there.stderr);
    let help = Run::of(program(&["serve", "--help"]).env("ACKWHEEL_STORE", "redis://:secret@here"));
    assert!(!help.output().contains("secret"));
}

/// The program in a name space where a name has other addresses; none where the system does not allow that.
fn with_hosts(hosts: &Path, arguments: &[&str]) -> Option<Run> {
    let script = "mount --bind \"$0\" /etc/hosts || exit 125; exec \"$@\"";
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "sh", "-c", script]).arg(hosts);
    command.arg(program(&[]).get_program()).args(arguments);
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run =
        command.output().ok().filter(|output| output.status.code().is_some_and(|code| ![1, 125].contains(&code)));
    if run.is_none() {
        crate::support::skipped::skip(
            "a name of several addresses: changing /etc/hosts for one process is not permitted here",
        );
    }
    run.map(|output| Run {
        code: output.status.code().expect("it was not killed"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    })
}

#[test]
fn a_name_of_several_addresses_is_refused_with_what_to_write() {
    let folder = tempfile::tempdir().unwrap();
    let hosts = folder.path().join("hosts");
    fs::write(&hosts, "127.0.0.1 localhost several\n127.0.0.2 several\n").unwrap();
    for flag in ["--listen", "--admin"] {
        let several = ["serve", "--check-config", flag, "several:7400"];
        let Some(run) = with_hosts(&hosts, &several) else { return };
        let words = [
            &format!("{flag} \"several:7400\" is the name of several addresses"),
            &format!("write {flag} 127.0.0.1:7400 or {flag} 127.0.0.2:7400"),
        ];
        assert_names(run.error(64), &words.map(String::as_str));
        let one = with_hosts(&hosts, &["serve", "--check-config", flag, "localhost:7400"]).unwrap();
        assert_eq!(one.output(), "the configuration is right\n");
    }
}

fn check(flags: &[&str]) -> Run {
    Run::of(program(&["serve", "--check-config"]).args(flags))
}

fn file_with(folder: &tempfile::TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("ackwheel.toml");
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_flag_comes_before_the_environment_before_the_file_before_the_default() {
    let folder = tempfile::tempdir().unwrap();
    let file = file_with(&folder, "slots = 5\ntick = \"2s\"\nmax-in-flight = 55\nredeliver-after = \"1m\"\n");
    let serve = || program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    let seen = |sidecar: Sidecar| {
        let status = sidecar.status();
        (status.slots, status.tick_ms, sidecar.metrics().count("max_in_flight"))
    };
    assert_eq!(seen(Sidecar::spawn(&mut serve())), (15, 1_000, 4_000_000));
    assert_eq!(seen(Sidecar::spawn(serve().arg("--config").arg(&file))), (5, 2_000, 55));
    let environment = |command: &mut std::process::Command| {
        command.env("ACKWHEEL_CONFIG", &file).env("ACKWHEEL_SLOTS", "7").env("ACKWHEEL_TICK", "500ms");
    };
    let mut command = serve();
    environment(&mut command);
    assert_eq!(seen(Sidecar::spawn(&mut command)), (7, 500, 55));
    let mut command = serve();
    environment(&mut command);
    assert_eq!(seen(Sidecar::spawn(command.args(["--slots", "9"]))), (9, 500, 55));
}

#[test]
fn a_file_with_an_unknown_key_or_a_wrong_value_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for (text, words) in [
        ("slots = 5\ntik = \"1s\"\n", &["tik", "line 2", "--help"][..]),
        ("slots = \"five\"\n", &["slots", "line 1"]),
        ("tick = \"soon\"\n", &["tick", "soon"]),
        ("tick = 1\n", &["(tick)", "such as \"15s\""]),
        ("max_in_flight = 9\n", &["max-in-flight is meant"]),
        ("journal = \"\"\n", &["--journal is empty", "leave it out"]),
        ("slots = \n", &["line 1"]),
        ("slots = 5\nstor = \"redis://:secret@h:1\"\n", &["stor", "line 2", "store"]),
        ("store = \"redis://:secret@h:1\n", &["line 1"]),
        ("slots = 0\n", &["0 slots", "15 is usual"]),
        ("listen = \"0.0.0.0:0\"\n", &["0.0.0.0:0", "--token-file"]),
    ] {
        let file = file_with(&folder, text);
        let path = file.to_str().unwrap();
        let run = check(&["--config", path]);
        assert_names(run.error(64), words);
        assert!(!run.stderr.contains("secret"), "{}", run.stderr);
        let run = Run::of(&mut program(&["serve", "--admin", "127.0.0.1:0", "--config", path]));
        assert_names(run.error(64), words);
        if text.contains("tik") || text.contains("five") {
            assert_names(&run.stderr, &[path]);
        }
    }
}

#[test]
fn a_url_in_a_wrong_place_is_not_shown() {
    const URL: &str = "redis://me:secret@host:6379/0";
    let folder = tempfile::tempdir().unwrap();
    for (key, words) in [
        ("rings", &["--rings"][..]),
        ("tick", &["--tick"]),
        ("storm-share", &["--storm-share"]),
        ("never-lead", &["--never-lead"]),
        ("log-format", &["--log-format"]),
        ("listen", &["--listen"]),
        ("admin", &["--admin"]),
        ("admin-host", &["--admin-host"]),
        ("namespace", &["--namespace"]),
        ("log", &["--log"]),
        ("token-file", &["--token-file"]),
        ("journal", &["--journal"]),
    ] {
        let flag = format!("--{key}");
        let variable = format!("ACKWHEEL_{}", key.replace('-', "_").to_uppercase());
        let file = file_with(&folder, &format!("{key} = \"{URL}\"\n"));
        let serve = || program(&["serve", "--check-config", "--store", "redis://127.0.0.1:1"]);
        let of_file = Run::of(serve().arg("--config").arg(&file));
        for run in [Run::of(serve().args([&flag, URL])), Run::of(serve().env(variable, URL))] {
            assert_names(run.error(64), words);
            assert!(!run.stderr.contains("secret"), "{}", run.stderr);
        }
        assert_names(of_file.error(64), &[key]);
        assert!(!of_file.stderr.contains("secret"), "{}", of_file.stderr);
    }
    for words in [&["serve", URL][..], &[URL], &["serve", "--redis://me:secret@host"], &["add", URL]] {
        let run = Run::of(&mut program(words));
        assert!(!run.error(64).contains("secret"), "{}", run.stderr);
    }
    let key = file_with(&folder, &format!("\"{URL}\" = 1\n"));
    assert!(!check(&["--config", key.to_str().unwrap()]).error(64).contains("secret"));
}

#[test]
fn an_error_tells_where_a_setting_stands_that_is_not_on_the_command_line() {
    const IN_ENVIRONMENT: &str = "--slots stands in the environment, as ACKWHEEL_SLOTS\n";
    for wrong in ["some", "", "0"] {
        let run = Run::of(program(&["serve", "--check-config"]).env("ACKWHEEL_SLOTS", wrong));
        assert_names(run.error(64), &["--slots", IN_ENVIRONMENT]);
    }
    let run = Run::of(program(&["add", "1"]).env("ACKWHEEL_ADDR", "here"));
    assert_names(run.error(64), &["here", "--addr stands in the environment, as ACKWHEEL_ADDR\n"]);
    let folder = tempfile::tempdir().unwrap();
    let file = file_with(&folder, "slots = 0\ntick = \"1s\"\n");
    let in_file = format!("--slots stands in {}\n--tick stands in {0}\n", file.display());
    let with_file = || {
        let mut command = program(&["serve", "--check-config"]);
        command.env("ACKWHEEL_CONFIG", &file);
        command
    };
    assert_names(Run::of(&mut with_file()).error(64), &["0 slots", &in_file]);
    assert_names(Run::of(with_file().env("ACKWHEEL_SLOTS", "0")).error(64), &["0 slots", IN_ENVIRONMENT]);
    for given in [&["--slots", "0", "--tick", "1s"][..], &["--slots=0", "--tick=1s"]] {
        let run = Run::of(with_file().args(given).env("ACKWHEEL_SLOTS", "0"));
        assert!(run.error(64).contains("0 slots") && !run.stderr.contains("stands in"), "{}", run.stderr);
    }
}

#[test]
fn checking_the_settings_serves_nothing_and_touches_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, socket) = (folder.path().join("journal"), folder.path().join("socket"));
    let flags = ["--journal", journal.to_str().unwrap(), "--socket", socket.to_str().unwrap()];
    let file = file_with(&folder, "slots = 60\ntick = \"1s\"\nlisten = \"127.0.0.1:0\"\n");
    let run = Run::of(program(&["serve", "--check-config", "--config"]).arg(&file).args(flags));
    assert_eq!(run.output(), "the configuration is right\n");
    assert!(!journal.exists() && !socket.exists());
}

#[test]
fn a_variable_that_is_nearly_a_setting_is_named_and_what_kubernetes_sets_is_not() {
    let mut command = program(&["serve", "--check-config"]);
    command.env("ACKWHEEL_TOKENFILE", "/run/token").env("ACKWHEEL_SLOTS", "10");
    command.env("ACKWHEEL_ADMIN_PORT", "7416");
    for service in ["ACKWHEEL", "ACKWHEEL_REDIS"] {
        let address = "tcp://10.0.0.1:6379";
        let says = [
            ("SERVICE_HOST", "10.0.0.1"),
            ("SERVICE_PORT", "6379"),
            ("SERVICE_PORT_DATA", "6379"),
            ("PORT", address),
            ("PORT_6379_TCP", address),
            ("PORT_6379_TCP_PROTO", "tcp"),
            ("PORT_6379_TCP_PORT", "6379"),
            ("PORT_6379_TCP_ADDR", "10.0.0.1"),
        ];
        command.envs(says.map(|(name, value)| (format!("{service}_{name}"), value)));
    }
    let run = Run::of(&mut command);
    assert_eq!((run.code, run.stdout.as_str()), (0, "the configuration is right\n"), "{run:?}");
    let [port, token] = run.stderr.lines().collect::<Vec<_>>()[..] else { panic!("{run:?}") };
    assert_names(port, &["ACKWHEEL_ADMIN_PORT", "no setting"]);
    assert_names(token, &["ACKWHEEL_TOKENFILE", "no setting", "is ACKWHEEL_TOKEN_FILE meant?"]);
}

#[test]
fn the_log_can_be_json_and_says_where_it_listens() {
    let sidecar = Sidecar::start(&[]);
    sidecar.log().assert_names(&[&format!("listen={}", sidecar.listen), &format!("admin={}", sidecar.admin)]);
    assert!(sidecar.listen.port() > 0 && sidecar.admin.port() > 0, "port 0 takes a free one");

    let mut command =
        program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-format", "json"]);
    let mut process = crate::support::process::Process::spawn(&mut command);
    let log = crate::support::process::Log::of(process.stderr());
    let line = log.line("listening").expect("it starts");
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(line["fields"]["message"], "listening");
    assert!(line["fields"]["listen"].as_str().is_some_and(|listen| listen.starts_with("127.0.0.1:")), "{line}");
}
