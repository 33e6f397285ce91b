//! As a service of systemd: it says when it is ready, that it is alive, and when it goes; and its unit is sound.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ackwheel::ticker::LIVENESS;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::held_thread::HeldThread;
use crate::support::process::{assert_names, program};
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve};
use crate::support::{PATIENCE, deployed, frames, wait_until};

const SIGN_OF_LIFE: &str = "WATCHDOG=1";

/// The place of a service manager: a socket, and what is told there.
struct Manager {
    name: String,
    socket: UnixDatagram,
    _folder: TempDir,
}

impl Manager {
    /// Listens on a path, as systemd does.
    fn on_a_path() -> Manager {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        Manager { name: path.to_str().unwrap().to_owned(), socket, _folder: folder }
    }

    /// Listens on a name that is in no folder.
    fn on_an_abstract_name() -> Manager {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().to_str().unwrap().to_owned();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        Manager { name: format!("@{name}"), socket: UnixDatagram::bind_addr(&address).unwrap(), _folder: folder }
    }

    /// Has a sidecar tell it how it does, and show a sign of life within `watchdog`.
    fn ask(&self, command: &mut Command, watchdog: Option<Duration>) {
        command.env("NOTIFY_SOCKET", &self.name);
        if let Some(watchdog) = watchdog {
            command.env("WATCHDOG_USEC", watchdog.as_micros().to_string());
        }
    }

    /// The next message, if one comes in time.
    fn message_within(&self, time: Duration) -> Option<String> {
        self.socket.set_read_timeout(Some(time)).unwrap();
        let mut message = [0; 4096];
        match self.socket.recv(&mut message) {
            Ok(length) => Some(String::from_utf8(message[..length].to_vec()).unwrap()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => panic!("{error}"),
        }
    }

    #[track_caller]
    fn message(&self) -> String {
        self.message_within(PATIENCE).expect("a message comes")
    }

    /// Takes what has come and was not looked at.
    fn forget(&self) {
        self.socket.set_nonblocking(true).unwrap();
        while self.socket.recv(&mut [0; 4096]).is_ok() {}
        self.socket.set_nonblocking(false).unwrap();
    }
}

/// Asserts that it announces itself to this manager once it serves, and its end.
fn assert_announced(manager: &Manager) {
    let mut command = serve(&[]);
    manager.ask(&mut command, None);
    let mut sidecar = Sidecar::spawn(&mut command);
    assert_eq!(manager.message(), "STATUS=opening the store");
    let serves = format!("READY=1\nSTATUS=listening on {}, admin on {}", sidecar.listen, sidecar.admin);
    assert_eq!(manager.message(), serves);
    sidecar.connect().ask(&frames::add(&[1], 0, 1)).added();
    sidecar.signal(Signal::TERM);
    assert_eq!(manager.message(), "STOPPING=1\nSTATUS=draining: new messages are refused");
    sidecar.end_of_drain();
    assert_eq!(manager.message_within(Duration::from_millis(1)), None, "nobody asked for signs of life");
}

#[test]
fn it_says_when_it_is_ready_and_when_it_goes() {
    assert_announced(&Manager::on_a_path());
    assert_announced(&Manager::on_an_abstract_name());
}

/// An address that nobody else of this machine takes while a sidecar starts: free ports are given out on 127.0.0.1.
fn reserved() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.7.4.15:0").unwrap();
    listener.local_addr().unwrap()
}

/// Whether there is an answer to this, at once.
fn answers(address: std::net::SocketAddr, request: &[u8]) -> bool {
    let Ok(mut stream) = TcpStream::connect(address) else { return false };
    stream.set_read_timeout(Some(Duration::from_millis(250))).unwrap();
    stream.write_all(request).is_ok() && stream.read(&mut [0; 64]).is_ok_and(|length| length > 0)
}

#[test]
fn it_is_not_ready_before_its_store_has_answered() {
    let (redis, manager) = (Redis::start(), Manager::on_a_path());
    redis.stop();
    let (listen, admin) = (reserved(), reserved());
    let mut command = program(&["serve", "--store", &redis.url()]);
    command.args(["--listen", &listen.to_string(), "--admin", &admin.to_string()]);
    manager.ask(&mut command, None);
    let hello = frames::hello((1, 1), b"").bytes(0);
    let doors = [(listen, &hello[..]), (admin, &b"GET /livez HTTP/1.1\r\nHost: sidecar\r\n\r\n"[..])];
    thread::scope(|scope| {
        let sidecar = scope.spawn(move || Sidecar::spawn(&mut command));
        assert_eq!(manager.message(), "STATUS=opening the store");
        assert_eq!(manager.message_within(Duration::from_millis(1)), None, "the store has not answered");
        redis.go_on();
        assert_names(&manager.message(), &["READY=1\n"]);
        assert!(doors.iter().all(|(door, words)| answers(*door, words)), "it answers as soon as it says so");
        let sidecar = sidecar.join().expect("it starts");
        sidecar.connect().ask(&frames::add(&[1], 0, 1)).added();
    });
}

#[test]
fn signs_of_life_come_more_often_than_they_must() {
    let (manager, watchdog) = (Manager::on_a_path(), Duration::from_secs(3));
    let mut command = serve(&[]);
    manager.ask(&mut command, Some(watchdog));
    let _sidecar = Sidecar::spawn(&mut command);
    while !manager.message().starts_with("READY=1") {}
    let mut last = Instant::now();
    for _ in 0..4 {
        assert_eq!(manager.message(), SIGN_OF_LIFE);
        assert!(last.elapsed() < watchdog / 2, "nothing was heard for {:?}", last.elapsed());
        last = Instant::now();
    }
}

#[test]
fn a_pause_that_the_wheel_outlives_is_no_reason_to_restart() {
    // The unit's times and a pause of 20 s, made shorter by the same factor; the loop stalls for longer than
    // counts as alive.
    let (manager, watchdog, pause) =
        (Manager::on_a_path(), Duration::from_secs(18), LIVENESS + Duration::from_secs(1));
    let mut command = serve(&[]);
    manager.ask(&mut command, Some(watchdog));
    let mut sidecar = Sidecar::spawn(&mut command);
    sidecar.connect().ask(&frames::add(&[1], 15, 1)).added();
    while manager.message() != SIGN_OF_LIFE {}
    let heard = sidecar.stop();
    thread::sleep(pause);
    manager.forget();
    sidecar.go_on();
    assert_eq!(manager.message(), SIGN_OF_LIFE);
    assert!(heard.elapsed() < watchdog, "nothing was heard for {:?}", heard.elapsed());
    assert_eq!(sidecar.status().rings[0].in_flight, 1, "the wheel lives on");
    sidecar.terminate();
    let log = sidecar.log().whole();
    assert_names(&log, &["this process was stalled"]);
    assert!(!log.contains("will restart this process"), "{log}");
}

#[test]
fn a_stalled_ticker_sends_no_watchdog_signal_even_if_all_else_runs() {
    let (manager, watchdog) = (Manager::on_a_path(), Duration::from_secs(1));
    let mut command = serve(&[]);
    manager.ask(&mut command, Some(watchdog));
    let mut sidecar = Sidecar::spawn(&mut command);
    while manager.message() != SIGN_OF_LIFE {}
    let Some(held) = HeldThread::hold(sidecar.id(), "ticker") else { return };
    wait_until("the probe says so", || {
        // Messages without room in the queue would come later.
        manager.forget();
        sidecar.get("/livez").0 == 503
    });
    assert_eq!(sidecar.connect().ask(&frames::ping(b"here")).body, b"here", "only the ticker is stalled");
    manager.forget();
    assert_eq!(manager.message_within(watchdog * 2), None, "a manager would have restarted it by now");
    assert!(sidecar.log().line("the service manager will restart this process").is_some());

    drop(held);
    assert_eq!(manager.message(), SIGN_OF_LIFE);
    assert_eq!(sidecar.get("/livez").0, 200);
    sidecar.signal(Signal::TERM);
    while !manager.message().starts_with("STOPPING=1") {}
    assert_eq!(sidecar.exit().code(), Some(0));
}

#[test]
fn an_unreachable_manager_is_named_and_holds_nothing_up() {
    for (name, words) in [("vsock:2:9000", "neither a path"), ("/nonexistent/notify", "No such file")] {
        let mut sidecar = Sidecar::spawn(serve(&[]).env("NOTIFY_SOCKET", name));
        let line = sidecar.log().line("service manager").expect("a person is told");
        assert_names(&line, &["WARN", "NOTIFY_SOCKET", name, words]);
        assert!(sidecar.is_ready());
        sidecar.terminate();
    }
}

#[test]
fn a_watchdog_that_is_not_understood_is_named_and_the_manager_hears_the_rest() {
    let manager = Manager::on_a_path();
    let mut command = serve(&[]);
    manager.ask(&mut command, None);
    let mut sidecar = Sidecar::spawn(command.env("WATCHDOG_USEC", "15s"));
    while !manager.message().starts_with("READY=1") {}
    let line = sidecar.log().line("WATCHDOG_USEC").expect("a person is told");
    assert_names(&line, &["WARN", "WATCHDOG_USEC=15s", "no signs of life"]);
    sidecar.signal(Signal::TERM);
    assert!(manager.message().starts_with("STOPPING=1"), "and no sign of life before");
    assert_eq!(sidecar.exit().code(), Some(0));
}

#[test]
fn a_manager_that_does_not_listen_does_not_hold_the_drain_up() {
    let manager = Manager::on_a_path();
    let mut command = serve(&[]);
    manager.ask(&mut command, None);
    let mut sidecar = Sidecar::spawn(&mut command);
    while !manager.message().starts_with("READY=1") {}
    // No room is left in its queue.
    let other = UnixDatagram::unbound().unwrap();
    other.set_nonblocking(true).unwrap();
    while other.send_to(b"STATUS=of another", &manager.name).is_ok() {}
    sidecar.terminate();
    let log = sidecar.log().whole();
    let at = |words: &str| log.find(words).unwrap_or_else(|| panic!("no {words:?} in {log}"));
    assert!(at("draining: new messages are refused") < at("does not hear of this process"), "{log}");
}

// The unit.

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/deploy")
}

/// The lines of a unit, or of a drop-in, that set something: names and values in order.
fn unit(file: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(deploy().join(file)).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with(['#', '[']) && !line.is_empty());
    let pairs = lines.map(|line| line.split_once('=').unwrap_or_else(|| panic!("{file}: {line}")));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[track_caller]
fn value<'a>(unit: &'a [(String, String)], name: &str) -> &'a str {
    let values: Vec<&str> = unit.iter().filter(|(found, _)| found == name).map(|(_, value)| &**value).collect();
    assert_eq!(values.len(), 1, "{name}: {values:?}");
    values[0]
}

#[track_caller]
fn seconds(unit: &[(String, String)], name: &str) -> Duration {
    humantime::parse_duration(value(unit, name)).unwrap()
}

/// A pause of the whole process that happens: a machine that is moved, or starved.
const LONGEST_PAUSE: Duration = Duration::from_secs(20);

#[test]
fn the_unit_waits_as_long_as_the_program_may_take() {
    let unit = unit("ackwheel.service");
    assert_eq!(value(&unit, "Type"), "notify");
    assert!(seconds(&unit, "TimeoutStopSec") > Duration::from_secs(10), "a drain may take that long");
    assert!(seconds(&unit, "TimeoutStartSec") > Duration::from_secs(10), "Redis is waited for that long");
    // A tenth of the time may have gone by since the last sign of life.
    let left = seconds(&unit, "WatchdogSec") * 9 / 10;
    assert!(left > LONGEST_PAUSE + LIVENESS, "what is paused and goes on must not be killed for it");
    assert_eq!(value(&unit, "RestartPreventExitStatus"), "64", "what is wrong stays wrong");
    let files: usize = value(&unit, "LimitNOFILE").parse().unwrap();
    assert!(files > 16_384 + 64, "the connections that are allowed by default");
}

/// A core dump would contain tokens and keys, and the configuration may contain passwords.
#[test]
fn the_unit_keeps_secrets_from_other_users() {
    let unit = unit("ackwheel.service");
    assert_eq!((value(&unit, "LimitCORE"), value(&unit, "UMask")), ("0", "0077"));
    assert_eq!(value(&unit, "StateDirectoryMode"), "0700");
    let config = value(&unit, "LoadCredential").split(':').next().unwrap();
    assert!(value(&unit, "ExecStart").ends_with(&format!(" --config %d/{config}")));
}

#[test]
fn the_unit_and_its_drop_in_name_settings_that_are_right() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ackwheel.toml");
    fs::write(&config, "slots = 15\n").unwrap();
    let unit_lines = unit("ackwheel.service");
    let command = value(&unit_lines, "ExecStart").replace("%d", folder.path().to_str().unwrap());
    let words: Vec<&str> = command.split(' ').collect();
    assert_eq!(words[0], "/usr/bin/ackwheel");
    let state = value(&unit_lines, "Environment").replace("%S", folder.path().to_str().unwrap());
    let (name, value_of_state) = state.split_once('=').unwrap();
    let mut environment = BTreeMap::from([(name.to_owned(), value_of_state.to_owned())]);
    deployed::assert_right(&words[1..], &environment);
    // With the drop-in the store may be Redis.
    let drop_in = unit("ackwheel.service.d/redis.conf");
    environment.remove(value(&drop_in, "UnsetEnvironment")).expect("it takes back what the unit sets");
    environment.insert(String::from("ACKWHEEL_STORE"), String::from("redis://user:password@redis:6379/0"));
    deployed::assert_right(&words[1..], &environment);
}

/// The service may write below two folders alone, and the example of a socket lies in one of them.
#[test]
fn the_socket_of_the_example_lies_where_the_unit_may_write() {
    let unit = unit("ackwheel.service");
    let folder = format!("/run/{}", value(&unit, "RuntimeDirectory"));
    let example = fs::read_to_string(deploy().join("../ackwheel.toml")).unwrap();
    let readme = fs::read_to_string(deploy().join("README.md")).unwrap();
    for text in [&example, &readme] {
        assert!(text.contains(&format!("socket = \"{folder}/ackwheel.sock\"")), "{folder}");
    }
    // The documents name the users that may connect, where the mode of the socket is set.
    assert_eq!((value(&unit, "UMask"), value(&unit, "RuntimeDirectoryMode")), ("0077", "0750"));
    assert!(readme.contains("  Group=im\n  UMask=0007\n"));
}

/// A drop-in like that of examples/deploy/README.md lets a group in: the socket gets its mode from the umask.
#[test]
fn a_umask_says_who_may_connect_to_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    for (umask, expected) in [("0077", 0o700), ("0007", 0o770)] {
        let socket = folder.path().join(umask);
        let mut command = Command::new("sh");
        let flags = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--socket"];
        command.args(["-c", "umask $0 && exec \"$@\"", umask, env!("CARGO_BIN_EXE_ackwheel")]).args(flags);
        command.arg(&socket).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let _sidecar = Sidecar::spawn(&mut command);
        assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, expected, "{umask}");
    }
}

/// How exposed systemd may find the service, in tenths: it was 14 with systemd 252, of 100.
const MOST_EXPOSED: &str = "20";

#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ackwheel.service");
    let text = fs::read_to_string(deploy().join("ackwheel.service")).unwrap();
    // It looks whether the program is there.
    fs::write(&path, text.replace("/usr/bin/ackwheel", env!("CARGO_BIN_EXE_ackwheel"))).unwrap();
    let drop_ins = folder.path().join("ackwheel.service.d");
    fs::create_dir(&drop_ins).unwrap();
    fs::copy(deploy().join("ackwheel.service.d/redis.conf"), drop_ins.join("redis.conf")).unwrap();
    for arguments in [
        &["verify", "--man=no", "--recursive-errors=no"][..],
        &["security", "--offline=yes", "--no-pager", "--threshold", MOST_EXPOSED],
    ] {
        let mut command = Command::new("systemd-analyze");
        let output = match command.args(arguments).arg(&path).output() {
            Ok(output) => output,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return eprintln!(
                    "there is no systemd-analyze here (Debian: apt-get install systemd): not checked"
                );
            }
            Err(error) => panic!("{error}"),
        };
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(output.status.success(), "{command:?}: {said}");
        // Of an unknown name it says so, and that all is well.
        let complaints: Vec<&str> =
            said.lines().filter(|line| line.contains(folder.path().to_str().unwrap())).collect();
        assert!(complaints.is_empty(), "{complaints:?}");
    }
}
