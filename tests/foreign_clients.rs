//! The clients of examples/clients do what docs/PROTOCOL.md promises them, each in its own language.
//!
//! All run the same scenario: 1,000 messages are added, 900 acknowledged, and exactly the other 100 come as
//! timeouts. Their output is compared with a watch in another group and with the metrics. A language that
//! this machine does not have is named on stderr and left out.

mod blocking;
mod node;

use std::env;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::thread;

use ackwheel::protocol::frame::FrameType;
use rustix::process::Signal;
use serde::Deserialize;

use crate::support::certificates::Files;
use crate::support::frame_proxy::{FrameProxy, Planned, Trouble};
use crate::support::process::{Process, Run, assert_names, lines};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::watch::{Line, Watch};
use crate::support::{PATIENCE, wait_until};

const GROUP: &str = "foreign";
const MAX_CLIENT_LINES: usize = 340;

/// The output of the scenario.
#[derive(Debug, Deserialize)]
struct Figures {
    added: u64,
    acked: u64,
    timed_out: u64,
    unexpected: u64,
    given_back: u64,
    redelivered: u64,
    drained: u64,
    outcome_unknown: u64,
}

/// The output of its other program: about 21 requests or more, a batch that it left, and the message in that batch.
#[derive(Debug, Deserialize)]
struct Manners {
    lost: u64,
    waiting: u64,
    delivery: u32,
    attempt: u8,
}

/// A language, and how its scenario is started, if this machine can.
struct Language {
    name: &'static str,
    client: &'static str,
    scenario: &'static LazyLock<Option<Vec<PathBuf>>>,
    /// The last word of how its other program is started.
    manners: &'static str,
    /// Builds the example of the README in a folder; says how it is started.
    example: fn(&str, &Path) -> Option<Vec<PathBuf>>,
}

static PYTHON: LazyLock<Option<Vec<PathBuf>>> = LazyLock::new(|| {
    let python = on_path("python3", "python3")?;
    let scenario = folder("python").join("scenario.py");
    // -B writes no bytecode beside the sources; a warning is an error.
    Some([python, "-B".into(), "-W".into(), "error".into(), scenario].into())
});

static GO: LazyLock<Option<Vec<PathBuf>>> = LazyLock::new(|| {
    let programs = output("go");
    go(&folder("go"), &["vet", "./..."])?;
    go(&folder("go"), &["build", "-o", programs.to_str().unwrap(), "./scenario", "./manners", "./logicnode"])?;
    Some([programs.join("scenario")].into())
});

static JAVA: LazyLock<Option<Vec<PathBuf>>> = LazyLock::new(|| {
    let sources = ["Ackwheel.java", "Scenario.java", "Manners.java"].map(|file| folder("java").join(file));
    java(&sources, &output("java"), "Scenario")
});

const LANGUAGES: [Language; 3] = [
    Language {
        name: "Python",
        client: "python/ackwheel.py",
        scenario: &PYTHON,
        manners: "manners.py",
        example: python_example,
    },
    Language { name: "Go", client: "go/ackwheel.go", scenario: &GO, manners: "manners", example: go_example },
    Language {
        name: "Java",
        client: "java/Ackwheel.java",
        scenario: &JAVA,
        manners: "Manners",
        example: java_example,
    },
];

fn python_example(text: &str, into: &Path) -> Option<Vec<PathBuf>> {
    fs::copy(folder("python").join("ackwheel.py"), into.join("ackwheel.py")).unwrap();
    fs::write(into.join("example.py"), text).unwrap();
    Some(
        [on_path("python3", "python3")?, "-B".into(), "-W".into(), "error".into(), into.join("example.py")].into(),
    )
}

fn go_example(text: &str, into: &Path) -> Option<Vec<PathBuf>> {
    fs::create_dir(into.join("ackwheel")).unwrap();
    fs::copy(folder("go").join("ackwheel.go"), into.join("ackwheel/ackwheel.go")).unwrap();
    fs::write(into.join("go.mod"), "module example.com/logic\n\ngo 1.19\n").unwrap();
    fs::write(into.join("main.go"), text).unwrap();
    go(into, &["vet", "./..."])?;
    go(into, &["build", "-o", "example", "."])?;
    Some([into.join("example")].into())
}

fn java_example(text: &str, into: &Path) -> Option<Vec<PathBuf>> {
    fs::write(into.join("Example.java"), text).unwrap();
    java(&[folder("java").join("Ackwheel.java"), into.join("Example.java")], into, "Example")
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/clients").join(name)
}

/// A folder for what is built: beside what Cargo builds, never among the sources.
fn output(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("foreign-clients").join(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn on_path(program: &str, package: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|folder| folder.join(program)).find(|program| program.is_file());
    if found.is_none() {
        crate::support::skipped::skip(&format!("the client that needs {program}: sudo apt-get install {package}"));
    }
    found
}

/// Compiles, with every warning an error; says how the program is started.
fn java(sources: &[PathBuf], classes: &Path, main: &str) -> Option<Vec<PathBuf>> {
    let (compiler, java) = (on_path("javac", "default-jdk-headless")?, on_path("java", "default-jre-headless")?);
    build(Command::new(compiler).args(["-Xlint:all", "-Werror", "-d"]).arg(classes).args(sources));
    Some([java, "-cp".into(), classes.into(), main.into()].into())
}

/// Runs the go tool in a folder; it may not use the network.
fn go(folder: &Path, arguments: &[&str]) -> Option<()> {
    let mut command = Command::new(on_path("go", "golang-go")?);
    command.args(arguments).current_dir(folder).env_clear();
    command.env("PATH", env::var_os("PATH").unwrap_or_default());
    command.env("GOCACHE", output("go-cache")).env("GOPATH", output("go-path"));
    let settings = [("GOPROXY", "off"), ("GOFLAGS", "-mod=mod"), ("GOTOOLCHAIN", "local"), ("CGO_ENABLED", "0")];
    build(command.envs(settings));
    Some(())
}

#[track_caller]
fn build(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}

impl Language {
    /// Runs the scenario to its end; nothing if this machine lacks the language.
    fn run(&self, address: SocketAddr, token: Option<&str>) -> Option<Run> {
        let words = self.scenario.as_ref()?;
        Some(Run::of(command(words).arg(address.to_string()).arg(GROUP).args(token)))
    }

    /// The same over TLS, where the authority in this file is trusted.
    fn run_over_tls(&self, address: &str, ca: &Path) -> Run {
        let words = self.scenario.as_ref().unwrap();
        Run::of(command(words).args([address, GROUP, ""]).arg(ca))
    }

    /// Runs the program that shows what the scenario does not, until the gate is there and it is done.
    fn show_manners(&self, address: SocketAddr, gate: &Path) -> Manners {
        let mut words = self.scenario.as_ref().unwrap().clone();
        let last = words.pop().unwrap();
        words.push(last.with_file_name(self.manners));
        let run = Run::of(command(&words).arg(address.to_string()).arg(GROUP).arg(gate));
        serde_json::from_str(run.output()).unwrap_or_else(|error| panic!("{error}: {run:?}"))
    }

    /// The figures of a run that succeeded, which must be those of the scenario.
    fn figures(&self, run: &Run) -> Figures {
        let figures: Figures =
            serde_json::from_str(run.output()).unwrap_or_else(|error| panic!("{error}: {run:?}"));
        let main = [figures.added, figures.acked, figures.timed_out, figures.unexpected];
        assert_eq!(main, [1_000, 900, 100, 0], "{}: {figures:?}", self.name);
        figures
    }
}

fn command(words: &[PathBuf]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Has every language that is there run at the same time, each against a sidecar of its own.
fn each(test: impl Fn(&Language) + Sync) {
    thread::scope(|scope| {
        for language in LANGUAGES.iter().filter(|language| language.scenario.is_some()) {
            let test = &test;
            scope.spawn(move || test(language));
        }
    });
}

/// The messages that must time out: every tenth, with ids around 2^63 and clients just below 2^64.
fn silent() -> Vec<(u64, u64)> {
    (0..1_000).filter(|i| i % 10 == 9).map(|i| ((1 << 63) - 500 + i, u64::MAX - i)).collect()
}

fn watched(watch: &Watch) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    while lines.iter().map(|line| line.ids.len()).sum::<usize>() < silent().len() {
        lines.push(watch.next());
    }
    lines
}

/// The outside view is that of the program: each of the 100 once, the 900 acknowledged once.
fn assert_seen(sidecar: &Sidecar, lines: &[Line]) {
    let mut messages: Vec<_> = lines.iter().flat_map(Line::messages).collect();
    messages.sort_unstable();
    assert_eq!(messages, silent());
    sidecar.wait_for_settled(GROUP);
    let metrics = sidecar.metrics();
    assert_eq!(metrics.count("messages_added_total"), 1_000);
    assert_eq!((metrics.acked("acked"), metrics.acked("late")), (900, 0));
    assert_eq!(metrics.count("messages_timed_out_total"), 100);
    assert_eq!(metrics.count("messages_in_flight"), 0);
}

#[test]
fn each_adds_1_000_acknowledges_900_and_receives_exactly_the_other_100() {
    each(|language| {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        fs::write(&token, "a-secret").unwrap();
        let token = token.to_str().unwrap();
        let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "30", "--token-file", token]);
        let watch = Watch::start(&sidecar, &["--group", "audit", "--token-file", token]);

        let run = language.run(sidecar.listen, Some("a-secret")).unwrap();
        let figures = language.figures(&run);
        assert_eq!((figures.given_back, figures.redelivered, figures.drained), (1, 1, 0), "{figures:?}");
        assert_eq!(figures.outcome_unknown, 0, "{figures:?}");
        assert_seen(&sidecar, &watched(&watch));
        let metrics = sidecar.metrics();
        assert_eq!((metrics.count("messages_rearmed_total"), metrics.acked("unknown")), (0, 0));
        assert_eq!(metrics.refusals("silent"), 0, "{} does not answer Pings", language.name);
    });
}

#[test]
fn each_goes_on_where_it_was_when_connections_are_cut_or_fall_silent() {
    each(|language| {
        let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "40"]);
        let watch = Watch::start(&sidecar, &["--group", "audit"]);
        let trouble = |frame_type: FrameType, nth, trouble| Planned { frame_type: frame_type as u8, nth, trouble };
        let troubles = [
            // Of the adds some are applied and answered, some applied, one swallowed, and some never sent.
            trouble(FrameType::AddNewMsg, 10, Trouble::Cut),
            // These Acks are applied, but nobody hears of it.
            trouble(FrameType::DelMsgAnswer, 3, Trouble::Cut),
            // The first batch is lost in silence, which the client must notice by itself.
            trouble(FrameType::TimeoutBatch, 1, Trouble::Silence),
            // A batch that was handled is acknowledged again.
            trouble(FrameType::BatchAck, 1, Trouble::Cut),
            // Of a frame there is half, and then no more: that is the end of a connection like any other.
            trouble(FrameType::TimeoutBatch, 1, Trouble::CutInside),
        ];
        let proxy = FrameProxy::to(sidecar.listen, &troubles);

        let run = language.run(proxy.address, None).unwrap();
        let figures = language.figures(&run);
        assert!(proxy.still_planned().is_empty(), "{}: {:?}", language.name, proxy.still_planned());
        assert!(figures.outcome_unknown >= 2 && figures.redelivered >= 1, "{}: {figures:?}", language.name);
        assert_seen(&sidecar, &watched(&watch));
    });
}

#[test]
fn each_speaks_tls_and_trusts_no_certificate_of_another_authority_or_host() {
    let (files, ca) = Files::vouched_for();
    let (_others, other_ca) = Files::vouched_for();
    each(|language| {
        let sidecar = Sidecar::start(&[&["--tick", "100ms", "--slots", "30"], &files.flags()[..]].concat());
        let address = sidecar.listen.to_string();
        language.figures(&language.run_over_tls(&address, &ca));
        let by_name = format!("localhost:{}", sidecar.listen.port());
        for (address, ca) in [(&address, &other_ca), (&by_name, &ca)] {
            let error = language.run_over_tls(address, ca).error(1).to_lowercase();
            let is_named = ["cert", "no name matching"].iter().any(|cause| error.contains(cause));
            assert!(is_named, "{}: {error}", language.name);
        }
        assert_eq!(sidecar.metrics().count("messages_added_total"), 1_000, "{}", language.name);
    });
}

/// A client that reconnects while Redis is away cannot subscribe, but its Acks are held for Redis all the same.
#[test]
fn each_passes_on_its_acks_before_it_can_subscribe_again() {
    each(|language| {
        let redis = Redis::start();
        let sidecar = Sidecar::on(&redis, "a", &["--tick", "200ms", "--slots", "40"]);
        let watch = Watch::start(&sidecar, &["--group", "audit"]);
        let cut = Planned { frame_type: FrameType::DelMsg as u8, nth: 1, trouble: Trouble::CutAndClose };
        let proxy = FrameProxy::to(sidecar.listen, &[cut]);
        thread::scope(|scope| {
            let run = scope.spawn(|| language.run(proxy.address, None).unwrap());
            wait_until("its first Ack is lost with the connection", || {
                run.is_finished() || proxy.still_planned().is_empty()
            });
            redis.stop();
            wait_until("Redis is known to be away", || run.is_finished() || !sidecar.is_ready());
            proxy.open();
            wait_until("all 900 Acks are held", || {
                run.is_finished() || sidecar.metrics().count("held_acks") == 900
            });
            assert!(!run.is_finished(), "{}: {:?}", language.name, run.join());
            redis.go_on();
            language.figures(&run.join().unwrap());
        });
        assert_seen(&sidecar, &watched(&watch));
    });
}

/// They close before they are connected, after that failed, and twice; in Java one asks under a lock that the
/// callback of its last request waits for. A client that hangs does not end in time. The batch is acknowledged once, on a
/// connection that is cut: the client itself does the rest.
#[test]
fn each_closes_at_any_time_and_a_slow_consumer_finds_one_copy_of_a_batch_and_settles_it() {
    each(|language| {
        let folder = tempfile::tempdir().unwrap();
        let gate = folder.path().join("gate");
        let sidecar = Sidecar::start(&["--tick", "100ms", "--redeliver-after", "1s"]);
        // Of one request nobody learns what became of it, and its future ends with the connection.
        let cut = |frame_type, nth| Planned { frame_type: frame_type as u8, nth, trouble: Trouble::Cut };
        let cuts = [cut(FrameType::DelMsgAnswer, 11), cut(FrameType::BatchAck, 1)];
        let proxy = FrameProxy::to(sidecar.listen, &cuts);
        let manners = thread::scope(|scope| {
            let run = scope.spawn(|| language.show_manners(proxy.address, &gate));
            wait_until("the batch is delivered a third time", || {
                run.is_finished() || sidecar.metrics().count("batches_redelivered_total") >= 2
            });
            fs::write(&gate, "").unwrap();
            run.join().unwrap()
        });
        assert!(proxy.still_planned().is_empty(), "{}: the connection was not cut", language.name);
        assert!((1..=2).contains(&manners.lost), "{}: {manners:?}", language.name);
        assert_eq!((manners.waiting, manners.attempt), (1, 200), "{}", language.name);
        // Of the third copy it may not know yet.
        assert!(manners.delivery >= 2, "{}: it kept the first copy: {manners:?}", language.name);
        sidecar.wait_for_settled(GROUP);
    });
}

#[test]
fn each_example_of_the_readme_runs_as_it_stands() {
    let readme = fs::read_to_string(folder("README.md")).unwrap();
    each(|language| {
        let fence = format!("\n```{}\n", language.name.to_lowercase());
        let (_, behind) = readme.split_once(&fence).unwrap_or_else(|| panic!("no example in {}", language.name));
        let (example, _) = behind.split_once("```\n").unwrap();
        assert!(!behind.contains(&fence), "a second example in {} is not tested", language.name);
        assert!(example.contains("7415"), "{example}");
        let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "10"]);
        let folder = tempfile::tempdir().unwrap();
        let own_port = example.replace("7415", &sidecar.listen.port().to_string());
        let words = (language.example)(&own_port, folder.path()).unwrap();
        let mut process = Process::spawn(&mut command(&words));
        let (_, line) = lines(process.stdout()).recv_timeout(PATIENCE).unwrap();
        assert_names(&line, &["102", "7", "offline"]);
        sidecar.wait_for_settled("default");
        let metrics = sidecar.metrics();
        assert_eq!(
            (metrics.acked("acked"), metrics.count("messages_timed_out_total")),
            (1, 1),
            "{}",
            language.name
        );
    });
}

#[test]
fn each_takes_batches_that_a_draining_sidecar_delivers_early() {
    each(|language| {
        let mut sidecar = Sidecar::start(&["--tick", "1s"]);
        let watch = Watch::start(&sidecar, &["--group", "audit"]);
        let address = sidecar.listen;
        thread::scope(|scope| {
            let run = scope.spawn(move || language.run(address, None).unwrap());
            wait_until("900 are acknowledged", || sidecar.metrics().acked("acked") == 900);
            sidecar.signal(Signal::TERM);
            let lines = watched(&watch);
            assert!(lines.iter().all(|line| line.drained), "{lines:?}");
            let figures = language.figures(&run.join().unwrap());
            assert!(figures.drained > 0, "{}: {figures:?}", language.name);
        });
        sidecar.end_of_drain();
    });
}

#[test]
fn each_ends_with_a_typed_error_when_it_is_refused_for_good() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "a-secret").unwrap();
    let sidecar = Sidecar::start(&["--token-file", token.to_str().unwrap()]);
    each(|language| {
        let run = language.run(sidecar.listen, Some("a guess")).unwrap();
        assert_names(&run.error(1).to_lowercase(), &["code 7", "retryable false", "token"]);
    });
    let refused = LANGUAGES.iter().filter(|language| language.scenario.is_some()).count();
    assert_eq!(sidecar.metrics().refusals("unauthorized"), refused as u64, "each asks once, and not again");
}

#[test]
fn each_client_is_one_file_of_less_than_340_lines() {
    for language in LANGUAGES {
        let text = fs::read_to_string(folder(language.client)).unwrap();
        let lines = text.lines().count();
        assert!(lines < MAX_CLIENT_LINES, "{} has {lines} lines", language.client);
        let longest = text.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(150), "{} has a line of {longest:?} characters", language.client);
    }
    assert!(!folder("go/go.sum").exists(), "the standard library is enough");
}

#[test]
fn the_go_client_is_formatted() {
    let Some(gofmt) = on_path("gofmt", "golang-go") else { return };
    let output = Command::new(gofmt).arg("-l").arg(folder("go")).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "gofmt -w these");
    assert!(output.status.success(), "{output:?}");
}
