//! The documentation in the program: help, manual pages, and completions that shells can use.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use ackwheel::cli::Cli;
use clap::{Arg, CommandFactory};

use crate::support::process::{Run, assert_names, program};
use crate::support::settings;

/// Flags of `serve` that say where settings come from, and are none.
const NO_SETTINGS: [&str; 2] = ["config", "check-config"];

fn cli() -> clap::Command {
    let mut command = Cli::command();
    command.build();
    command
}

/// The flags of a verb.
fn flags(verb: &str) -> Vec<Arg> {
    let cli = cli();
    let verb = cli.find_subcommand(verb).expect("a verb");
    let is_shown = |flag: &&Arg| !flag.is_positional() && !flag.is_hide_set() && flag.get_id() != "help";
    verb.get_arguments().filter(is_shown).cloned().collect()
}

fn long(flag: &Arg) -> &str {
    flag.get_long().expect("each flag has a name")
}

#[test]
fn each_flag_of_serve_is_explained_and_is_a_variable_and_a_key() {
    let flags = flags("serve");
    for flag in &flags {
        let (name, help) = (long(flag), flag.get_help().map(ToString::to_string).unwrap_or_default());
        assert!(help.len() >= 30, "--{name} is not explained: {help:?}");
        if name == "check-config" {
            continue;
        }
        assert!(help.ends_with(']') && help.contains(" [default: "), "--{name} has no default: {help}");
        let variable = format!("ACKWHEEL_{}", name.replace('-', "_").to_uppercase());
        assert_eq!(flag.get_env().and_then(|variable| variable.to_str()), Some(variable.as_str()), "--{name}");
        assert!(flag.get_value_names().is_some_and(|names| names.len() == 1), "--{name} has no unit");
        assert_eq!(flag.get_help_heading().is_some(), name != "config", "--{name} stands in the wrong section");
    }
    let names = flags.iter().map(long).filter(|name| !NO_SETTINGS.contains(name)).map(String::from);
    assert_eq!(names.collect::<BTreeSet<_>>(), settings::keys());
}

#[test]
fn the_help_of_serve_has_sections_and_fits_100_columns() {
    let run = Run::of(&mut program(&["serve", "--help"]));
    let text = run.output();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert_names(text, &["\nAddresses:\n", "\nThe ring:\n", "\nWhere the wheel lives:\n", "\nThe process:\n"]);
    for flag in flags("serve") {
        assert_names(text, &[&format!("--{} ", long(&flag)).replace("--check-config ", "--check-config\n")]);
        if let Some(variable) = flag.get_env().and_then(|variable| variable.to_str()) {
            assert!(text.contains(&format!("[env: {variable}=]")) || text.contains(&format!("[env: {variable}]")));
        }
    }
}

/// Runs a program of others; none if it is not here.
fn run_if_here(command: &mut Command) -> Option<Run> {
    let name = command.get_program().to_owned();
    let found = Command::new(&name).arg("--version").stdin(Stdio::null()).output();
    if found.is_err() {
        crate::support::skipped::skip(&format!("the manual pages with {}", name.display()));
        return None;
    }
    Some(Run::of(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped())))
}

/// The completions of a shell, in a file.
fn completions(shell: &str, folder: &Path) -> String {
    let path = folder.join(shell);
    fs::write(&path, Run::of(&mut program(&["completions", shell])).output()).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The completions that bash offers after these words, the last of which is being typed. It calls the function as readline would.
fn offered(completions: &str, words: &[&str]) -> BTreeSet<String> {
    const ASK: &str = r#"
        set -eu
        source "$1"; shift
        rule=$(complete -p ackwheel)
        [[ $rule =~ -F\ ([^ ]+) ]]
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMPREPLY=()
        "${BASH_REMATCH[1]}" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", ASK, "bash", completions]).args(words);
    let run = run_if_here(&mut bash).expect("bash is on every machine where these tests run");
    run.output().lines().map(String::from).collect()
}

#[test]
fn bash_completes_verbs_flags_and_values() {
    let folder = tempfile::tempdir().unwrap();
    let bash = completions("bash", folder.path());
    let set = |words: &[&str]| words.iter().map(|word| String::from(*word)).collect::<BTreeSet<_>>();
    assert_eq!(offered(&bash, &["ackwheel", "se"]), set(&["serve"]));
    assert_eq!(offered(&bash, &["ackwheel", "serve", "--max-h"]), set(&["--max-held-acks"]));
    assert_eq!(offered(&bash, &["ackwheel", "serve", "--log-format", ""]), set(&["json", "text"]));
    assert_eq!(offered(&bash, &["ackwheel", "group", "d"]), set(&["delete"]));
    assert_eq!(offered(&bash, &["ackwheel", "completions", ""]).len(), 3 + 2, "three shells, and -h, --help");
    let all = offered(&bash, &["ackwheel", "serve", "--"]);
    let mut expected: BTreeSet<String> = flags("serve").iter().map(|flag| format!("--{}", long(flag))).collect();
    expected.insert(String::from("--help"));
    assert_eq!(all, expected);
}

#[test]
fn zsh_and_fish_can_read_their_completions() {
    let folder = tempfile::tempdir().unwrap();
    for (shell, marks) in
        [("zsh", ["#compdef ackwheel", "'--max-held-acks="]), ("fish", ["-l max-held-acks", "-a \"serve\""])]
    {
        let path = completions(shell, folder.path());
        assert_names(&fs::read_to_string(&path).unwrap(), &marks);
        if let Some(run) = run_if_here(Command::new(shell).args(["-n", &path])) {
            assert_eq!(run.output(), "");
        }
    }
    let unknown = Run::of(&mut program(&["completions", "csh"]));
    assert_names(unknown.error(64), &["csh", "bash, zsh, fish"]);
}

/// Every command, as the name of its page.
fn pages(command: &clap::Command) -> Vec<String> {
    let name = command.get_display_name().unwrap_or("ackwheel");
    let below = command.get_subcommands().filter(|below| below.get_name() != "help").flat_map(pages);
    below.chain([format!("{name}.1")]).collect()
}

#[test]
fn each_verb_has_a_manual_page_that_troff_takes_without_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("share/man1");
    assert_eq!(Run::of(&mut program(&["man", "--out", out.to_str().unwrap()])).output(), "");
    let written: BTreeSet<String> =
        fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(written, pages(&cli()).into_iter().collect());
    assert!(written.contains("ackwheel-group-delete.1"), "{written:?}");
    for page in &written {
        let path = out.join(page);
        let source = fs::read_to_string(&path).unwrap();
        assert!(source.is_ascii(), "{page} is not the same to every troff");
        let path = path.to_str().unwrap();
        for check in [&["man", "--warnings", "-l", path][..], &["groff", "-ww", "-man", "-Tutf8", "-z", path]] {
            if let Some(run) = run_if_here(Command::new(check[0]).args(&check[1..]).env("MANWIDTH", "80")) {
                assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{check:?}");
            }
        }
    }
    let serve = fs::read_to_string(out.join("ackwheel-serve.1")).unwrap().replace("\\-", "-");
    assert_names(
        &serve,
        &[".TH \"ACKWHEEL-SERVE\" 1 ", "SIGTERM, SIGINT and SIGHUP drain:", ".SH \"WHERE THE WHEEL LIVES\""],
    );
    for flag in flags("serve") {
        assert_names(&serve, &[&format!("--{}", long(&flag))]);
    }
    let program_page = fs::read_to_string(out.join("ackwheel.1")).unwrap();
    assert_names(&program_page, &["First steps, in three terminals:\n", "Exit codes: 0"]);
    assert_eq!(Run::of(&mut program(&["man"])).output(), program_page);
    let nowhere = Run::of(&mut program(&["man", "--out", "/proc/nowhere"]));
    assert_names(nowhere.error(1), &["--out /proc/nowhere"]);
}
