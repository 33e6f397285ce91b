//! Asks a Redis Sentinel for the primary.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use redis::{ErrorKind, FromRedisValue, RedisError, RedisResult, ServerErrorKind, Value};

use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::topology::endpoint::Endpoint;
use crate::redis::topology::majority::{LONGEST, NodeEntry, View};
use crate::redis::topology::nodes::{Found, Node};

/// Flags of a primary that does not answer the Sentinel, or that is being replaced.
const DOUBTS: [&str; 4] = ["disconnected", "s_down", "o_down", "failover_in_progress"];

/// The maximum number of other Sentinels that one Sentinel may report.
const MAX_SENTINELS: usize = 100;

/// The description of a Redis or of a Sentinel in the answer to a SENTINEL command: fields by name.
type Instance = HashMap<String, String>;

/// Asks a Sentinel which Redis is the primary with the name `master`. `asked_at` is the current time.
///
/// Two commands return the address. While a Sentinel leads a failover and redirects replicas to the new primary, its
/// answer to SENTINEL MASTER contains the new epoch, but still the old address. So this function uses the address from
/// GET-MASTER-ADDR-BY-NAME, and the address from SENTINEL MASTER only if the other command is forbidden.
pub(crate) async fn ask(
    node: &Node,
    master: &str,
    primary_template: &Endpoint,
    sentinel_template: &Endpoint,
    asked_at: Instant,
) -> Result<View, Fault> {
    let mut commands = redis::pipe();
    for subcommand in ["MASTER", "GET-MASTER-ADDR-BY-NAME", "SENTINELS"] {
        commands.cmd("SENTINEL").arg(subcommand).arg(master);
    }
    commands.cmd("SENTINEL").arg("MYID").ignore_errors();
    let fault = |error: RedisError| {
        let is_unknown_name = error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError)
            && error.detail().is_some_and(|detail| detail.contains("No such master"));
        let mut fault = Fault::from(error);
        if is_unknown_name {
            fault.text = format!("knows no primary {master:?}");
        }
        fault.at(node.address())
    };
    let mut answers = node.ask(&commands).await.map_err(fault)?.into_iter();
    let mut answer = || answers.next().expect("each command has an answer");
    let primary: Instance = read(answer()).map_err(fault)?;
    let known = address_of(&primary);
    let address = match read::<Option<(String, u16)>>(answer()).map_err(fault) {
        // The user of this sidecar at the Sentinel may lack the permission for this command.
        Err(fault) if fault.kind == FaultKind::Forbidden => known.clone(),
        answered => answered?,
    };
    let endpoint = address.as_ref().map(|(host, port)| primary_template.at(host, *port));
    let endpoint = endpoint.ok_or_else(|| {
        Fault::new(FaultKind::Other, "names a primary whose address ackwheel cannot parse").at(node.address())
    })?;
    let number = |name: &str| primary.get(name).and_then(|number| number.parse::<u64>().ok());
    // If the addresses differ, flags and times in the answer to SENTINEL MASTER describe the previous primary, and are
    // not used.
    let is_of_this = address == known;
    let has_doubts = |flags: &String| flags.split(',').any(|flag| DOUBTS.contains(&flag));
    let is_doubted = is_of_this && primary.get("flags").is_some_and(has_doubts);
    let unanswered = number("last-ping-sent").filter(|_| is_of_this).unwrap_or_default();
    let timer = number("down-after-milliseconds").map_or(LONGEST, Duration::from_millis);
    let found = Found { endpoint, config_epoch: number("config-epoch").unwrap_or_default(), node: None };
    let others: Vec<Instance> = read(answer()).unwrap_or_default();
    let other_sentinels = endpoints(&others, sentinel_template)
        .map_err(|why| Fault::new(FaultKind::Other, why).at(node.address()))?;
    Ok(View {
        address: node.address().to_string(),
        id: read(answer()).unwrap_or_else(|_| node.address().to_string()),
        asked_at,
        votes: true,
        voters: 1 + usize::try_from(number("num-other-sentinels").unwrap_or_default()).unwrap_or_default(),
        entries: vec![NodeEntry::of_all_slots(found, is_doubted)],
        good_for: timer.saturating_sub(Duration::from_millis(unanswered)).min(LONGEST),
        knows: other_sentinels,
    })
}

/// Returns the endpoints of other Sentinels. Returns an error if there are too many: each may be asked, and gets the
/// password of the Sentinels.
fn endpoints(others: &[Instance], template: &Endpoint) -> Result<Vec<Endpoint>, String> {
    if others.len() > MAX_SENTINELS {
        return Err(format!("reports more than {MAX_SENTINELS} other Sentinels, so its answer is refused"));
    }
    let other = |instance| {
        let (host, port) = address_of(instance)?;
        Some(template.at(&host, port))
    };
    Ok(others.iter().filter_map(other).collect())
}

fn read<T: FromRedisValue>(answer: RedisResult<Value>) -> RedisResult<T> {
    Ok(T::from_redis_value(answer?)?)
}

fn address_of(instance: &Instance) -> Option<(String, u16)> {
    Some((instance.get("ip")?.clone(), instance.get("port")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    #[test]
    fn an_answer_with_too_many_sentinels_is_refused() {
        let template = Endpoint::new("redis://me:secret@unknown/".into_connection_info().unwrap());
        let sentinel = |port: u16| {
            [("ip", String::from("10.0.0.1")), ("port", port.to_string())]
                .map(|(name, value)| (name.to_owned(), value))
                .into()
        };
        let others: Vec<Instance> = (1..=101).map(sentinel).collect();
        assert_eq!(endpoints(&others[..100], &template).unwrap().len(), 100);
        assert!(endpoints(&others, &template).err().unwrap().contains("more than 100 other Sentinels"));
    }
}
