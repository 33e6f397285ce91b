//! The documents are readable: sentences, paragraphs, table cells and lines stay short, and no sentence has a clause for
//! a subject.

use std::fs;
use std::path::PathBuf;

use super::root;

const MAX_SENTENCE_WORDS: usize = 25;
const MAX_PARAGRAPH_SENTENCES: usize = 5;
const MAX_CELL_WORDS: usize = 15;
const MAX_LINE_LENGTH: usize = 120;

/// The most words of a page, for its one reader.
const MAX_WORDS: &[(&str, usize)] = &[
    ("README.md", 900),
    ("CHANGELOG.md", 600),
    ("SECURITY.md", 1_200),
    ("docs/ARCHITECTURE.md", 1_800),
    ("docs/GUARANTEES.md", 1_000),
    ("docs/INTEGRATION.md", 3_000),
    ("docs/METRICS.md", 1_800),
    ("docs/OPERATIONS.md", 4_000),
    ("docs/PERFORMANCE.md", 900),
    ("docs/PROTOCOL.md", 5_500),
    ("docs/REDIS.md", 2_500),
    ("docs/RUNBOOKS.md", 4_800),
    ("docs/TESTING.md", 1_500),
];

/// Pages that are not checked, each with the reason.
const EXCEPTIONS: &[(&str, &str)] = &[];

fn pages() -> Vec<(String, String)> {
    let markdown = |folder: &str| {
        let entries = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "md"))
    };
    let mut paths: Vec<PathBuf> =
        ["", "docs", "docs/decisions"].iter().flat_map(|folder| markdown(folder)).collect();
    paths.sort();
    let pages = paths.into_iter().map(|path| {
        (path.strip_prefix(root()).unwrap().display().to_string(), fs::read_to_string(&path).unwrap())
    });
    pages.filter(|(name, _)| !EXCEPTIONS.iter().any(|(exception, _)| exception == name)).collect()
}

/// A text with the text of its links only, and a word in place of each span of code.
fn readable(text: &str) -> String {
    let spans = text.split('`').enumerate().map(|(index, part)| if index % 2 == 1 { "code" } else { part });
    let mut rest: String = spans.collect();
    let mut read = String::new();
    while let Some((before, target)) = rest.split_once("](") {
        read.push_str(before);
        rest = target.split_once(')').map_or("", |(_, after)| after).to_owned();
    }
    (read + &rest).replace(['[', '*'], "")
}

fn words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
}

/// The sentences of a readable text.
fn sentences(text: &str) -> Vec<&str> {
    let mut sentences = Vec::new();
    let mut start = 0;
    for (at, _) in text.match_indices([' ', '\n']) {
        if text[..at].trim_end_matches(['"', ')']).ends_with(['.', '?', '!']) {
            sentences.push(text[start..at].trim());
            start = at;
        }
    }
    sentences.push(text[start..].trim());
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

/// The mistakes of a paragraph or list item.
fn mistakes(paragraph: &str) -> Vec<String> {
    let text = readable(paragraph);
    let sentences = sentences(&text);
    let mut mistakes = Vec::new();
    if sentences.len() > MAX_PARAGRAPH_SENTENCES {
        mistakes.push(format!("{} sentences in a paragraph: {text}", sentences.len()));
    }
    for sentence in sentences {
        if words(sentence) > MAX_SENTENCE_WORDS {
            mistakes.push(format!("a sentence of {} words: {sentence}", words(sentence)));
        }
        let opens = ["Who ", "What ", "Whoever ", "Whose "].iter().any(|word| sentence.starts_with(word));
        if opens && !sentence.ends_with('?') {
            mistakes.push(format!("a clause for a subject: {sentence}"));
        }
    }
    mistakes
}

/// The mistakes of a page, each with its line.
fn mistakes_of_page(text: &str) -> Vec<(usize, String)> {
    let (mut mistakes_found, mut paragraph, mut fenced) = (Vec::new(), String::new(), false);
    for (number, line) in (1..).zip(text.lines().chain([""])) {
        let trimmed = line.trim();
        let is_fence = trimmed.starts_with("```");
        let begins_item = trimmed.starts_with("- ")
            || trimmed.split_once(". ").is_some_and(|(digits, _)| digits.parse::<u32>().is_ok());
        let is_table = trimmed.starts_with('|') && !fenced;
        if trimmed.is_empty() || trimmed.starts_with('#') || is_fence || is_table || fenced || begins_item {
            let ended = mistakes(&std::mem::take(&mut paragraph)).into_iter();
            mistakes_found.extend(ended.map(|mistake| (number, mistake)));
        }
        fenced ^= is_fence;
        if fenced || is_fence || trimmed.starts_with('#') {
            continue;
        }
        if is_table {
            let row = readable(trimmed);
            let long = row.split('|').filter(|cell| words(cell) > MAX_CELL_WORDS);
            mistakes_found.extend(long.map(|cell| (number, format!("a cell of {} words: {cell}", words(cell)))));
            continue;
        }
        if line.chars().count() > MAX_LINE_LENGTH {
            mistakes_found.push((number, format!("a line of {} columns", line.chars().count())));
        }
        paragraph.push_str(if begins_item {
            trimmed.split_once(' ').map_or("", |(_, text)| text)
        } else {
            trimmed
        });
        paragraph.push('\n');
    }
    mistakes_found
}

#[test]
fn documents_are_readable() {
    let mut found = Vec::new();
    for (name, text) in pages() {
        found.extend(
            mistakes_of_page(&text).into_iter().map(|(line, mistake)| format!("{name}:{line}: {mistake}")),
        );
    }
    assert!(found.is_empty(), "{}:\n{}", found.len(), found.join("\n"));
}

#[test]
fn documents_are_short() {
    for (name, most) in MAX_WORDS {
        let count = words(&fs::read_to_string(root().join(name)).unwrap());
        assert!(count <= *most, "{name} has {count} words, more than {most}");
    }
}

#[test]
fn each_mistake_is_found() {
    let long = "word ".repeat(26);
    let page = format!(
        "# A heading of any length\n\n{long}.\n\n- One. Two.\n- One. Two. `x. y.` Three. Four? Five! Six.\n\n\
         What is bad stays.\n\nWhat is this?\n\n| {long} | [short](a b c d e f g h i j k l m n o p q r s) |\n"
    );
    let found: Vec<String> = mistakes_of_page(&page).into_iter().map(|(_, mistake)| mistake).collect();
    let starts =
        ["a sentence of 26 words", "a line of", "6 sentences", "a clause for a subject", "a cell of 26 words"];
    for start in starts {
        assert_eq!(found.iter().filter(|mistake| mistake.starts_with(start)).count(), 1, "{start}: {found:#?}");
    }
    assert_eq!(found.len(), starts.len(), "{found:#?}");
}
