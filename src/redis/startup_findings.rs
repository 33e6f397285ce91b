//! Checks every Redis that has a ring, at the start and then once a minute, and warns of what is new.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redis::AsyncConnectionConfig;
use tracing::warn;

use crate::clock::Clock;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::options::{CHECK_PATIENCE, CONNECT_TIMEOUT};
use crate::redis::startup_checks;
use crate::redis::store::{RedisStoreError, START_PATIENCE, hint};
use crate::redis::topology::Topology;
use crate::redis::topology::cluster::Slot;

/// How often a Redis that is not there yet is tried.
const START_RETRY: Duration = Duration::from_millis(200);

/// How often the checks are repeated.
const REPEAT_EVERY: Duration = Duration::from_secs(60);

/// What is unwise, and where.
type Findings = BTreeMap<String, Vec<String>>;

/// The checks of all nodes that have one of these slots.
pub(super) struct Checks {
    pub(super) place: Arc<Topology>,
    pub(super) slots: Vec<Slot>,
    pub(super) clock: Arc<Clock>,
    /// The default one.
    pub(super) ack_timeout: Duration,
}

impl Checks {
    /// Waits for Redis, checks it, and warns. A wrong password does not become right by waiting.
    pub(super) async fn first(&self) -> Result<Findings, RedisStoreError> {
        let mut cause = None;
        let reached = async {
            loop {
                match self.once().await {
                    Ok(checked) => return checked.map_err(RedisStoreError::Unusable),
                    Err(fault) if fault.kind == FaultKind::Forbidden => {
                        return Err(RedisStoreError::Unusable(fault.with_remedy()));
                    }
                    Err(fault) => {
                        if cause.replace(fault.text.clone()).is_none() {
                            warn!(
                                cause = fault.text,
                                "Redis cannot be reached; trying for {START_PATIENCE:?}: {}",
                                hint(&fault.text)
                            );
                        }
                    }
                }
                tokio::time::sleep(START_RETRY).await;
            }
        };
        let findings = tokio::time::timeout(START_PATIENCE, reached).await.unwrap_or_else(|_| {
            Err(RedisStoreError::Unreachable(cause.unwrap_or_else(|| String::from("no answer"))))
        })?;
        warn_of(new(&findings, &Findings::new()));
        Ok(findings)
    }

    /// Repeats the checks: settings change, and another Redis may have taken over.
    pub(super) async fn repeat(self, mut known: Findings) {
        loop {
            tokio::time::sleep(REPEAT_EVERY).await;
            // A Redis that cannot be reached is reported by the links.
            let Ok(checked) = self.once().await else { continue };
            let findings = checked.unwrap_or_else(|text| Findings::from([(text, Vec::new())]));
            warn_of(new(&findings, &known));
            known = findings;
        }
    }

    async fn once(&self) -> Result<Result<Findings, String>, Fault> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(CHECK_PATIENCE));
        let (views, mut nodes, mut findings) =
            (self.place.look(&self.clock).await?, BTreeMap::new(), Findings::new());
        for slot in &self.slots {
            let node = self.place.owner(&views, *slot)?;
            nodes.insert(node.to_string(), node);
        }
        for (name, node) in nodes {
            let mut connection = node.connect(&config, "checks").await?;
            let may_be_replaced = self.place.several().is_some();
            match startup_checks::check(&mut connection, may_be_replaced, self.ack_timeout).await? {
                Ok(texts) => {
                    for text in texts {
                        findings.entry(text).or_default().push(name.clone());
                    }
                }
                Err(text) => return Ok(Err(format!("{name}: {text}"))),
            }
        }
        Ok(Ok(findings))
    }
}

/// What was not known of all these nodes before.
fn new<'a>(findings: &'a Findings, known: &'a Findings) -> impl Iterator<Item = (&'a String, &'a Vec<String>)> {
    findings.iter().filter(|(text, nodes)| {
        known.get(*text).is_none_or(|before| nodes.iter().any(|node| !before.contains(node)))
    })
}

fn warn_of<'a>(findings: impl Iterator<Item = (&'a String, &'a Vec<String>)>) {
    for (text, nodes) in findings {
        warn!(redis = nodes.join(", "), "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_new_once_at_each_node_and_again_when_it_comes_back() {
        let findings = |pairs: &[(&str, &[&str])]| -> Findings {
            let owned = |nodes: &[&str]| nodes.iter().map(|node| (*node).to_owned()).collect();
            pairs.iter().map(|(text, nodes)| ((*text).to_owned(), owned(nodes))).collect()
        };
        let texts = |found: &Findings, known: &Findings| -> Vec<String> {
            new(found, known).map(|(text, _)| text.clone()).collect()
        };
        let first = findings(&[("evicts", &["a"]), ("forgets", &["a", "b"])]);
        assert_eq!(texts(&first, &Findings::new()), ["evicts", "forgets"]);
        assert!(texts(&first, &first).is_empty());
        let more = findings(&[("evicts", &["a", "b"]), ("forgets", &["a"])]);
        assert_eq!(texts(&more, &first), ["evicts"]);
        assert_eq!(texts(&first, &more), ["forgets"], "it had gone at a node");
    }
}
