//! The part of Kubernetes' types that the manifest uses, each field under its published name. An unknown one is refused, so a
//! misspelt field, which an API server would drop with a warning, is an error here.
#![expect(clippy::struct_field_names, reason = "the names are those of Kubernetes")]

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

type Map = BTreeMap<String, String>;

macro_rules! objects {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        pub struct $name { $(pub $field: $kind,)* }
    )*};
}

/// A document of the manifest, by its kind.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", deny_unknown_fields)]
pub enum Document {
    #[serde(rename_all = "camelCase")]
    Deployment { api_version: String, metadata: Metadata, spec: DeploymentSpec },
    #[serde(rename_all = "camelCase")]
    NetworkPolicy { api_version: String, metadata: Metadata, spec: NetworkPolicySpec },
    #[serde(rename_all = "camelCase")]
    PodMonitor { api_version: String, metadata: Metadata, spec: PodMonitorSpec },
}

objects! {
    Metadata { name: Option<String>, labels: Map, annotations: Option<Map>, }

    DeploymentSpec { replicas: u32, selector: Selector, template: PodTemplate, }
    Selector { match_labels: Map, }
    PodTemplate { metadata: Metadata, spec: PodSpec, }
    PodSpec {
        termination_grace_period_seconds: u64,
        automount_service_account_token: bool,
        enable_service_links: bool,
        security_context: PodSecurityContext,
        init_containers: Vec<Container>,
        containers: Vec<Container>,
        volumes: Vec<Volume>,
    }
    PodSecurityContext { run_as_non_root: bool, fs_group: u32, seccomp_profile: SeccompProfile, }
    SeccompProfile { r#type: String, }

    Container {
        name: String,
        image: String,
        restart_policy: Option<String>,
        args: Option<Vec<String>>,
        env: Vec<Variable>,
        ports: Option<Vec<Port>>,
        startup_probe: Option<Probe>,
        liveness_probe: Option<Probe>,
        readiness_probe: Option<Probe>,
        lifecycle: Option<Lifecycle>,
        resources: Resources,
        security_context: SecurityContext,
        volume_mounts: Vec<Mount>,
    }
    Variable { name: String, value: Option<String>, value_from: Option<Source>, }
    Source { field_ref: Field, }
    Field { field_path: String, }
    Port { name: String, container_port: u16, }
    Probe {
        http_get: HttpGet,
        period_seconds: u64,
        timeout_seconds: u64,
        failure_threshold: u64,
    }
    HttpGet { path: String, port: String, }
    Lifecycle { pre_stop: Hook, }
    Hook { sleep: Sleep, }
    Sleep { seconds: u64, }
    Resources { requests: Map, limits: Map, }
    SecurityContext {
        run_as_user: u32,
        run_as_group: u32,
        allow_privilege_escalation: bool,
        read_only_root_filesystem: bool,
        capabilities: Capabilities,
    }
    Capabilities { drop: Vec<String>, }
    Mount { name: String, mount_path: String, read_only: bool, }
    Volume { name: String, secret: Secret, }
    Secret { secret_name: String, items: Vec<Item>, default_mode: u32, }
    Item { key: String, path: String, }

    NetworkPolicySpec { pod_selector: Selector, policy_types: Vec<String>, ingress: Vec<Ingress>, }
    Ingress { from: Option<Vec<Peer>>, ports: Vec<PolicyPort>, }
    Peer { namespace_selector: Option<Selector>, pod_selector: Option<Selector>, }
    PolicyPort { port: Value, protocol: String, }

    /// Of the Prometheus operator.
    PodMonitorSpec { selector: Selector, pod_metrics_endpoints: Vec<Endpoint>, }
    Endpoint { port: String, path: String, interval: String, scrape_timeout: String, }
}

impl Container {
    /// The value of a variable that is written in the manifest.
    #[track_caller]
    pub fn value(&self, name: &str) -> &str {
        let variable = self.env.iter().find(|variable| variable.name == name);
        variable.and_then(|variable| variable.value.as_deref()).unwrap_or_else(|| panic!("no value of {name}"))
    }
}
