//! As much of PromQL as the conventions of dashboards ask for: the selectors of a query, each with what is around it.

use std::collections::BTreeSet;

/// A selector: `metric{matchers}[range]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selector {
    pub metric: String,
    pub matchers: Vec<String>,
    pub range: Option<String>,
    /// The functions and aggregations around it, the innermost last.
    pub calls: Vec<Call>,
}

/// A function or an aggregation, with the labels that it keeps, if it names any.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Call {
    pub name: String,
    pub by: BTreeSet<String>,
}

impl Selector {
    /// The function that takes it.
    pub fn function(&self) -> &str {
        self.calls.last().map_or("", |call| &call.name)
    }
}

/// Words of the language that are no metric.
const WORDS: [&str; 5] = ["and", "or", "unless", "bool", "offset"];
/// Words before a list of labels.
const BEFORE_LABELS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];

/// All selectors of a query that Prometheus understands.
pub fn selectors(query: &str) -> Vec<Selector> {
    let mut reader = Reader { rest: query, open: Vec::new(), next: Call::default(), found: Vec::new() };
    while reader.step() {}
    reader.found
}

struct Reader<'a> {
    rest: &'a str,
    /// The function of each open parenthesis; none if it only groups.
    open: Vec<Option<Call>>,
    /// The function of the next parenthesis.
    next: Call,
    found: Vec<Selector>,
}

fn is_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_' || character == ':'
}

impl<'a> Reader<'a> {
    /// Reads on; whether there is more.
    fn step(&mut self) -> bool {
        self.rest = self.rest.trim_start();
        let Some(first) = self.rest.chars().next() else { return false };
        match first {
            '(' => {
                let call = std::mem::take(&mut self.next);
                self.open.push(Some(call).filter(|call| !call.name.is_empty()));
                self.skip(1);
            }
            ')' => {
                self.open.pop();
                self.skip(1);
            }
            '"' => drop(self.string()),
            _ if first.is_ascii_digit() => drop(self.word()),
            _ if is_word(first) => self.name(),
            _ => self.skip(first.len_utf8()),
        }
        true
    }

    fn skip(&mut self, bytes: usize) {
        self.rest = &self.rest[bytes..];
    }

    fn word(&mut self) -> &'a str {
        let digits_go_on = |character: char| is_word(character) || character == '.';
        let numeric = self.rest.starts_with(|first: char| first.is_ascii_digit());
        let end = self.rest.find(|next| if numeric { !digits_go_on(next) } else { !is_word(next) });
        let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        word
    }

    fn string(&mut self) -> &'a str {
        let mut escaped = false;
        let end = self.rest[1..].find(|character| {
            let ends = character == '"' && !escaped;
            escaped = character == '\\' && !escaped;
            ends
        });
        let (string, rest) = self.rest.split_at(end.expect("Prometheus understands it") + 2);
        self.rest = rest;
        string
    }

    /// The text between two brackets, the first of which is next; brackets in strings do not count.
    fn between(&mut self, close: char) -> Vec<String> {
        self.skip(1);
        let mut parts = vec![String::new()];
        loop {
            let next = self.rest.chars().next().expect("Prometheus understands it");
            let part = parts.last_mut().expect("there is one");
            match next {
                '"' => part.push_str(self.string()),
                ',' => {
                    parts.push(String::new());
                    self.skip(1);
                }
                _ if next == close => break self.skip(1),
                _ => {
                    part.push(next);
                    self.skip(next.len_utf8());
                }
            }
        }
        parts.into_iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
    }

    fn name(&mut self) {
        let word = self.word();
        self.rest = self.rest.trim_start();
        if BEFORE_LABELS.contains(&word) {
            let labels = self.between(')');
            if word == "by" {
                self.next.by.extend(labels);
            }
        } else if self.rest.starts_with('(') || self.rest.starts_with("by") || self.rest.starts_with("without") {
            if !WORDS.contains(&word) {
                self.next.name = word.to_owned();
            }
        } else if !WORDS.contains(&word) {
            self.selector(word);
        }
    }

    fn selector(&mut self, metric: &str) {
        let matchers = if self.rest.starts_with('{') { self.between('}') } else { Vec::new() };
        let range = self.rest.starts_with('[').then(|| self.between(']').concat());
        let calls = self.open.iter().flatten().cloned().collect();
        self.found.push(Selector { metric: metric.to_owned(), matchers, range, calls });
    }
}

#[test]
fn selectors_are_found_with_all_that_is_around_them() {
    let found = selectors(
        r#"histogram_quantile(0.99, sum by (le, job) (rate(x_bucket{a=~"$a, }\"", b="c"}[$__rate_interval]))) > 5e3
           and on (job) (max without (z) (y) == bool 0 or job:x:rate5m{} offset 5m)"#,
    );
    let call = |name: &str, by: &[&str]| Call {
        name: name.to_owned(),
        by: by.iter().map(|label| (*label).to_owned()).collect(),
    };
    let bucket = Selector {
        metric: "x_bucket".to_owned(),
        matchers: vec![r#"a=~"$a, }\"""#.to_owned(), r#"b="c""#.to_owned()],
        range: Some("$__rate_interval".to_owned()),
        calls: vec![call("histogram_quantile", &[]), call("sum", &["le", "job"]), call("rate", &[])],
    };
    let y = Selector { metric: "y".to_owned(), calls: vec![call("max", &[])], ..Selector::default() };
    let recorded = Selector { metric: "job:x:rate5m".to_owned(), ..Selector::default() };
    assert_eq!(found, [bucket, y, recorded]);
}
