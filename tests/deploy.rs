//! The files of examples/deploy are right as far as this machine can tell: they parse, the files that they name exist,
//! and their settings are settings of ackwheel. No image is built here, and nothing is sent to a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::support::deployed;
use crate::support::process::{Run, program};
use crate::support::sidecar::Sidecar;

/// The longest that the program takes from SIGTERM to its end, in seconds.
const DRAIN: u64 = 10;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn manifest() -> toml::Table {
    read("Cargo.toml").parse().unwrap()
}

/// Files and folders at these paths, from the root of the repository; a name may have a star.
fn glob(pattern: &str) -> Vec<PathBuf> {
    let path = root().join(pattern);
    let (folder, name) = (path.parent().unwrap(), path.file_name().unwrap().to_str().unwrap().to_owned());
    let Some((before, after)) = name.split_once('*') else {
        return path.exists().then_some(path).into_iter().collect();
    };
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{pattern}: {error}"));
    let fits = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with(before) && name.ends_with(after)
    };
    entries.map(|entry| entry.unwrap().path()).filter(fits).collect()
}

// The image.

/// The instructions of the Dockerfile, continued lines as one.
fn instructions() -> Vec<(String, String)> {
    let text = read("examples/deploy/Dockerfile").replace("\\\n", " ");
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let pairs = lines.map(|line| line.split_once(' ').unwrap());
    pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            copy(&path, &to.join(path.file_name().unwrap()));
        }
    } else {
        fs::copy(from, to).unwrap();
    }
}

#[test]
fn the_files_that_the_image_is_built_of_exist_and_suffice() {
    let ignored = read("examples/deploy/Dockerfile.dockerignore");
    let rules: Vec<&str> = ignored.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(rules[0], "*", "only what is named after it is sent");
    let is_sent = |name: &str| {
        let fits = |rule: &str| rule == name || rule.strip_suffix('*').is_some_and(|rule| name.starts_with(rule));
        rules.iter().filter_map(|rule| rule.strip_prefix('!')).any(fits)
    };
    let context = tempfile::tempdir().unwrap();
    for (_, copied) in instructions().iter().filter(|(name, _)| name == "COPY") {
        let words: Vec<&str> = copied.split(' ').collect();
        if words[0].starts_with("--from=") {
            continue;
        }
        for name in &words[..words.len() - 1] {
            assert!(root().join(name).exists() && is_sent(name), "{name} is not there, or not sent");
            copy(&root().join(name), &context.path().join(name));
        }
    }
    for rule in rules.iter().filter(|rule| !rule.starts_with(['!', '*'])) {
        fs::remove_dir_all(context.path().join(rule)).unwrap();
    }
    // Cargo takes no manifest whose targets are not there.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--no-deps", "--offline"]).current_dir(context.path());
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_image_is_built_with_the_oldest_compiler_and_runs_the_program_itself() {
    let instructions = instructions();
    let values = |name: &str| -> Vec<&str> {
        instructions.iter().filter(|(found, _)| found == name).map(|(_, value)| &**value).collect()
    };
    let [build, run] = values("FROM")[..] else { panic!("two stages") };
    let oldest = manifest()["package"]["rust-version"].as_str().unwrap().to_owned();
    assert!(build.starts_with(&format!("rust:{oldest}-")), "{build} is not Rust {oldest}");
    assert!(run.ends_with(":nonroot"), "{run}");
    let built = values("RUN").concat();
    assert!(built.contains("cargo build --locked --release --bin ackwheel"), "{built}");

    // The form with brackets: no shell stands between the program and the signals.
    let words = |name| -> Vec<String> { serde_json::from_str(values(name)[0]).unwrap() };
    let program_path = &words("ENTRYPOINT")[0];
    assert!(values("COPY").iter().any(|copied| copied.ends_with(program_path)), "{program_path} is not copied");
    let command = words("CMD");
    deployed::assert_right(&command.iter().map(String::as_str).collect::<Vec<_>>(), &BTreeMap::new());
    assert_eq!(values("STOPSIGNAL"), ["SIGTERM"]);
    assert!(values("USER")[0].split(':').all(|id| id.parse::<u32>().is_ok_and(|id| id > 0)), "a number, not 0");
    let sidecar = read("src/config/settings.rs");
    for port in values("EXPOSE")[0].split(' ') {
        assert!(sidecar.contains(&format!("\"127.0.0.1:{port}\"")), "{port} is no default port");
    }
}

// Compose.

fn compose() -> Value {
    serde_saphyr::from_str(&read("examples/deploy/compose.yaml")).unwrap()
}

/// The services that run the program.
fn sidecars(compose: &Value) -> Vec<(&String, &Value)> {
    let services = compose["services"].as_object().unwrap().iter();
    services.filter(|(_, service)| service["image"] == "ackwheel").collect()
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array()
        .unwrap_or_else(|| panic!("no list: {list}"))
        .iter()
        .map(|item| item.as_str().unwrap())
        .collect()
}

#[test]
fn two_sidecars_of_compose_share_a_redis_that_forgets_nothing() {
    let compose = compose();
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "secret").unwrap();
    let mut names = BTreeSet::new();
    for (name, service) in sidecars(&compose) {
        assert!(service["depends_on"]["redis"]["condition"] == "service_healthy", "{name}");
        let grace = humantime::parse_duration(service["stop_grace_period"].as_str().unwrap()).unwrap();
        assert!(grace.as_secs() > DRAIN, "{name} is killed in its drain");
        assert_eq!((&service["read_only"], strings(&service["cap_drop"])), (&Value::Bool(true), vec!["ALL"]));
        let mut environment: BTreeMap<String, String> =
            serde_json::from_value(service["environment"].clone()).unwrap();
        assert_eq!(environment["ACKWHEEL_STORE"], "redis://redis:6379/");
        assert!(names.insert(environment["ACKWHEEL_NAME"].clone()), "{name} has the name of another");
        let secret = strings(&service["secrets"])[0];
        assert_eq!(environment["ACKWHEEL_TOKEN_FILE"], format!("/run/secrets/{secret}"));
        assert!(compose["secrets"][secret]["file"].is_string());
        environment.insert(String::from("ACKWHEEL_TOKEN_FILE"), token.to_str().unwrap().to_owned());
        deployed::assert_right(&["serve"], &environment);
    }
    assert_eq!(names.len(), 2);
    let builds: Vec<bool> = sidecars(&compose).iter().map(|(_, service)| service["build"].is_object()).collect();
    assert_eq!(builds, [true, false], "builds of one tag at the same time are in each other's way");
    assert_eq!(sidecars(&compose)[1].1["pull_policy"], "never", "no registry has the image");
    let command = strings(&compose["services"]["redis"]["command"]).join(" ");
    for setting in ["--appendonly yes", "--maxmemory-policy noeviction"] {
        assert!(command.contains(setting), "{command}");
    }
}

#[test]
fn files_that_compose_mounts_exist() {
    let compose = compose();
    let deploy = root().join("examples/deploy");
    let volumes = compose["volumes"].as_object().unwrap();
    for (name, service) in compose["services"].as_object().unwrap() {
        for mount in service["volumes"].as_array().into_iter().flatten() {
            let source = mount.as_str().unwrap().split(':').next().unwrap();
            let there =
                if source.starts_with('.') { deploy.join(source).exists() } else { volumes.contains_key(source) };
            assert!(there, "{name}: {source}");
        }
        if let Some(context) = service["build"]["context"].as_str() {
            let dockerfile = service["build"]["dockerfile"].as_str().unwrap();
            assert!(deploy.join(context).join(dockerfile).exists());
        }
    }
    // The targets of Prometheus are mounted over those that its configuration reads.
    let read_there = read("grafana/prometheus/prometheus.yml");
    assert!(
        read_there.contains("targets/*.yaml") && root().join("grafana/prometheus/targets/ackwheel.yaml").exists()
    );
    let groups: Value = serde_saphyr::from_str(&read("examples/deploy/prometheus-targets.yaml")).unwrap();
    let targets: BTreeSet<&str> =
        groups.as_array().unwrap().iter().flat_map(|group| strings(&group["targets"])).collect();
    let admin = |(name, service): (&String, &Value)| {
        let address: SocketAddr = service["environment"]["ACKWHEEL_ADMIN"].as_str().unwrap().parse().unwrap();
        format!("{name}:{}", address.port())
    };
    let expected: Vec<String> = sidecars(&compose).into_iter().map(admin).collect();
    assert_eq!(targets, expected.iter().map(String::as_str).collect());
}

#[test]
fn the_health_check_of_compose_distinguishes_a_serving_sidecar() {
    let compose = compose();
    let sidecar = Sidecar::start(&[]);
    for (_, service) in sidecars(&compose) {
        let test = strings(&service["healthcheck"]["test"]);
        assert_eq!(test[..2], ["CMD", "/usr/local/bin/ackwheel"]);
        let run = |address: &str| {
            let words: Vec<&str> =
                test[2..].iter().map(|word| if *word == "127.0.0.1:7416" { address } else { word }).collect();
            assert!(words.contains(&address), "{words:?}");
            Run::of(&mut program(&words)).code
        };
        assert_eq!(run(&sidecar.admin.to_string()), 0);
        assert_eq!(run("127.0.0.1:1"), 1);
    }
}

// Rules of Prometheus.

/// The command of the README that makes the rules of Prometheus into what its operator takes.
#[test]
fn the_rules_of_prometheus_are_those_of_its_operator() {
    let readme = read("examples/deploy/README.md");
    let (_, command) = readme.split_once("$ for rules in").expect("a command");
    let (command, _) = command.split_once(" | kubectl apply --filename -").expect("what takes its output");
    let output = Command::new("sh").arg("-c").arg(format!("for rules in{command}")).current_dir(root()).output();
    let output = String::from_utf8(output.unwrap().stdout).unwrap();
    let documents: Vec<Option<Value>> = serde_saphyr::from_multiple(&output).unwrap();
    let documents: Vec<Value> = documents.into_iter().flatten().collect();
    assert_eq!(documents.len(), 2);
    for (document, file) in documents.iter().zip(["rules", "alerts"]) {
        assert_eq!(document["kind"], "PrometheusRule");
        assert_eq!(document["metadata"]["name"], format!("ackwheel-{file}"));
        let mut rules: Value = serde_saphyr::from_str(&read(&format!("grafana/prometheus/{file}.yml"))).unwrap();
        for group in rules["groups"].as_array_mut().unwrap() {
            group["interval"] = Value::from("5s");
        }
        assert_eq!(document["spec"], rules, "{output}");
    }
}

// The package.

#[test]
fn files_of_the_package_exist_or_are_made_by_the_documented_commands() {
    let manifest = manifest();
    let package = &manifest["package"]["metadata"]["deb"];
    let list = |value: &toml::Value| -> Vec<String> { value.clone().try_into().unwrap() };
    let readme = read("examples/deploy/README.md");
    let mut installed = BTreeSet::new();
    for asset in package["assets"].as_array().unwrap() {
        let [source, destination, mode] = &list(asset)[..] else { panic!("{asset}") };
        match source.strip_prefix("target/") {
            Some("release/ackwheel") => assert_eq!(mode, "755"),
            Some(_) => assert!(readme.contains(source.trim_end_matches("/*")), "nobody makes {source}"),
            // The configuration may contain passwords: the unit's LoadCredential reads it as root.
            None => {
                let expected = if destination.starts_with("etc/") { "600" } else { "644" };
                assert_eq!((glob(source).is_empty(), &**mode), (false, expected), "{source}");
            }
        }
        let name = if destination.ends_with('/') { source.rsplit('/').next().unwrap() } else { "" };
        installed.insert(format!("/{destination}{name}"));
    }
    let unit = read("examples/deploy/ackwheel.service");
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let credential = unit.lines().find_map(|line| line.strip_prefix("LoadCredential=")).unwrap();
    let (name, config) = credential.split_once(':').unwrap();
    assert_eq!(command, format!("/usr/bin/ackwheel serve --config %d/{name}"));
    for path in ["/usr/bin/ackwheel", config] {
        assert!(installed.contains(path), "{path}");
    }
    // Files that an operator has edited stay when the package is upgraded.
    let edited: Vec<&String> = installed.iter().filter(|path| path.starts_with("/etc/")).collect();
    assert_eq!(edited, list(&package["conf-files"]).iter().collect::<Vec<_>>());
}

#[test]
fn every_file_to_deploy_is_explained() {
    let readme = read("examples/deploy/README.md");
    for file in glob("examples/deploy/*").into_iter().filter(|file| !file.ends_with("README.md")) {
        let name = file.file_name().unwrap().to_str().unwrap();
        // A file that a person made there by hand, as the token for compose, need not be documented.
        let is_ours =
            read("examples/deploy/.gitignore").lines().all(|ignored| ignored.trim_start_matches('/') != name);
        assert!(!is_ours || name == ".gitignore" || readme.contains(name), "{name}");
    }
}
