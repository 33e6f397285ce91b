//! Sentinels: who of several Redis is the primary. The one counts that has heard of the latest failover.

use std::collections::HashMap;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::fault::{Fault, FaultKind};
use super::nodes::{Found, Manner, Node, answers, together};

/// The Sentinels that `--store` names, and what they are asked.
pub(super) struct Sentinels {
    pub(super) nodes: Vec<Node>,
    /// The name of the primary, as they have it.
    pub(super) master: String,
    pub(super) manner: Manner,
}

impl Sentinels {
    /// The primary.
    pub(super) async fn primary(&self) -> Result<Found, Fault> {
        let told = answers(self.nodes.iter().map(|node| self.ask(node))).await;
        let told = told.map_err(|faults| {
            let fault = together(&faults, &format!("no Sentinel names the primary {:?}", self.master));
            let whose = "theirs are sentinel_user and sentinel_password in --store";
            match fault.kind {
                FaultKind::Forbidden => Fault { text: format!("{}; {whose}", fault.text), ..fault },
                _ => fault,
            }
        })?;
        Ok(told.into_iter().max_by_key(|found| found.config_epoch).expect("somebody answered"))
    }

    async fn ask(&self, node: &Node) -> Result<Found, Fault> {
        let mut command = redis::cmd("SENTINEL");
        command.arg("MASTER").arg(&self.master);
        let told: HashMap<String, String> = node.ask(&command).await.map_err(|error| {
            let is_unknown = is_unknown_name(&error);
            let Fault { kind, text } = Fault::from(error);
            let text = if is_unknown { format!("knows no primary {:?}", self.master) } else { text };
            Fault { kind, text: format!("{node}: {text}") }
        })?;
        let number = |name: &str| told.get(name).and_then(|value| value.parse::<u64>().ok());
        let port = number("port").and_then(|port| u16::try_from(port).ok());
        let client = told.get("ip").zip(port).and_then(|(host, port)| self.manner.at(host, port).ok());
        let client = client.ok_or_else(|| Fault {
            kind: FaultKind::Other,
            text: format!("{node}: its answer to SENTINEL MASTER is not understood"),
        })?;
        Ok(Found { client, config_epoch: number("config-epoch").unwrap_or_default(), node: None })
    }
}

fn is_unknown_name(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError)
        && error.detail().is_some_and(|detail| detail.contains("No such master"))
}
