//! The alerts, fired by a real Prometheus when what they speak of happens to real sidecars.
//!
//! The rules are those of the repository, sixty times as fast (`support::prometheus::hurried`): the thresholds are the
//! same, and every `for:` and every range is a sixtieth of what it is.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Programs, exported, promql};
use crate::support::flow::{Flow, Plan};
use crate::support::frames;
use crate::support::prometheus::{Alert, Prometheus};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::{wait_for, wait_until};

/// The alerts, by the names that routes and silences hold.
pub const NAMES: [&str; 20] = [
    "AckwheelJournalRefuses",
    "AckwheelDown",
    "AckwheelRestarting",
    "AckwheelNoLeader",
    "AckwheelNoMajority",
    "AckwheelPointerLag",
    "AckwheelWheelSlow",
    "AckwheelLeaderFlapping",
    "AckwheelOutboxGrowing",
    "AckwheelOutboxDroppedIds",
    "AckwheelStorm",
    "AckwheelMostTimeOut",
    "AckwheelLateAcksRising",
    "AckwheelRedisErrors",
    "AckwheelRefusesAdds",
    "AckwheelClientsRefused",
    "AckwheelCertificateExpires",
    "AckwheelNearBounds",
    "AckwheelRedisLostWrites",
    "AckwheelStateLost",
];

const TICK: Duration = Duration::from_millis(200);
const OUTBOX_MAX_IDS: u64 = 8_000;
/// A lease that outlasts an outage, so that the leader stays, and a pointer that waits after it for so long that it is
/// behind.
const FLAGS: [&str; 14] = [
    "--tick",
    "200ms",
    "--slots",
    "5",
    "--storm-min",
    "20",
    "--storm-share",
    "0.2",
    "--outbox-max-ids",
    "8000",
    "--outage-grace",
    "6s",
    "--lease",
    "30s",
];

fn has(alert: &Alert, label: &str, value: &str) -> bool {
    alert.labels.get(label).is_some_and(|found| found == value)
}

fn firing(prometheus: &Prometheus) -> Vec<Alert> {
    prometheus.alerts().into_iter().filter(|alert| alert.state == "firing").collect()
}

/// The alert of this name with these labels, as soon as it fires.
#[track_caller]
fn wait_for_alert(prometheus: &Prometheus, name: &str, labels: &[(&str, &str)]) -> Alert {
    let alert = wait_for(name, || {
        let all = firing(prometheus).into_iter();
        let mut named = all.filter(|alert| has(alert, "alertname", name));
        named.find(|alert| labels.iter().all(|(name, value)| has(alert, name, value)))
    });
    println!("{}", alert.annotations["summary"]);
    alert
}

/// Every rule is understood and can be evaluated, asks for what exists, and every alert says what somebody needs.
fn assert_rules_are_right(prometheus: &Prometheus) {
    let rules = prometheus.rules();
    let mut known = exported();
    known.insert("up".to_owned());
    known.extend(rules.iter().filter(|rule| rule.duration.is_none()).map(|rule| rule.name.clone()));
    for rule in &rules {
        assert_eq!((rule.health.as_str(), rule.last_error.as_str()), ("ok", ""), "{}", rule.name);
        let asked: BTreeSet<String> =
            promql::selectors(&rule.query).into_iter().map(|selector| selector.metric).collect();
        let unknown: Vec<&String> = asked.difference(&known).collect();
        assert!(!asked.is_empty() && unknown.is_empty(), "{}: {unknown:?} of {}", rule.name, rule.query);
        if rule.duration.is_some() {
            let severity = rule.labels.get("severity").map(String::as_str);
            assert!(matches!(severity, Some("critical" | "warning")), "{}: {severity:?}", rule.name);
            let anchor = format!("docs/RUNBOOKS.md#{}", rule.name.to_lowercase());
            assert_eq!(rule.annotations.get("runbook_url"), Some(&anchor), "{}", rule.name);
            for text in ["summary", "description"] {
                let said = rule.annotations.get(text).map_or(0, String::len);
                assert!(said > 20, "{} has no {text}", rule.name);
            }
        }
    }
    let alerts: BTreeSet<&str> =
        rules.iter().filter(|rule| rule.duration.is_some()).map(|rule| rule.name.as_str()).collect();
    assert_eq!(alerts, BTreeSet::from(NAMES));
}

#[test]
fn alerts_fire_when_their_condition_comes_and_not_before() {
    let Some(programs) = Programs::find() else { return };
    let mut redis = Redis::start();
    let mut leader = Sidecar::on(&redis, "leader", &FLAGS);
    let follower = Sidecar::on(&redis, "follower", &[&FLAGS[..], &["--never-lead"]].concat());
    let small = Sidecar::start(&["--max-in-flight", "10"]);
    let targets = [("ackwheel", leader.admin), ("ackwheel", follower.admin), ("ackwheel-memory", small.admin)];
    let prometheus = Prometheus::start(&programs.prometheus, &targets);
    wait_until("each was scraped five times", || {
        let scraped = "sum(count_over_time(ackwheel_build_info[1m]) >= bool 5)";
        prometheus.query(scraped) == Ok(vec![vec![3.0]])
    });
    assert_rules_are_right(&prometheus);
    assert!(firing(&prometheus).is_empty(), "nothing is wrong yet: {:?}", firing(&prometheus));

    small.connect().ask(&frames::add(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 1)).added();
    let alert = wait_for_alert(&prometheus, "AckwheelNearBounds", &[("bound", "max-in-flight")]);
    assert!(alert.annotations["summary"].contains("90%"), "{alert:?}");

    overload(&prometheus, &leader, &follower);
    lose_redis(&prometheus, &mut redis, &follower);

    leader.kill();
    let alert = wait_for_alert(&prometheus, "AckwheelNoLeader", &[("job", "ackwheel")]);
    assert!(alert.annotations["description"].contains("lead 0 of 1 rings"), "{alert:?}");
    wait_for_alert(&prometheus, "AckwheelDown", &[("instance", &leader.admin.to_string())]);
}

/// Many messages time out, their Acks come late, and a group has no subscriber.
fn overload(prometheus: &Prometheus, leader: &Sidecar, follower: &Sidecar) {
    drop(leader.connect().subscribed("audit"));
    let flow = Flow::start(Plan::ten_times_a_second(TICK, 5), follower.listen, leader.listen);
    wait_for_alert(prometheus, "AckwheelStorm", &[("job", "ackwheel")]);
    let alert = wait_for_alert(prometheus, "AckwheelOutboxGrowing", &[("group", "audit")]);
    assert!(alert.annotations["description"].contains("It has 0 subscribers."), "{alert:?}");
    let growing = firing(prometheus);
    let is_growing =
        |alert: &&Alert| has(alert, "alertname", "AckwheelOutboxGrowing") && has(alert, "job", "ackwheel");
    assert_eq!(growing.iter().filter(is_growing).count(), 1, "group default has a subscriber: {growing:?}");
    let many: Vec<u64> = (1 << 40..(1 << 40) + OUTBOX_MAX_IDS).collect();
    follower.connect().ask(&frames::add(&many, 1, 1)).added();
    wait_for_alert(prometheus, "AckwheelOutboxDroppedIds", &[("job", "ackwheel")]);
    wait_for_alert(prometheus, "AckwheelLateAcksRising", &[("job", "ackwheel")]);
    drop(flow.finish());
}

/// Redis answers nothing for a while, then refuses to move the pointer, and then comes back without its data.
fn lose_redis(prometheus: &Prometheus, redis: &mut Redis, follower: &Sidecar) {
    redis.stop();
    wait_for_alert(prometheus, "AckwheelRedisErrors", &[("severity", "critical")]);
    let leaderless = firing(prometheus).into_iter().filter(|alert| has(alert, "alertname", "AckwheelNoLeader"));
    assert_eq!(leaderless.count(), 0, "one fault is one page");
    redis.go_on();
    // A command that only the move of the pointer needs, and what is not urgent.
    wait_until("Redis takes commands", || {
        redis.try_command::<()>(&["ACL", "SETUSER", "default", "-hlen"]).is_ok()
    });
    wait_for_alert(prometheus, "AckwheelPointerLag", &[("job", "ackwheel")]);
    redis.restart_empty();
    follower.wait_until_ready();
    wait_for_alert(prometheus, "AckwheelStateLost", &[("job", "ackwheel")]);
    wait_until("somebody leads the new ring", || follower.leader().is_some());
}
