//! Sentinels: who of several Redis is the primary. The one counts that has heard of the latest failover.

use std::collections::HashMap;

use redis::{ErrorKind, FromRedisValue, RedisError, ServerErrorKind};

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

    /// The epoch first, and then the address: a failover in between makes the address later than its epoch, which is no
    /// harm. The two of SENTINEL MASTER do not belong together at the Sentinel that leads a failover: while it has replicas
    /// follow the new primary, it has the new epoch and the address of before.
    async fn ask(&self, node: &Node) -> Result<Found, Fault> {
        let told: HashMap<String, String> = self.ask_for(node, "MASTER").await?;
        let address = match self.ask_for::<Option<(String, u16)>>(node, "GET-MASTER-ADDR-BY-NAME").await {
            // A user of earlier versions may not ask that.
            Err(fault) if fault.kind == FaultKind::Forbidden => {
                told.get("ip").cloned().zip(told.get("port").and_then(|port| port.parse().ok()))
            }
            answered => answered?,
        };
        let client = address.and_then(|(host, port)| self.manner.at(&host, port).ok());
        let client = client.ok_or_else(|| Fault {
            kind: FaultKind::Other,
            text: format!("{node}: where it says that the primary is, is not understood"),
        })?;
        let config_epoch = told.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or_default();
        Ok(Found { client, config_epoch, node: None })
    }

    async fn ask_for<T: FromRedisValue>(&self, node: &Node, what: &str) -> Result<T, Fault> {
        let mut command = redis::cmd("SENTINEL");
        command.arg(what).arg(&self.master);
        node.ask(&command).await.map_err(|error| {
            let is_unknown = is_unknown_name(&error);
            let Fault { kind, text } = Fault::from(error);
            let text = if is_unknown { format!("knows no primary {:?}", self.master) } else { text };
            Fault { kind, text: format!("{node}: {text}") }
        })
    }
}

fn is_unknown_name(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError)
        && error.detail().is_some_and(|detail| detail.contains("No such master"))
}
