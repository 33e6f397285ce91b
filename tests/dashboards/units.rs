//! Values as people read them, in the units that the panels name.

/// A value in a unit of Grafana. Without a number of decimals, three digits say enough.
pub fn formatted(value: f64, unit: &str, decimals: Option<usize>) -> String {
    match unit {
        "percentunit" => format!("{}%", number(value * 100.0, decimals)),
        "s" => duration(value, decimals),
        "cps" => format!("{} c/s", scaled(value, decimals)),
        "short" => scaled(value, decimals),
        "none" => number(value, decimals),
        other => panic!("no panel had the unit {other} yet: say here how it is written"),
    }
}

fn number(value: f64, decimals: Option<usize>) -> String {
    if let Some(decimals) = decimals {
        return format!("{value:.decimals$}");
    }
    let decimals = match value.abs() {
        ..0.1 => 3,
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn scaled(value: f64, decimals: Option<usize>) -> String {
    // A value that would be rounded up to a thousand is one of the next unit.
    let (divisor, letter) = match value.abs() {
        ..999.5 => return number(value, decimals),
        ..999.5e3 => (1e3, "K"),
        _ => (1e6, "M"),
    };
    format!("{} {letter}", number(value / divisor, decimals))
}

fn duration(seconds: f64, decimals: Option<usize>) -> String {
    let (factor, unit) = match seconds.abs() {
        0.0 => (1.0, "s"),
        ..0.999_5e-3 => (1e6, "µs"),
        ..0.999_5 => (1e3, "ms"),
        ..60.0 => (1.0, "s"),
        _ => (1.0 / 60.0, "min"),
    };
    format!("{} {unit}", number(seconds * factor, decimals))
}

#[test]
fn values_are_written_as_people_read_them() {
    for (value, unit, decimals, expected) in [
        (0.018_34, "percentunit", Some(2), "1.83%"),
        (0.000_2, "percentunit", None, "0.02%"),
        (0.3, "percentunit", None, "30%"),
        (0.0, "s", None, "0 s"),
        (0.000_25, "s", None, "250 µs"),
        (0.000_999_9, "s", None, "1 ms"),
        (0.118, "s", None, "118 ms"),
        (8.642, "s", None, "8.64 s"),
        (15.0, "s", None, "15 s"),
        (90.0, "s", None, "1.5 min"),
        (2_953.2, "cps", None, "2.95 K c/s"),
        (11.96, "cps", None, "12 c/s"),
        (1_044.0, "short", None, "1.04 K"),
        (2_500_000.0, "short", None, "2.5 M"),
        (999.7, "short", None, "1 K"),
        (999.0, "short", None, "999"),
        (100.0, "none", None, "100"),
        (2.0, "none", Some(0), "2"),
    ] {
        assert_eq!(formatted(value, unit, decimals), expected, "{value} {unit}");
    }
}
