//! `ackwheel namespace delete`: removes a namespace that no sidecar uses, and nothing else.

use crate::support::cluster::Cluster;
use crate::support::frames;
use crate::support::process::{Run, assert_names, program};
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve_at};

const IM: [&str; 4] = ["--namespace", "im", "--rings", "3"];

fn delete(store: &str, namespace: &str, flags: &[&str]) -> Run {
    let words = ["namespace", "delete", "--store", store, "--namespace", namespace];
    Run::of(program(&words).args(flags))
}

fn add_to(sidecar: &Sidecar) {
    sidecar.connect().ask(&frames::add(&(0..100).collect::<Vec<_>>(), 0, 1)).added();
}

#[test]
fn a_namespace_is_deleted_once_no_sidecar_uses_it_and_no_other_key_is() {
    let redis = Redis::start();
    let mut sidecar = Sidecar::on(&redis, "node-a", &IM);
    let other = Sidecar::on(&redis, "other", &["--namespace", "im2"]);
    add_to(&sidecar);
    add_to(&other);
    redis.command::<()>(&["SET", "{im:0}", "of somebody else"]);
    let keys = |pattern: &str| redis.command::<Vec<String>>(&["KEYS", pattern]).len();

    let refused = delete(&redis.url(), "im", &["--yes"]);
    assert_names(refused.error(1), &["sidecars of the namespace run: node-a; stop them"]);
    sidecar.terminate();
    let before = keys("{im:*}:*");
    assert!(before > 10, "{before} keys");
    let asked = delete(&redis.url(), "im", &[]);
    assert_names(
        asked.error(64),
        &[&format!("the namespace im has {before} keys, and none was removed"), "--yes"],
    );
    assert_eq!(keys("{im:*}:*"), before);

    let deleted = delete(&redis.url(), "im", &["--yes"]);
    assert_eq!(deleted.output(), format!("namespace im deleted: {before} keys removed\n"));
    assert_eq!((keys("{im:*}:*"), keys("{im:0}")), (0, 1));
    add_to(&other);
    assert_eq!(other.metrics().count("messages_in_flight"), 100, "the other namespace is as it was");
    assert_names(delete(&redis.url(), "im", &["--yes"]).error(1), &["there is no namespace im"]);
}

#[test]
fn a_sidecar_that_was_killed_keeps_no_namespace() {
    let redis = Redis::start();
    let mut sidecar = Sidecar::on(&redis, "killed", &IM);
    add_to(&sidecar);
    sidecar.kill();
    assert_names(delete(&redis.url(), "im", &["--yes"]).output(), &["namespace im deleted: "]);
    assert_eq!(redis.dbsize(), 0);
}

#[test]
fn the_rings_on_all_nodes_of_a_cluster_are_deleted() {
    let cluster = Cluster::start();
    let store = Cluster::store(&cluster.primaries[..1]);
    let flags = ["--namespace", "im", "--rings", "16"];
    let mut sidecar = Sidecar::spawn(&mut serve_at(&store, "only", &flags)).once_ready();
    add_to(&sidecar);
    sidecar.terminate();
    assert!(cluster.primaries.iter().all(|node| node.dbsize() > 0));
    assert_names(delete(&store, "im", &["--yes"]).output(), &["namespace im deleted: "]);
    let left: Vec<u64> = cluster.primaries.iter().map(Redis::dbsize).collect();
    assert_eq!(left, [0, 0, 0]);
}

#[test]
fn what_is_no_redis_has_no_namespace() {
    assert_names(delete("memory", "im", &["--yes"]).error(64), &["--store memory", "name a Redis"]);
    assert_names(delete("redis-sentinel://x", "im", &["--yes"]).error(64), &["--store", "?master=NAME"]);
    let unreachable = delete("redis://me:secret@127.0.0.1:9/0", "im", &["--yes"]);
    let text = unreachable.error(1);
    assert_names(text, &["--store redis://***@127.0.0.1:9/0: "]);
    assert!(!text.contains("secret"), "{text}");
    assert_names(
        Run::of(&mut program(&["namespace", "delete", "--store", "redis://h/"])).error(64),
        &["--namespace"],
    );
}
