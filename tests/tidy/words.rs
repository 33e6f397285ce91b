//! Private words, riddles and archaic words stay out of code, comments, log lines and documents.

use std::fs;
use std::path::PathBuf;

use super::{root, rust_files};

/// Banned words, each with the plainer term. Only whole words count.
const BANNED: &[(&str, &str)] = &[
    ("whoever", "name the subject: connection, sidecar, consumer"),
    ("whichever", "name the subject"),
    ("anew", "again"),
    ("thrice", "three times"),
    ("dearer", "more expensive"),
    ("heed", "observe"),
    ("obey", "apply"),
    ("asker", "requester, connection"),
    ("tally", "latency histogram, counts"),
    ("tidying", "memory reclaim"),
    ("bury", "reap"),
    ("alive time", "stall-aware clock"),
    ("stands still", "stalls"),
    ("stand still", "stall"),
    ("stood still", "stalled"),
    ("handed out", "delivered"),
    ("hand out", "deliver"),
    ("hands out", "delivers"),
    ("come again", "be redelivered"),
];

/// Files that may say a banned word, each with the reason.
const EXCEPTIONS: &[(&str, &str)] =
    &[("tests/tidy/words.rs", "it lists them"), ("tests/tidy/prose.rs", "it looks for one of them")];

fn texts() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = ["src", "tests", "examples", "benches", "fuzz/fuzz_targets"]
        .iter()
        .flat_map(|folder| rust_files(&root().join(folder)))
        .collect();
    for folder in ["src/redis/scripts", ".ci"] {
        let entries = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        files.extend(entries.filter(|path| path.is_file() && path.extension().is_none_or(|end| end == "lua")));
    }
    files
}

/// Whether a line says a word or several as they stand, in any case.
fn says(line: &str, words: &str) -> bool {
    let line = line.to_lowercase();
    line.match_indices(words).any(|(start, _)| {
        let outside = |character: Option<char>| character.is_none_or(|character| !character.is_alphanumeric());
        outside(line[..start].chars().next_back()) && outside(line[start + words.len()..].chars().next())
    })
}

#[test]
fn no_file_says_a_private_word() {
    let mut found = Vec::new();
    for file in texts() {
        let name = file.strip_prefix(root()).unwrap().display().to_string();
        if EXCEPTIONS.iter().any(|(exception, _)| *exception == name) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        for (number, line) in (1..).zip(text.lines()) {
            let words = BANNED.iter().filter(|(words, _)| says(line, words));
            found.extend(words.map(|(words, plain)| format!("{name}:{number}: \"{words}\": say: {plain}")));
        }
    }
    assert!(
        found.is_empty(),
        "{} private words:
{}",
        found.len(),
        found.join(
            "
"
        )
    );
}

/// The start of a sentence in a comment, after the slashes.
fn sentences(comment: &str) -> impl Iterator<Item = &str> {
    comment.split(". ").map(str::trim)
}

#[test]
fn no_comment_opens_with_a_clause_for_a_subject() {
    let mut found = Vec::new();
    for file in ["src", "tests", "examples", "benches"].iter().flat_map(|folder| rust_files(&root().join(folder)))
    {
        let text = fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (number, line) in (1..).zip(&lines) {
            let Some(comment) = line.strip_prefix("//") else { continue };
            let is_first = number == 1 || !lines[number - 2].starts_with("//") || ends_sentence(lines[number - 2]);
            let comment = comment.trim_start_matches(['/', '!']).trim();
            for (index, sentence) in sentences(comment).enumerate() {
                let opens = ["Who ", "Whoever ", "What ", "Whose "].iter().any(|word| sentence.starts_with(word));
                if opens && (index > 0 || is_first) && !sentence.contains('?') {
                    found.push(format!("{}:{number}: {sentence}", file.strip_prefix(root()).unwrap().display()));
                }
            }
        }
    }
    assert!(
        found.is_empty(),
        "{} sentences:
{}",
        found.len(),
        found.join(
            "
"
        )
    );
}

fn ends_sentence(line: &str) -> bool {
    line.ends_with(['.', ':', '!', '/'])
}
