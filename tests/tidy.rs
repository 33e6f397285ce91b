//! Checks the layout of src: folders import downward only, files import without circles, files and functions stay
//! short, and only the app names a store. Also the words of code and documents.

mod imports;
mod prose;
mod words;

use std::fs;
use std::path::{Path, PathBuf};

/// The folders of src by layer, lowest first: each may import those of lower layers only.
const LAYERS: &[&[&str]] = &[
    &["core"],
    &["clock", "logging", "process", "protocol"],
    &["client", "memory", "metrics"],
    &["ticker"],
    &["bench", "delivery", "redis"],
    &["server"],
    &["admin"],
    &["config"],
    &["app"],
    &["cli"],
    &["lib", "main"],
];

/// Folders that use the contracts of a store, and name no store.
const NAME_NO_STORE: &[&str] = &["core", "server", "delivery", "ticker", "admin", "client", "protocol"];

const MAX_FILE_LINES: usize = 350;
const MAX_FUNCTION_LINES: usize = 70;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else { return files };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// The folder of src that a file belongs to, or its own name.
fn folder_of(file: &Path) -> String {
    let relative = file.strip_prefix(root().join("src")).unwrap();
    let first = relative.components().next().unwrap().as_os_str().to_str().unwrap();
    first.trim_end_matches(".rs").to_owned()
}

fn layer(folder: &str) -> usize {
    LAYERS.iter().position(|folders| folders.contains(&folder)).unwrap_or_else(|| {
        panic!(
            "src has a new folder, {folder}: give it a layer in tests/tidy.rs and a line in docs/ARCHITECTURE.md"
        )
    })
}

/// Every folder that a file names after `crate::`, with the line.
fn imports(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim_start().starts_with("//")) {
        for (start, path) in line.match_indices("crate::") {
            let word: String = line[start + path.len()..]
                .chars()
                .take_while(|character| character.is_ascii_lowercase() || *character == '_')
                .collect();
            if !word.is_empty() {
                found.push((number, word));
            }
        }
    }
    found
}

#[test]
fn folders_import_downward_only() {
    let mut count = 0;
    for file in rust_files(&root().join("src")) {
        let folder = folder_of(&file);
        let text = fs::read_to_string(&file).unwrap();
        for (line, imported) in imports(&text) {
            count += 1;
            let downward = imported == folder || layer(&imported) < layer(&folder);
            assert!(downward, "{}:{line}: {folder} must not import {imported}", file.display());
        }
    }
    assert!(count > 100, "only {count} imports were seen: the test is blind");
}

#[test]
fn only_the_app_knows_which_store_it_is() {
    for file in rust_files(&root().join("src")) {
        if !NAME_NO_STORE.contains(&folder_of(&file).as_str()) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        // Unit tests may have a store to test with.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in (1..).zip(code.lines()) {
            let is_code = !line.trim_start().starts_with("//");
            for store in ["memory::", "redis::", "MemoryRing", "MemoryStore", "RedisStore"] {
                assert!(!(is_code && line.contains(store)), "{}:{number} names {store}", file.display());
            }
        }
    }
}

/// Time is a parameter: only these read a clock, and the client, which has no one above it.
const READ_CLOCKS: &[&str] = &["clock", "client"];

#[test]
fn clocks_are_read_in_one_place() {
    for file in rust_files(&root().join("src")) {
        if READ_CLOCKS.contains(&folder_of(&file).as_str()) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for clock in ["Instant::now", "SystemTime::now"] {
            assert!(!code.contains(clock), "{} reads {clock}: take it as a parameter", file.display());
        }
    }
}

#[test]
fn files_and_functions_stay_short() {
    for folder in ["src", "examples", "tests", "benches", "fuzz"] {
        for file in rust_files(&root().join(folder)) {
            let text = fs::read_to_string(&file).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            // Unit tests stand below the code that they test and do not make it longer.
            let code = lines.iter().position(|line| *line == "#[cfg(test)]").unwrap_or(lines.len());
            let limit = if folder == "src" { MAX_FILE_LINES } else { MAX_FILE_LINES + 100 };
            assert!(code <= limit, "{} has {code} lines, more than {limit}", file.display());
            check_functions(&file, &lines);
        }
    }
}

/// A function reaches from the line with `fn` to the closing brace of the same indentation.
fn check_functions(file: &Path, lines: &[&str]) {
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        let keywords = ["pub ", "pub(super) ", "pub(crate) ", "async ", "const "];
        let plain = keywords.iter().fold(code, |rest, keyword| rest.strip_prefix(keyword).unwrap_or(rest));
        if !plain.starts_with("fn ") || code.ends_with(';') {
            continue;
        }
        let end = (start..lines.len()).find(|end| {
            let closing = lines[*end];
            closing.len() - closing.trim_start().len() == indent && closing.trim_end().ends_with('}')
        });
        let length = end.map_or(0, |end| end - start + 1);
        assert!(length <= MAX_FUNCTION_LINES, "{}:{}: {length} lines long", file.display(), start + 1);
    }
}

#[test]
fn nothing_is_left_for_later() {
    let marks = [["TO", "DO"].concat(), ["FIX", "ME"].concat(), ["XX", "X"].concat()];
    for folder in ["src", "examples", "tests", "benches"] {
        for file in rust_files(&root().join(folder)) {
            let text = fs::read_to_string(&file).unwrap();
            for mark in &marks {
                assert!(!text.contains(mark.as_str()), "{} holds a {mark}", file.display());
            }
        }
    }
}

#[test]
fn the_top_level_holds_what_a_newcomer_expects() {
    let known = [
        "Cargo.toml",
        "Cargo.lock",
        "src",
        "examples",
        "tests",
        "grafana",
        "README.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "docs",
        "benches",
        "fuzz",
        "target",
        "deny.toml",
        "rustfmt.toml",
        "LICENSE-MIT",
        "LICENSE-APACHE",
    ];
    for entry in fs::read_dir(root()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name.starts_with('.') || known.contains(&name.as_str()), "what is {name} doing at the top level?");
    }
}
