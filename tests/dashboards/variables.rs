//! Queries with the variables that Grafana puts in.

use std::time::Duration;

/// The window that Grafana would choose: at least four times the scrape interval.
pub const RATE_INTERVAL: Duration = Duration::from_secs(4);
/// The time shown.
pub const RANGE: Duration = Duration::from_secs(90);

/// The choice in the boxes for job and instance.
#[derive(Clone, Copy, Debug)]
pub enum Choice<'a> {
    All,
    /// Some of the values.
    These(&'a [&'a str]),
}

impl Choice<'_> {
    /// The regular expression that Grafana makes of it, within a string of PromQL.
    fn regex(self) -> String {
        let escaped = |value: &&str| {
            let special = |character: char| r"\^$*+?.()|[]{}".contains(character);
            let escape = |c: char| if special(c) { format!(r"\\{c}") } else { c.to_string() };
            value.chars().map(escape).collect::<String>()
        };
        match self {
            Choice::All => ".+".to_owned(),
            Choice::These([one]) => escaped(one),
            Choice::These(several) => format!("({})", several.iter().map(escaped).collect::<Vec<_>>().join("|")),
        }
    }
}

/// A query as Grafana asks it.
pub fn substituted(query: &str, jobs: Choice, instances: Choice) -> String {
    let millis = |duration: Duration| format!("{}ms", duration.as_millis());
    query
        .replace("$__rate_interval", &millis(RATE_INTERVAL))
        .replace("$__range", &millis(RANGE))
        .replace("$instance", &instances.regex())
        .replace("$job", &jobs.regex())
}

/// The label and the selector of a variable's `label_values(selector, label)`.
pub fn label_values(query: &str) -> (&str, &str) {
    let inside = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
    let (selector, label) = inside.and_then(|inside| inside.rsplit_once(',')).expect("a label and a selector");
    (label.trim(), selector.trim())
}

#[test]
fn variables_become_what_grafana_makes_of_them() {
    let query = r#"rate(x{job=~"$job", instance=~"$instance"}[$__rate_interval])"#;
    let asked = substituted(query, Choice::All, Choice::These(&["10.0.0.1:7416", "b"]));
    assert_eq!(asked, r#"rate(x{job=~".+", instance=~"(10\\.0\\.0\\.1:7416|b)"}[4000ms])"#);
    assert_eq!(label_values(r#"label_values(x{job=~"$job"}, instance)"#), ("instance", r#"x{job=~"$job"}"#));
}
