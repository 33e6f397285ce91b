//! The selectors of a PromQL query, each with the functions and aggregations around it.

use std::time::Duration;

use promql_parser::label::Matchers;
use promql_parser::parser::{self, Expr, LabelModifier, VectorSelector};

/// The variables that Grafana puts in place of a range. The parser gets a duration for each that no query states.
const RANGES: [(&str, Duration); 2] =
    [("$__rate_interval", Duration::from_millis(7_001)), ("$__range", Duration::from_millis(7_002))];

/// A selector: `metric{matchers}[range]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selector {
    pub metric: String,
    pub matchers: Vec<String>,
    pub range: Option<String>,
    /// The functions and aggregations around it, the innermost last.
    pub calls: Vec<Call>,
}

/// A function or an aggregation, with the labels that an aggregation keeps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Call {
    pub name: String,
    pub by: Vec<String>,
}

impl Selector {
    fn new(selector: &VectorSelector, range: Option<Duration>, calls: &[Call]) -> Selector {
        let Matchers { matchers, .. } = &selector.matchers;
        let variable = |range| RANGES.iter().find(|(_, duration)| *duration == range).map(|(name, _)| *name);
        Selector {
            metric: selector.name.clone().unwrap_or_default(),
            matchers: matchers.iter().map(ToString::to_string).collect(),
            range: range.map(|range| variable(range).map_or_else(|| format!("{range:?}"), str::to_owned)),
            calls: calls.to_vec(),
        }
    }

    /// The function that takes it.
    pub fn function(&self) -> &str {
        self.calls.last().map_or("", |call| &call.name)
    }
}

/// All selectors of a query.
///
/// # Panics
///
/// If it is no PromQL.
pub fn selectors(query: &str) -> Vec<Selector> {
    let replace = |query: String, (name, duration): &(&str, Duration)| {
        query.replace(&format!("[{name}]"), &format!("[{}ms]", duration.as_millis()))
    };
    let parsed = parser::parse(&RANGES.iter().fold(query.to_owned(), replace));
    let mut found = Vec::new();
    collect(&parsed.unwrap_or_else(|error| panic!("{query}: {error}")), &mut Vec::new(), &mut found);
    found
}

fn collect(expr: &Expr, calls: &mut Vec<Call>, found: &mut Vec<Selector>) {
    match expr {
        Expr::VectorSelector(selector) => found.push(Selector::new(selector, None, calls)),
        Expr::MatrixSelector(selector) => found.push(Selector::new(&selector.vs, Some(selector.range), calls)),
        Expr::Aggregate(aggregate) => {
            let by = match &aggregate.modifier {
                Some(LabelModifier::Include(labels)) => labels.labels.clone(),
                _ => Vec::new(),
            };
            calls.push(Call { name: aggregate.op.to_string(), by });
            collect(&aggregate.expr, calls, found);
            calls.pop();
        }
        Expr::Call(call) => {
            calls.push(Call { name: call.func.name.to_owned(), by: Vec::new() });
            call.args.args.iter().for_each(|argument| collect(argument, calls, found));
            calls.pop();
        }
        Expr::Binary(binary) => {
            collect(&binary.lhs, calls, found);
            collect(&binary.rhs, calls, found);
        }
        Expr::Unary(unary) => collect(&unary.expr, calls, found),
        Expr::Paren(paren) => collect(&paren.expr, calls, found),
        Expr::Subquery(subquery) => collect(&subquery.expr, calls, found),
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) | Expr::Extension(_) => {}
    }
}

#[test]
fn selectors_are_found_with_all_that_is_around_them() {
    let found = selectors(
        r#"histogram_quantile(0.99, sum by (le, job) (rate(x_bucket{a=~"$a, }", b="c"}[$__rate_interval]))) > 5e3
           and on (job) (max without (z) (y) == bool 0 or job:x:rate5m{} offset 5m)"#,
    );
    let call = |name: &str, by: &[&str]| Call {
        name: name.to_owned(),
        by: by.iter().map(|label| (*label).to_owned()).collect(),
    };
    let bucket = Selector {
        metric: "x_bucket".to_owned(),
        matchers: vec![r#"a=~"$a, }""#.to_owned(), r#"b="c""#.to_owned()],
        range: Some("$__rate_interval".to_owned()),
        calls: vec![call("histogram_quantile", &[]), call("sum", &["le", "job"]), call("rate", &[])],
    };
    let y = Selector { metric: "y".to_owned(), calls: vec![call("max", &[])], ..Selector::default() };
    let recorded = Selector { metric: "job:x:rate5m".to_owned(), ..Selector::default() };
    assert_eq!(found, [bucket, y, recorded]);
}
