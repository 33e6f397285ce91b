//! The pages name what there is: verbs, flags, variables, metrics, reasons, files and headings. README.md and
//! docs/*.md are read as they are written, and compared with the program as it runs.

mod metric_reference;
mod shown_status;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use ackwheel::core::Reason;

use crate::support::process::{Run, program};
use crate::support::sidecar::Sidecar;

/// The endings of files that a page names in code.
const FILE_ENDINGS: &[&str] = &[".rs", ".md", ".toml", ".lua", ".txt", ".json", ".yml", ".yaml", "/"];

struct Page {
    path: PathBuf,
    text: String,
}

/// A piece of a page: running text, or code, in backticks or as a line of a fenced block.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Span,
    Fenced,
}

struct Piece<'a> {
    line: usize,
    kind: Kind,
    text: &'a str,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: PathBuf) -> Page {
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Page { path, text }
}

fn pages() -> Vec<Page> {
    let files = |folder: &str| fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = files("docs").chain(files("docs/decisions")).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    paths.sort();
    paths.insert(0, root().join("README.md"));
    paths.into_iter().map(read).collect()
}

impl Page {
    /// All of the page in its order. A span in backticks may reach over the end of a line, not of a paragraph.
    fn pieces(&self) -> Vec<Piece<'_>> {
        let mut pieces = Vec::new();
        let (mut fenced, mut is_code) = (false, false);
        for (line, text) in (1..).zip(self.text.lines()) {
            if text.trim_start().starts_with("```") {
                fenced = !fenced;
            } else if fenced {
                pieces.push(Piece { line, kind: Kind::Fenced, text });
            } else if text.trim().is_empty() {
                assert!(!is_code, "{}: a span ends nowhere", self.at(line));
            } else {
                for (index, text) in text.split('`').enumerate() {
                    is_code ^= index > 0;
                    pieces.push(Piece { line, kind: if is_code { Kind::Span } else { Kind::Text }, text });
                }
            }
        }
        pieces
    }

    fn at(&self, line: usize) -> String {
        format!("{}:{line}", self.path.strip_prefix(root()).unwrap().display())
    }

    /// The anchor of each heading.
    fn anchors(&self) -> BTreeSet<String> {
        let mut fenced = false;
        let headings = self.text.lines().filter(|line| {
            fenced ^= line.starts_with("```");
            !fenced && line.starts_with('#')
        });
        headings.map(|line| slug(line.trim_start_matches('#').trim())).collect()
    }
}

/// Lower case, hyphens for spaces, and nothing else but letters, digits and underscores.
fn slug(heading: &str) -> String {
    let lower = heading.to_lowercase();
    let kept = lower.chars().filter(|character| character.is_alphanumeric() || " -_".contains(*character));
    kept.map(|character| if character == ' ' { '-' } else { character }).collect()
}

#[track_caller]
fn assert_nothing_wrong(checked: usize, least: usize, faults: &[String]) {
    assert!(faults.is_empty(), "{} of {checked}:\n{}", faults.len(), faults.join("\n"));
    assert!(checked >= least, "only {checked} were looked at: the test is blind");
}

#[test]
fn links_lead_to_files_and_headings() {
    let (mut checked, mut faults) = (0, Vec::new());
    for page in pages() {
        for piece in page.pieces().iter().filter(|piece| piece.kind == Kind::Text) {
            for (start, mark) in piece.text.match_indices("](") {
                let target = piece.text[start + mark.len()..].split(')').next().unwrap_or_default();
                if target.starts_with("http") {
                    continue;
                }
                checked += 1;
                if !leads_somewhere(&page, target) {
                    faults.push(format!("{}: {target} leads nowhere", page.at(piece.line)));
                }
            }
        }
    }
    assert_nothing_wrong(checked, 100, &faults);
}

fn leads_somewhere(page: &Page, target: &str) -> bool {
    let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let path = if file.is_empty() { page.path.clone() } else { page.path.parent().unwrap().join(file) };
    match anchor {
        None => path.exists(),
        Some(anchor) => path.is_file() && read(path).anchors().contains(anchor),
    }
}

#[test]
fn files_that_are_named_are_there() {
    let (mut checked, mut faults) = (0, Vec::new());
    let legal = |character: char| character.is_ascii_alphanumeric() || "/._-".contains(character);
    for page in pages() {
        for Piece { line, text, .. } in page.pieces().iter().filter(|piece| piece.kind == Kind::Span) {
            let is_path = text.contains('/') && !text.starts_with('/') && text.chars().all(legal);
            if !is_path || !FILE_ENDINGS.iter().any(|ending| text.ends_with(ending)) {
                continue;
            }
            checked += 1;
            // docs/ARCHITECTURE.md names rooms as they are named in src.
            if !["", "src", "examples"].iter().any(|folder| root().join(folder).join(text).exists()) {
                faults.push(format!("{}: there is no {text}", page.at(*line)));
            }
        }
    }
    assert_nothing_wrong(checked, 40, &faults);
}

/// A list needs a line for each of its points, or it is shown as one paragraph.
#[test]
fn lists_are_not_squashed_into_paragraphs() {
    let (mut checked, mut faults) = (0, Vec::new());
    for page in pages() {
        for (line, text) in (1..).zip(page.text.lines()).filter(|(_, text)| text.starts_with("**")) {
            checked += 1;
            if text.contains(".** - ") {
                faults.push(format!("{}: {text}", page.at(line)));
            }
        }
    }
    assert_nothing_wrong(checked, 40, &faults);
}

/// The words of a text that begin with these characters, as far as they go on with legal ones.
fn words<'a>(text: &'a str, begin: &'a str, legal: fn(char) -> bool) -> impl Iterator<Item = (usize, &'a str)> {
    text.match_indices(begin).filter_map(move |(start, _)| {
        let is_inside = text[..start].ends_with(|before: char| before.is_ascii_alphanumeric() || before == '_');
        let end = text[start..].find(|character| !legal(character)).map_or(text.len(), |length| start + length);
        (!is_inside && end > start + begin.len()).then(|| (start, &text[start..end]))
    })
}

fn flags_in(text: &str) -> impl Iterator<Item = &str> {
    let legal = |character: char| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '-';
    words(text, "--", legal).filter(|(start, _)| !text[..*start].ends_with('-')).map(|(_, word)| word)
}

fn help_of(verb: &[&str]) -> String {
    Run::of(&mut program(&[verb, &["--help"]].concat())).output().to_owned()
}

/// The flags of each verb, as its help lists them; those of the program alone under the empty name.
fn flags_of_verbs() -> BTreeMap<String, BTreeSet<String>> {
    let help = help_of(&[]);
    let list = help.split("Commands:").nth(1).and_then(|rest| rest.split("Options:").next()).unwrap();
    let verbs = list.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let flags = |help: &str| flags_in(help).map(str::to_owned).collect();
    let of_verb = |verb: &str| {
        let more = match verb {
            "group" => help_of(&["group", "delete"]) + &help_of(&["group", "list"]),
            _ => String::new(),
        };
        (verb.to_owned(), flags(&(help_of(&[verb]) + &more)))
    };
    let mut all: BTreeMap<_, _> = verbs.filter(|verb| !verb.is_empty() && *verb != "help").map(of_verb).collect();
    all.insert(String::new(), flags(&help));
    all
}

/// Calls of the program in a piece of code: the words behind its name.
fn calls(piece: &Piece<'_>) -> Vec<Vec<String>> {
    let command = match piece.kind {
        Kind::Text => return Vec::new(),
        Kind::Span => piece.text,
        Kind::Fenced => match piece.text.strip_prefix("$ ") {
            None => return Vec::new(),
            Some(command) => command.split(" #").next().unwrap_or_default(),
        },
    };
    let calls = command.split([';', '|', '&']).filter_map(|call| {
        let mut words = call.split_whitespace().skip_while(|word| *word == "do");
        (words.next() == Some("ackwheel")).then(|| words.map(str::to_owned).collect())
    });
    calls.collect()
}

#[test]
fn verbs_and_flags_are_those_of_the_help() {
    let (mut checked, mut faults) = (0, Vec::new());
    let of_verbs = flags_of_verbs();
    let all: BTreeSet<&str> = of_verbs.values().flatten().map(String::as_str).collect();
    for page in pages() {
        for piece in page.pieces() {
            for call in calls(&piece) {
                let verb = call.first().filter(|word| !word.starts_with('-')).cloned().unwrap_or_default();
                if !verb.chars().all(|character| character.is_ascii_lowercase()) {
                    continue; // `ackwheel = { … }` in a manifest
                }
                checked += 1;
                let Some(flags) = of_verbs.get(&verb) else {
                    faults.push(format!("{}: there is no verb {verb}", page.at(piece.line)));
                    continue;
                };
                let call = call.join(" ");
                let unknown = flags_in(&call).filter(|flag| !flags.contains(*flag));
                faults.extend(unknown.map(|flag| format!("{}: {verb} has no {flag}", page.at(piece.line))));
            }
            if piece.kind == Kind::Span && piece.text.starts_with("--") {
                checked += 1;
                let unknown = flags_in(piece.text).filter(|flag| !all.contains(flag));
                faults.extend(unknown.map(|flag| format!("{}: there is no {flag}", page.at(piece.line))));
            }
        }
    }
    assert_nothing_wrong(checked, 150, &faults);
}

#[test]
fn environment_variables_are_those_of_the_help() {
    let (mut checked, mut faults) = (0, Vec::new());
    let legal = |character: char| character.is_ascii_uppercase() || character == '_';
    let verbs = flags_of_verbs();
    let help: String =
        verbs.keys().filter(|verb| !verb.is_empty()).map(|verb| help_of(&[verb.as_str()])).collect();
    let known: BTreeSet<&str> = words(&help, "ACKWHEEL_", legal).map(|(_, name)| name).collect();
    for page in pages() {
        for (line, text) in (1..).zip(page.text.lines()) {
            for (_, name) in words(text, "ACKWHEEL_", legal) {
                checked += 1;
                if !known.contains(name) {
                    faults.push(format!("{}: no setting is named {name}", page.at(line)));
                }
            }
        }
    }
    assert_nothing_wrong(checked, 2, &faults);
}

/// The conditions between braces behind a metric's name, each with all values that it names.
fn conditions(text: &str) -> Vec<(&str, Vec<&str>)> {
    let Some(inner) = text.strip_prefix('{').and_then(|rest| rest.split_once('}')) else { return Vec::new() };
    let conditions = inner.0.split(',').filter_map(|part| {
        let (label, value) = part.split_once('=')?;
        Some((label.trim(), value.trim_start_matches('~').trim_matches('"').split('|').collect()))
    });
    conditions.collect()
}

#[test]
fn metrics_and_their_labels_are_those_of_a_sidecar() {
    let (mut checked, mut faults) = (0, Vec::new());
    let legal = |character: char| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '_';
    let metrics = Sidecar::start(&[]).metrics();
    let series: Vec<&str> = metrics.names().collect();
    let of = |name: &str| {
        let belongs = |series: &&&str| {
            let found = series.split('{').next().unwrap_or_default();
            found == name || found.strip_suffix("_bucket") == Some(name)
        };
        series.iter().filter(belongs).copied().collect::<Vec<&str>>()
    };
    for page in pages() {
        for (line, text) in (1..).zip(page.text.lines()) {
            for (start, name) in ["ackwheel_", "process_"].iter().flat_map(|begin| words(text, begin, legal)) {
                checked += 1;
                let found = of(name);
                if found.is_empty() {
                    faults.push(format!("{}: no metric is named {name}", page.at(line)));
                }
                for (label, values) in conditions(&text[start + name.len()..]) {
                    let is_there = |value: &&str| {
                        let pair = format!("{label}=\"{value}\"");
                        found.iter().any(|series| series.contains(&pair))
                    };
                    let missing = values.iter().filter(|value| !is_there(value));
                    faults
                        .extend(missing.map(|value| format!("{}: {name} has no {label} {value}", page.at(line))));
                }
            }
        }
    }
    assert_nothing_wrong(checked, 60, &faults);
}

/// The words in code in the columns named `reason` or `reasons` of a page's tables.
fn reasons_in_tables(page: &Page) -> Vec<(usize, &str)> {
    let (mut column, mut reasons) = (None, Vec::new());
    let mut is_in_table = false;
    for (line, text) in (1..).zip(page.text.lines()) {
        let Some(row) = text.strip_prefix('|') else {
            is_in_table = false;
            continue;
        };
        let cells: Vec<&str> = row.split('|').collect();
        if !std::mem::replace(&mut is_in_table, true) {
            column = cells.iter().position(|cell| ["reason", "reasons"].contains(&cell.trim()));
        }
        if let Some(cell) = column.and_then(|column| cells.get(column)) {
            reasons.extend(cell.split('`').skip(1).step_by(2).map(|reason| (line, reason)));
        }
    }
    reasons
}

#[test]
fn reasons_are_those_of_the_program_and_the_manual_has_a_remedy_for_each() {
    let (mut checked, mut faults) = (0, Vec::new());
    for page in pages() {
        for (line, reason) in reasons_in_tables(&page) {
            checked += 1;
            if !Reason::ALL.iter().any(|known| known.as_str() == reason) {
                faults.push(format!("{}: nothing is refused with {reason}", page.at(line)));
            }
        }
    }
    assert_nothing_wrong(checked, 20, &faults);
    // A refusal of one request concerns the developer; all others concern the person on call.
    let operations = read(root().join("docs/OPERATIONS.md"));
    let explained: BTreeSet<&str> = reasons_in_tables(&operations).into_iter().map(|(_, reason)| reason).collect();
    for reason in Reason::ALL.iter().filter(|reason| reason.closes() || reason.code() >= 64) {
        assert!(explained.contains(reason.as_str()), "docs/OPERATIONS.md does not say what to do about {reason}");
    }
}

/// The program's text as it reads at run time: string literals that reach over several lines are one.
fn sources() -> String {
    fn collect(folder: &Path, all: &mut String) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, all);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                text.split("\\\n").for_each(|part| all.push_str(part.trim_start()));
            }
        }
    }
    let mut all = String::new();
    collect(&root().join("src"), &mut all);
    all
}

/// The sentence in a line of the log, up to where it is cut off, or to the first value in it or behind it.
fn logged(line: &str) -> Option<&str> {
    let rest = ["INFO ", "WARN ", "ERROR "].iter().find_map(|level| Some(line.split_once(level)?.1))?;
    let (_, sentence) = rest.split_once(": ")?;
    let sentence = sentence.split('…').next()?;
    let before_keys = match sentence.find('=') {
        Some(value) => sentence[..value].rsplit_once(' ')?.0,
        None => sentence,
    };
    before_keys.split(|character: char| character.is_ascii_digit()).next()
}

#[test]
fn log_lines_quoted_in_the_pages_are_in_the_program() {
    let (mut checked, mut faults) = (0, Vec::new());
    let sources = sources();
    for page in pages() {
        let mut says_log = false;
        for piece in page.pieces() {
            let sentence = match piece.kind {
                Kind::Span if says_log => Some(piece.text),
                Kind::Fenced => logged(piece.text),
                _ => None,
            };
            if let Some(sentence) = sentence.map(str::trim).filter(|sentence| sentence.contains(' ')) {
                checked += 1;
                // A text behind a semicolon may be inserted.
                if !sentence.split("; ").all(|part| sources.contains(part)) {
                    faults.push(format!("{}: nothing logs {sentence:?}", page.at(piece.line)));
                }
            }
            let text = piece.text.trim_end();
            says_log =
                piece.kind == Kind::Text && ["log", "log:", "log says"].iter().any(|end| text.ends_with(end));
        }
    }
    assert_nothing_wrong(checked, 8, &faults);
}
