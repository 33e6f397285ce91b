//! Derives findings from the status report of a sidecar.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;

use crate::admin::status::{GroupReport, StatusReport};
use crate::cli::status::stands_still;
use crate::cli::text::{counted, span, span_of_seconds};
use crate::core::{GroupName, JournalStatus, Reason};

/// The time before the expiry of a certificate at which a warning begins.
const EXPIRES_SOON: u64 = 14 * 24 * 3_600;

/// The use of a limit in percent above which a warning begins.
const NEAR_LIMIT: u64 = 80;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// Nothing must be done.
    Ok,
    /// Something may have to be done soon.
    Warn,
    /// Something must be done.
    Fail,
}

impl Level {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "fail",
        }
    }
}

/// A finding, with the remedy if something is wrong.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    pub(super) subject: &'static str,
    pub(super) text: String,
    pub(super) remedy: String,
}

impl Finding {
    pub(super) fn ok(subject: &'static str, text: String) -> Finding {
        Finding { level: Level::Ok, subject, text, remedy: String::new() }
    }

    pub(super) fn fail(subject: &'static str, text: String, remedy: &str) -> Finding {
        Finding { level: Level::Fail, subject, text, remedy: remedy.to_owned() }
    }

    fn warn(subject: &'static str, text: String, remedy: &str) -> Finding {
        Finding { level: Level::Warn, ..Finding::fail(subject, text, remedy) }
    }
}

/// Returns the findings about a report. `now` is the Unix time in seconds.
pub(super) fn findings(report: &StatusReport, max_batch_age: Duration, now: u64) -> Vec<Finding> {
    let mut found = vec![sidecar(report)];
    found.extend(certificate(report, now));
    found.extend(store(report));
    for (subject, problems, fine) in [
        (
            "rings",
            rings(report),
            counted(report.rings.len() as u64, "ring is led and on time", "rings are led and on time"),
        ),
        (
            "groups",
            groups(report, max_batch_age),
            format!("no batch of {} waits too long", counted(report.groups.len() as u64, "group", "groups")),
        ),
        ("last minutes", last_minutes(report), String::from("no storm and no refusal")),
        ("limits", limits(report), format!("no limit is used to more than {NEAR_LIMIT} %")),
        ("versions", versions(report), format!("every known sidecar runs {}", report.version)),
    ] {
        if problems.is_empty() {
            found.push(Finding::ok(subject, fine));
        }
        found.extend(problems);
    }
    found
}

fn sidecar(report: &StatusReport) -> Finding {
    let uptime = span_of_seconds(report.uptime_seconds);
    Finding::ok("sidecar", format!("{} runs version {} for {uptime}", report.sidecar, report.version))
}

fn certificate(report: &StatusReport, now: u64) -> Option<Finding> {
    let expiry = u64::try_from(report.certificate_expiry?).unwrap_or_default();
    let renew = "renew the files of --tls-cert and --tls-key; the sidecar reads them again";
    let left = span(Duration::from_secs(expiry.saturating_sub(now)));
    Some(match expiry.saturating_sub(now) {
        0 => Finding::fail("certificate", String::from("the certificate of the sidecar has expired"), renew),
        1..EXPIRES_SOON => Finding::warn("certificate", format!("the certificate expires in {left}"), renew),
        _ => Finding::ok("certificate", format!("the certificate is valid for {left} more")),
    })
}

fn store(report: &StatusReport) -> Vec<Finding> {
    let mut found = vec![Finding::ok("store", format!("the {} store answers", report.store))];
    found.extend(report.journal.iter().map(journal));
    for server in &report.shared_store.servers {
        let version = server.version.as_deref().unwrap_or("unknown");
        let replicas = server.replicas.map_or_else(|| String::from("unknown"), |count| count.to_string());
        let settings: Vec<String> =
            server.settings.iter().map(|(name, value)| format!("{name} \"{value}\"")).collect();
        let settings = if settings.is_empty() { String::from("not readable") } else { settings.join(", ") };
        let text = format!("{}: version {version}, replicas {replicas}, settings: {settings}", server.address);
        found.push(Finding::ok("redis", text));
    }
    for (warning, servers) in &report.shared_store.warnings {
        // The remedy follows the last semicolon in each warning of the sidecar.
        let (text, remedy) = warning.rsplit_once("; ").unwrap_or((warning, "see docs/REDIS.md"));
        found.push(Finding::warn("redis", format!("{}: {text}", servers.join(", ")), remedy));
    }
    let refusals = report.last_minutes.out_of_memory;
    if refusals > 0 {
        let times = counted(refusals, "time", "times");
        let text = format!("Redis was out of memory {times} in the last minutes, and adds were refused");
        found.push(Finding::fail("redis", text, "raise maxmemory of Redis, or start consumers"));
    }
    found
}

fn journal(journal: &JournalStatus) -> Finding {
    if journal.is_refusing {
        let text = String::from("adds are refused, because the journal cannot be written");
        return Finding::fail("journal", text, "look at the log, and at the disk of --journal");
    }
    if journal.damaged > 0 {
        let damaged = counted(journal.damaged, "part of the journal was", "parts of the journal were");
        let text = format!("{damaged} damaged at the start, and the messages there are lost");
        return Finding::warn("journal", text, "look at the log for the places, and check the disk of --journal");
    }
    if journal.errors > 0 {
        let text = counted(journal.errors, "write or sync", "writes or syncs") + " failed since the start";
        return Finding::warn("journal", text, "check the disk of --journal");
    }
    Finding::ok("journal", format!("the journal is written, and takes {} MB", journal.log_bytes / 1_000_000))
}

fn rings(report: &StatusReport) -> Vec<Finding> {
    let mut found = Vec::new();
    for ring in &report.rings {
        let number = ring.ring;
        if ring.leader.is_none() {
            let text = format!("ring {number} has no leader, so nothing times out there");
            let remedy = "start a sidecar without --never-lead, and look at the log of the sidecars";
            found.push(Finding::fail("rings", text, remedy));
        } else if stands_still(ring, report.tick_ms) {
            let behind = span_of_seconds(ring.pointer_lag_seconds);
            let text = format!("the pointer of ring {number} is {behind} late");
            found.push(Finding::fail(
                "rings",
                text,
                "look at the load and the log of its leader, and at the store",
            ));
        }
        if let Some(why) = &ring.waits {
            let text = format!("this sidecar may not move the pointer of ring {number}: {why}");
            found.push(Finding::fail("rings", text, "make a majority of the Sentinels or nodes reachable"));
        }
    }
    if found.is_empty() && report.rings.iter().any(|ring| !ring.leads) {
        let leaders: BTreeSet<&str> = report.rings.iter().filter_map(|ring| ring.leader.as_deref()).collect();
        let leaders: Vec<&str> = leaders.into_iter().collect();
        let text = counted(report.rings.len() as u64, "ring is led and on time", "rings are led and on time");
        found.push(Finding::ok("rings", format!("{text}; leaders: {}", leaders.join(", "))));
    }
    found
}

fn groups(report: &StatusReport, max_batch_age: Duration) -> Vec<Finding> {
    let problem = |group: &GroupReport| {
        let GroupReport { group, subscribers, outbox_batches, oldest_seconds, .. } = group;
        let is_old = *oldest_seconds > max_batch_age.as_secs_f64();
        let (age, batches) = (span_of_seconds(*oldest_seconds), counted(*outbox_batches, "batch", "batches"));
        // In Redis, the group may have subscribers at other sidecars.
        if *outbox_batches > 0 && *subscribers == 0 && (report.store == "memory" || is_old) {
            let text = format!("group {group} has {batches} and no subscriber here; oldest {age}");
            let delete = format!(", or if nobody reads it any more: ackwheel group delete {group}");
            let remedy = format!("start its consumers{}", if group == GroupName::DEFAULT { "" } else { &delete });
            let level = if is_old { Level::Fail } else { Level::Warn };
            Some(Finding { level, subject: "groups", text, remedy })
        } else if *outbox_batches > 0 && is_old {
            let text = format!("group {group} has not acknowledged a batch for {age}");
            Some(Finding::fail("groups", text, "look at its consumers: do they acknowledge?"))
        } else {
            None
        }
    };
    report.groups.iter().filter_map(problem).collect()
}

fn last_minutes(report: &StatusReport) -> Vec<Finding> {
    let minutes = &report.last_minutes;
    let mut found = Vec::new();
    let window = span_of_seconds(minutes.seconds);
    if minutes.storms > 0 {
        let storms = counted(minutes.storms, "tick was a storm", "ticks were storms");
        let text = format!("{storms} in the last {window}");
        let remedy = "look for a fault between clients and logic nodes before marking clients offline";
        found.push(Finding::fail("last minutes", text, remedy));
    }
    for (reason, count) in &minutes.refusals {
        let refused = counted(*count, "request or connection was", "requests or connections were");
        let text = format!("{refused} refused in the last {window}: {reason}");
        let remedy = Reason::from_word(reason).map_or("see this reason in docs/PROTOCOL.md", Reason::remedy);
        found.push(Finding::warn("last minutes", text, remedy));
    }
    found
}

fn limits(report: &StatusReport) -> Vec<Finding> {
    let near = report
        .limits
        .iter()
        .filter(|one| u128::from(one.used) * 100 > u128::from(one.limit) * u128::from(NEAR_LIMIT));
    near.map(|one| {
        let text = format!("{} is at {} of {}", one.name, one.used, one.limit);
        let remedy = match &*one.name {
            "groups" => Reason::TooManyGroups.remedy(),
            "open files" => "raise the limit of open files (LimitNOFILE, ulimit -n), and restart the sidecar",
            _ => "raise the limit, or find out what uses it",
        };
        if one.used >= one.limit {
            Finding::fail("limits", text, remedy)
        } else {
            Finding::warn("limits", text, remedy)
        }
    })
    .collect()
}

fn versions(report: &StatusReport) -> Vec<Finding> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for version in report.shared_store.sidecars.values() {
        *counts.entry(version).or_default() += 1;
    }
    if counts.len() < 2 {
        return Vec::new();
    }
    let counts: Vec<String> = counts.iter().map(|(version, count)| format!("{count} with {version}")).collect();
    let text = format!("the sidecars of this namespace have several versions: {}", counts.join(", "));
    vec![Finding::warn("versions", text, "finish the update; a stopped sidecar counts for three minutes")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::LimitReport;
    use crate::core::{RingStatus, StoreReport, Tick};

    const NOW: u64 = 1_800_000_000;

    fn healthy() -> StatusReport {
        let ring = RingStatus {
            ring: 0,
            pointer: Tick(7),
            epoch: 1,
            leader: Some(String::from("a")),
            lease_age_seconds: None,
            leads: true,
            pointer_lag_seconds: 0.0,
            waits: None,
            in_flight: 0,
            slots: vec![0; 15],
            closing: 0,
            recent: Vec::new(),
        };
        StatusReport {
            store: String::from("memory"),
            tick_ms: 1_000,
            rings: vec![ring],
            ..StatusReport::default()
        }
    }

    /// The levels and subjects of all findings that are not ok.
    fn problems(report: &StatusReport) -> Vec<(Level, &'static str)> {
        let found = findings(report, Duration::from_secs(60), NOW);
        found.iter().filter(|one| one.level != Level::Ok).map(|one| (one.level, one.subject)).collect()
    }

    #[test]
    fn each_problem_has_its_level_and_subject() {
        type Change = fn(&mut StatusReport);
        assert_eq!(problems(&healthy()), []);
        let cases: &[(Change, &[(Level, &str)])] = &[
            (|report| report.rings[0].leader = None, &[(Level::Fail, "rings")]),
            (|report| report.rings[0].pointer_lag_seconds = 9.0, &[(Level::Fail, "rings")]),
            (|report| report.rings[0].waits = Some(String::from("no majority")), &[(Level::Fail, "rings")]),
            (|report| report.certificate_expiry = Some(1), &[(Level::Fail, "certificate")]),
            (
                |report| report.certificate_expiry = Some(NOW.cast_signed() + 86_400),
                &[(Level::Warn, "certificate")],
            ),
            (|report| report.certificate_expiry = Some(i64::MAX), &[]),
            (|report| report.journal = Some(JournalStatus::default()), &[]),
            (
                |report| report.journal = Some(JournalStatus { is_refusing: true, ..JournalStatus::default() }),
                &[(Level::Fail, "journal")],
            ),
            (
                |report| report.journal = Some(JournalStatus { damaged: 1, ..JournalStatus::default() }),
                &[(Level::Warn, "journal")],
            ),
            (
                |report| report.journal = Some(JournalStatus { errors: 1, ..JournalStatus::default() }),
                &[(Level::Warn, "journal")],
            ),
            (|report| report.last_minutes.storms = 1, &[(Level::Fail, "last minutes")]),
            (|report| report.last_minutes.out_of_memory = 1, &[(Level::Fail, "redis")]),
            (
                |report| report.last_minutes.refusals.extend([(String::from("unauthenticated"), 3)]),
                &[(Level::Warn, "last minutes")],
            ),
        ];
        for (change, expected) in cases {
            let mut report = healthy();
            change(&mut report);
            assert_eq!(problems(&report), *expected);
        }
    }

    #[test]
    fn a_limit_is_near_above_four_fifths_and_reached_at_its_value() {
        for (used, expected) in [(80, None), (81, Some(Level::Warn)), (100, Some(Level::Fail))] {
            let limit = LimitReport { name: String::from("groups"), used, limit: 100 };
            let report = StatusReport { limits: vec![limit], ..healthy() };
            assert_eq!(problems(&report).first().map(|(level, _)| *level), expected, "{used}");
        }
    }

    #[test]
    fn a_group_fails_if_its_batches_are_old_and_is_a_warning_if_nobody_takes_them() {
        for (store, subscribers, outbox_batches, oldest_seconds, level) in [
            ("memory", 0, 0, 0.0, None),
            ("memory", 0, 1, 0.0, Some(Level::Warn)),
            ("memory", 0, 1, 60.0, Some(Level::Warn)),
            ("memory", 0, 1, 60.1, Some(Level::Fail)),
            ("redis", 0, 1, 60.0, None),
            ("redis", 0, 1, 60.1, Some(Level::Fail)),
            ("memory", 1, 1, 60.0, None),
            ("memory", 1, 1, 60.1, Some(Level::Fail)),
        ] {
            for group in ["default", "audit"].map(String::from) {
                let group = GroupReport { group, subscribers, outbox_batches, unacked_batches: 0, oldest_seconds };
                let report = StatusReport { store: String::from(store), groups: vec![group], ..healthy() };
                let found = problems(&report);
                assert_eq!(found.first().map(|(level, _)| *level), level, "{report:?}");
            }
        }
    }

    #[test]
    fn only_a_group_that_can_be_deleted_is_told_to_be_and_by_its_name() {
        let remedy_for = |group: &str| {
            let group = GroupReport {
                group: group.to_owned(),
                subscribers: 0,
                outbox_batches: 1,
                unacked_batches: 0,
                oldest_seconds: 61.0,
            };
            let report = StatusReport { groups: vec![group], ..healthy() };
            let found = findings(&report, Duration::from_secs(60), NOW);
            found.into_iter().find(|one| one.level == Level::Fail).expect("it is old").remedy
        };
        assert_eq!(remedy_for("default"), "start its consumers");
        assert!(remedy_for("audit").ends_with("ackwheel group delete audit"));
    }

    #[test]
    fn each_reason_of_a_refusal_has_its_remedy() {
        for reason in Reason::ALL {
            let mut report = healthy();
            report.last_minutes.refusals.extend([(reason.to_string(), 2)]);
            let found = findings(&report, Duration::from_secs(60), NOW);
            let found = found.into_iter().find(|one| one.level == Level::Warn).expect("a refusal is a warning");
            assert_eq!(found.remedy, reason.remedy(), "{found:?}");
            assert!(!found.remedy.contains("PROTOCOL"), "it is no remedy to read on: {found:?}");
        }
    }

    #[test]
    fn one_is_not_written_as_several() {
        let mut report = healthy();
        let group = |oldest_seconds| GroupReport {
            group: String::from("default"),
            subscribers: 0,
            outbox_batches: 1,
            unacked_batches: 0,
            oldest_seconds,
        };
        report.last_minutes.storms = 1;
        report.last_minutes.out_of_memory = 1;
        report.last_minutes.refusals.extend([(String::from("draining"), 1)]);
        for journal in [(1, 0), (0, 1)] {
            report.journal =
                Some(JournalStatus { damaged: journal.0, errors: journal.1, ..JournalStatus::default() });
            for groups in
                [vec![group(1.0)], vec![group(61.0)], vec![GroupReport { outbox_batches: 0, ..group(0.0) }]]
            {
                for leads in [true, false] {
                    report.groups.clone_from(&groups);
                    report.rings[0].leads = leads;
                    for Finding { text, .. } in findings(&report, Duration::from_secs(60), NOW) {
                        let one = text.split(' ').skip_while(|word| *word != "1").nth(1).unwrap_or("x");
                        assert!(!one.ends_with('s'), "{text}");
                    }
                }
            }
        }
    }

    #[test]
    fn several_versions_and_settings_that_lose_messages_are_warnings() {
        let version = |name: &str, version: &str| (name.to_owned(), version.to_owned());
        let mut report = healthy();
        report.shared_store.sidecars = BTreeMap::from([version("a", "1.0.0"), version("b", "1.0.0")]);
        assert_eq!(problems(&report), []);
        let warnings = BTreeMap::from([(String::from("it evicts; set noeviction"), vec![String::from("r:1")])]);
        let sidecars = BTreeMap::from([version("a", "1.0.0"), version("b", "1.1.0")]);
        report.shared_store = StoreReport { warnings, sidecars, servers: Vec::new() };
        assert_eq!(problems(&report), [(Level::Warn, "redis"), (Level::Warn, "versions")]);
    }
}
