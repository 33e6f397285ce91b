//! examples/deploy/kubernetes.yaml is right as far as this machine can tell: it parses, its settings are settings of ackwheel,
//! and its probes, times and rights fit the program. Nothing is sent to a cluster.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use crate::support::deployed;
use crate::support::kubernetes::{
    Container, Document, NetworkPolicySpec, PodMonitorSpec, PodTemplate, Probe, Source, Variable,
};
use crate::support::sidecar::Sidecar;

/// The longest that the program takes from SIGTERM to its end, in seconds.
const DRAIN: u64 = 10;

/// How long the program waits for Redis at its start, in seconds.
const START: u64 = 10;

fn text() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/deploy/kubernetes.yaml")).unwrap()
}

fn kubernetes() -> (PodTemplate, NetworkPolicySpec, PodMonitorSpec) {
    let documents: Vec<Document> = serde_saphyr::from_multiple(&text()).unwrap();
    let Ok([deployment, policy, monitor]) = <[Document; 3]>::try_from(documents) else { panic!("three") };
    let Document::Deployment { api_version, spec, metadata } = deployment else { panic!("{deployment:?}") };
    assert_eq!((&*api_version, metadata.name.is_some(), spec.replicas > 1), ("apps/v1", true, true));
    assert_eq!(spec.selector.match_labels, spec.template.metadata.labels);
    let Document::NetworkPolicy { api_version, metadata, spec: policy } = policy else { panic!("{policy:?}") };
    assert_eq!((&*api_version, metadata.name.is_some()), ("networking.k8s.io/v1", true));
    let Document::PodMonitor { api_version, metadata, spec: monitor } = monitor else { panic!("{monitor:?}") };
    assert_eq!(api_version, "monitoring.coreos.com/v1");
    assert!(metadata.name.is_some_and(|name| name.contains("ackwheel")), "the dashboards know the job by it");
    (spec.template, policy, monitor)
}

#[test]
fn the_pod_stops_its_sidecar_last_and_leaves_it_time() {
    let (template, ..) = kubernetes();
    let pod = template.spec;
    let [sidecar] = &pod.init_containers[..] else { panic!("one sidecar") };
    assert_eq!(sidecar.restart_policy.as_deref(), Some("Always"), "it would be waited for, as an init container");
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!((&*sidecar.name, &sidecar.image), ("ackwheel", &format!("ackwheel:{version}")));
    assert!(sidecar.lifecycle.is_none(), "it is stopped after the others: there is nothing to wait for");
    let hook = pod.containers[0].lifecycle.as_ref().map_or(0, |lifecycle| lifecycle.pre_stop.sleep.seconds);
    assert!(pod.termination_grace_period_seconds > DRAIN + hook, "the drain is cut short");
    assert!(!sidecar.resources.limits.contains_key("cpu"), "a throttled process stalls");
    assert!(
        !pod.automount_service_account_token && !pod.enable_service_links && pod.security_context.run_as_non_root
    );
    assert_eq!(pod.security_context.seccomp_profile.r#type, "RuntimeDefault");
    for container in pod.init_containers.iter().chain(&pod.containers) {
        let context = &container.security_context;
        assert!(context.run_as_user > 0 && context.run_as_group > 0 && context.read_only_root_filesystem);
        assert!(!context.allow_privilege_escalation && context.capabilities.drop == ["ALL"]);
        assert!(
            container.resources.requests.contains_key("cpu") && container.resources.limits.contains_key("memory")
        );
    }
}

#[test]
fn the_probes_ask_what_the_sidecar_answers() {
    let (template, _, monitor) = kubernetes();
    let sidecar = &template.spec.init_containers[0];
    let admin: SocketAddr = sidecar.value("ACKWHEEL_ADMIN").parse().unwrap();
    assert!(!admin.ip().is_loopback(), "the kubelet comes from outside");
    let port = &sidecar.ports.as_ref().unwrap()[0];
    assert_eq!(port.container_port, admin.port());
    let serving = Sidecar::start(&[]);
    let ask = |probe: &Option<Probe>, path: &str| {
        let probe = probe.as_ref().unwrap_or_else(|| panic!("no probe of {path}"));
        assert_eq!((&*probe.http_get.path, &probe.http_get.port), (path, &port.name));
        // The answer of /livez may wait a tenth of a second for a second look.
        assert!(probe.timeout_seconds >= 1 && probe.period_seconds >= 1);
        assert_eq!(serving.get(path).0, 200);
        probe.period_seconds * probe.failure_threshold
    };
    assert!(ask(&sidecar.startup_probe, "/livez") > START, "Redis is waited for that long");
    assert!(ask(&sidecar.liveness_probe, "/livez") >= ackwheel::ticker::LIVENESS.as_secs());
    let patience = ask(&sidecar.readiness_probe, "/readyz");
    assert!(patience >= 60, "a Redis that is away for a moment takes every logic node out of service at once");

    assert_eq!(monitor.selector.match_labels, template.metadata.labels);
    let [endpoint] = &monitor.pod_metrics_endpoints[..] else { panic!("one endpoint") };
    assert_eq!((&endpoint.port, serving.get(&endpoint.path).0), (&port.name, 200));
    let times =
        [&endpoint.scrape_timeout, &endpoint.interval].map(|time| humantime::parse_duration(time).unwrap());
    assert!(times[0] <= times[1]);
    let annotations = template.metadata.annotations.unwrap();
    assert_eq!(annotations["prometheus.io/port"], admin.port().to_string());
    assert_eq!(annotations["prometheus.io/path"], endpoint.path);
}

#[test]
fn the_containers_of_the_pod_agree_on_address_and_token() {
    let (template, ..) = kubernetes();
    let pod = &template.spec;
    let (sidecar, logic_node) = (&pod.init_containers[0], &pod.containers[0]);
    assert_eq!(logic_node.value("ACKWHEEL_ADDR"), sidecar.value("ACKWHEEL_LISTEN"));
    let [token_volume, store_volume] = &pod.volumes[..] else { panic!("two volumes") };
    for volume in [token_volume, store_volume] {
        // Kubernetes adds the right to read for the group of the pod.
        assert_eq!(volume.secret.default_mode, 0o400, "group {} reads it", pod.security_context.fs_group);
    }
    let token_item = &token_volume.secret.items[0];
    for container in [sidecar, logic_node] {
        let mount = &container.volume_mounts[0];
        assert!(mount.name == token_volume.name && mount.read_only);
        assert_eq!(container.value("ACKWHEEL_TOKEN_FILE"), format!("{}/{}", mount.mount_path, token_item.path));
    }
    let (store_item, mount) = (&store_volume.secret.items[0], &sidecar.volume_mounts[1]);
    assert!(mount.name == store_volume.name && mount.read_only);
    assert_eq!(logic_node.volume_mounts.len(), 1, "the logic node does not get the password of Redis");

    // The command that makes the secret names its keys, and the content of the configuration.
    let text = text();
    assert_eq!(token_volume.secret.secret_name, store_volume.secret.secret_name);
    assert!(text.contains(&format!("create secret generic {}", token_volume.secret.secret_name)));
    assert!(text.contains(&format!("--from-literal={}=", token_item.key)));
    let (_, content) = text.split_once(&format!("--from-literal={}=\"", store_item.key)).expect("a command");
    let (content, _) = content.split_once('"').unwrap();

    let folder = tempfile::tempdir().unwrap();
    let (token, config) = (folder.path().join("token"), folder.path().join("ackwheel.toml"));
    fs::write(&token, "secret").unwrap();
    fs::write(&config, content).unwrap();
    let in_pod = format!("{}/{}", mount.mount_path, store_item.path);
    let arguments: Vec<&str> = sidecar.args.as_ref().unwrap().iter().map(String::as_str).collect();
    assert_eq!(arguments[1..], ["--config", &in_pod]);
    let arguments = [arguments[0], arguments[1], config.to_str().unwrap()];
    deployed::assert_right(&arguments, &environment(sidecar, &token));
}

/// The environment of a container as a node would make it; what the manifest takes from elsewhere is made up.
fn environment(container: &Container, token: &Path) -> BTreeMap<String, String> {
    let value = |variable: &Variable| match (&variable.value, &variable.value_from) {
        (Some(_), None) if variable.name == "ACKWHEEL_TOKEN_FILE" => token.to_str().unwrap().to_owned(),
        (Some(value), None) => value.clone(),
        (None, Some(Source { field_ref: from })) => {
            assert_eq!(from.field_path, "metadata.name");
            String::from("logic-node-5d9c")
        }
        _ => panic!("{variable:?} has not one value"),
    };
    container.env.iter().map(|variable| (variable.name.clone(), value(variable))).collect()
}

#[test]
fn the_network_policy_admits_labelled_clients_and_prometheus_only() {
    let (template, policy, _) = kubernetes();
    assert_eq!(policy.pod_selector.match_labels, template.metadata.labels);
    assert_eq!(policy.policy_types, ["Ingress"]);
    let sidecar = &template.spec.init_containers[0];
    let listen: SocketAddr = sidecar.value("ACKWHEEL_LISTEN").parse().unwrap();
    let admin = &sidecar.ports.as_ref().unwrap()[0].name;
    let mut of_clients = 0;
    for rule in &policy.ingress {
        let [port] = &rule.ports[..] else { panic!("{rule:?}") };
        assert_eq!(port.protocol, "TCP");
        let Some([peer]) = rule.from.as_deref() else {
            // The logic node's own port, which is no port of the sidecar.
            let own = &template.spec.containers[0].ports.as_ref().unwrap()[0].name;
            assert_eq!(port.port, **own, "open to all: {rule:?}");
            of_clients += 1;
            continue;
        };
        assert!(!peer.pod_selector.as_ref().expect("named pods").match_labels.is_empty());
        if port.port == **admin {
            assert!(peer.namespace_selector.as_ref().is_some_and(|selector| !selector.match_labels.is_empty()));
        } else {
            assert_eq!(port.port, listen.port());
        }
    }
    assert_eq!((of_clients, policy.ingress.len()), (1, 3));
}
