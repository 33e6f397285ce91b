//! docs/RESP.md: its examples are replies of a sidecar, the same in RESP2 and RESP3, and its programs run.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::PATIENCE;
use crate::support::process::{Process, lines};
use crate::support::resp::{Reply, Resp, line, start};
use crate::support::sidecar::Sidecar;
use crate::support::skipped::skip;

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn page() -> String {
    fs::read_to_string(root("docs/RESP.md")).unwrap()
}

/// The fenced blocks of a language.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    page.split(&*fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// A connection, and the batch ids of the page with those that it got.
struct Reader {
    client: Resp,
    batches: HashMap<String, String>,
}

impl Reader {
    fn new(sidecar: &Sidecar, version: u8) -> Reader {
        let mut client = Resp::to(sidecar);
        client.ask(&format!("HELLO {version}"));
        Reader { client, batches: HashMap::new() }
    }

    /// Runs a command of the page, and compares its reply with that of the page. Returns the bytes of the reply, with marks
    /// for ticks, ages and batches.
    fn run(&mut self, command: &str, expected: &str) -> String {
        let mut command = command.to_owned();
        for (shown, found) in &self.batches {
            command = command.replace(shown, found);
        }
        self.client.send(&line(&command));
        let reply = self.client.receive();
        let mut masked = String::new();
        match (&reply, serde_json::from_str::<Value>(expected)) {
            (Reply::Error(text), Err(_)) => {
                assert_eq!(text, expected, "{command}");
                masked.push_str(text);
            }
            (_, Ok(value)) => self.compare(&command, &reply, &value, &mut masked),
            (_, Err(error)) => panic!("{command}: {reply:?}, and the page has {expected:?}: {error}"),
        }
        masked
    }

    /// Compares a reply with that of the page, and appends its bytes to `masked`, with marks for ticks, ages and batches.
    fn compare(&mut self, command: &str, reply: &Reply, expected: &Value, masked: &mut String) {
        match (reply, expected) {
            (Reply::Array(found), Value::Array(wanted)) => {
                assert_eq!(found.len(), wanted.len(), "{command}: {reply:?}");
                let _ = write!(masked, "*{}\r\n", found.len());
                for (found, wanted) in found.iter().zip(wanted) {
                    self.compare(command, found, wanted, masked);
                }
            }
            // Ticks, and the age of a batch.
            (Reply::Integer(_), Value::Number(wanted)) if wanted.as_i64().unwrap() > 100 => {
                masked.push_str(":number\r\n");
            }
            (Reply::Integer(found), Value::Number(wanted)) => {
                assert_eq!(Some(*found), wanted.as_i64(), "{command}");
                let _ = write!(masked, ":{found}\r\n");
            }
            (Reply::Bulk(found), Value::String(wanted)) if wanted.matches('-').count() == 3 => {
                masked.push_str("$batch\r\n");
                self.batches.insert(wanted.clone(), found.clone());
            }
            (Reply::Bulk(found), Value::String(wanted)) => {
                assert_eq!(found, wanted, "{command}");
                let _ = write!(masked, "${}\r\n{found}\r\n", found.len());
            }
            _ => panic!("{command}: {reply:?}, and the page has {expected}"),
        }
    }
}

#[test]
fn every_example_is_byte_equal_in_resp2_and_resp3() {
    let (page, mut count) = (page(), 0);
    for block in blocks(&page, "text") {
        // Each block begins with an empty ring.
        let sidecars = [2, 3].map(|version| (start(&["--tick", "100ms"]), version));
        let mut readers = sidecars.each_ref().map(|(sidecar, version)| Reader::new(sidecar, *version));
        for example in block.split("> ").skip(1) {
            let (command, expected) = example.trim_end().split_once('\n').expect("a command and its reply");
            let [in_resp2, in_resp3] = readers.each_mut().map(|reader| reader.run(command, expected));
            assert_eq!(in_resp2, in_resp3, "{command}");
            count += 1;
        }
    }
    assert!(count >= 14, "only {count} examples were found");
}

/// A program of the page: its language, its file, and the command that runs it, if this machine can.
struct Program {
    language: &'static str,
    file: &'static str,
    command: fn(&Path) -> Option<Command>,
}

const PROGRAMS: [Program; 7] = [
    Program { language: "python", file: "logic_node.py", command: python },
    Program { language: "js", file: "logic_node.js", command: node },
    Program { language: "php", file: "logic_node.php", command: php },
    Program { language: "go", file: "go/logic_node.go", command: go },
    Program { language: "ruby", file: "logic_node.rb", command: ruby },
    Program { language: "erlang", file: "logic_node.erl", command: erlang },
    Program { language: "c", file: "logic_node.c", command: c },
];

/// Whether a program ends with success.
fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let run = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    run.is_ok_and(|status| status.success())
}

fn running(program: &str, file: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg(file);
    command
}

fn python(file: &Path) -> Option<Command> {
    // An environment that `.ci/resp-clients` made, or the package of the system.
    let made = root("target/resp-clients/python-redis8.1.0/bin/python");
    let python = if made.exists() { made } else { PathBuf::from("python3") };
    let python = python.to_str().unwrap();
    succeeds(python, &["-c", "import redis"]).then(|| running(python, file))
}

fn node(file: &Path) -> Option<Command> {
    let modules = root("target/resp-clients/node-ioredis-6/node_modules");
    let mut command = running("node", file);
    command.env("NODE_PATH", &modules);
    modules.exists().then_some(command)
}

fn php(file: &Path) -> Option<Command> {
    succeeds("php", &["-r", "new Redis();"]).then(|| running("php", file))
}

fn go(file: &Path) -> Option<Command> {
    let sources = Path::new("/usr/share/gocode/src/github.com/gomodule/redigo");
    let program = root("target/tmp/resp-logic-node");
    let build = || {
        let folder = file.parent().unwrap();
        let mut build = Command::new("go");
        build.args(["build", "-o", program.to_str().unwrap(), "."]).current_dir(folder);
        build.envs([("GOPATH", "/usr/share/gocode"), ("GO111MODULE", "off")]);
        let built = build.status().expect("Go was found");
        assert!(built.success(), "the example in Go is not built");
        Command::new(&program)
    };
    (sources.exists() && succeeds("go", &["version"])).then(build)
}

fn ruby(file: &Path) -> Option<Command> {
    succeeds("ruby", &["-e", "require 'redis'"]).then(|| running("ruby", file))
}

fn erlang(file: &Path) -> Option<Command> {
    let libraries = fs::read_dir("/usr/lib/erlang/lib").ok()?;
    let has_client = |name: &str| name.starts_with("redis_client-");
    let found = libraries.flatten().find(|folder| has_client(&folder.file_name().to_string_lossy()))?;
    let mut command = running("escript", file);
    command.env("ERL_FLAGS", format!("-pa {}", found.path().join("ebin").display()));
    Some(command)
}

fn c(file: &Path) -> Option<Command> {
    if !Path::new("/usr/include/hiredis/hiredis.h").exists() {
        return None;
    }
    let program = root("target/tmp/resp-logic-node-c");
    let arguments = ["-Wall", "-Wextra", "-Werror", "-o", program.to_str()?, file.to_str()?, "-lhiredis"];
    assert!(Command::new("cc").args(arguments).status().ok()?.success(), "the example in C is not built");
    Some(Command::new(program))
}

#[test]
fn every_program_of_the_page_is_in_its_file() {
    let page = page();
    for Program { language, file, .. } in &PROGRAMS {
        let text = fs::read_to_string(root("examples/resp").join(file)).unwrap();
        let trimmed = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
        let block = blocks(&page, language);
        assert!(
            block.len() == 1 && trimmed(&text).contains(trimmed(block[0]).trim()),
            "docs/RESP.md shows other lines than {file}"
        );
    }
}

#[test]
fn every_program_of_the_page_reports_the_client_that_did_not_acknowledge() {
    const TOKEN: &str = "0123456789abcdef-token";
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, TOKEN).unwrap();
    for Program { language, file, command } in &PROGRAMS {
        let file = root("examples/resp").join(file);
        let Some(mut command) = command(&file) else {
            skip(&format!(
                "the program of docs/RESP.md in {language}, whose library is missing: .ci/resp-clients"
            ));
            continue;
        };
        let sidecar = start(&["--tick", "100ms", "--token-file", token.to_str().unwrap()]);
        command.env("PORT", sidecar.resp.unwrap().port().to_string()).env("TOKEN", TOKEN);
        let mut program = Process::spawn(command.stdout(Stdio::piped()));
        let output = lines(program.stdout());
        let mut lines = std::iter::from_fn(|| Some(output.recv_timeout(PATIENCE).ok()?.1));
        assert_eq!(lines.find(|line| line.starts_with("offline")).as_deref(), Some("offline 102 8"), "{language}");
        sidecar.wait_for_settled("default");
        assert_eq!(sidecar.metrics().acked("acked"), 1, "{language}");
    }
}
