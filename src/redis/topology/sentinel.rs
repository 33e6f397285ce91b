//! Sentinels: who of several Redis is the primary.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use redis::{Client, ErrorKind, FromRedisValue, RedisError, RedisResult, ServerErrorKind, Value};

use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::topology::cluster::Map;
use crate::redis::topology::majority::{LONGEST, View};
use crate::redis::topology::nodes::{Found, Manner, Node, Nodes};

/// What a Sentinel says of a primary that it does not hear, or that it is replacing.
const DOUBTS: [&str; 4] = ["disconnected", "s_down", "o_down", "failover_in_progress"];

/// The Sentinels, and what they are asked.
pub(crate) struct Sentinels {
    pub(crate) nodes: Nodes,
    /// How one that others know is spoken to.
    pub(crate) among_them: Manner,
    /// The name of the primary, as they have it.
    pub(crate) master: String,
    pub(crate) manner: Manner,
}

/// What SENTINEL tells of an instance, by the names of its fields.
type Instance = HashMap<String, String>;

impl Sentinels {
    /// What a Sentinel says, and what it calls itself.
    ///
    /// The two of SENTINEL MASTER, address and epoch, do not belong together at the Sentinel that leads a failover: while
    /// it has replicas follow the new primary, it has the new epoch and the address of before.
    pub(crate) async fn ask(&self, node: &Node, asked_at: Instant) -> Result<(String, View), Fault> {
        let mut commands = redis::pipe();
        for what in ["MASTER", "GET-MASTER-ADDR-BY-NAME", "SENTINELS"] {
            commands.cmd("SENTINEL").arg(what).arg(&self.master);
        }
        commands.cmd("SENTINEL").arg("MYID").ignore_errors();
        let mut answers = node.ask(&commands).await.map_err(|error| self.fault(node, error))?.into_iter();
        let mut answer = || answers.next().expect("each command has an answer");
        let primary: Instance = read(answer()).map_err(|error| self.fault(node, error))?;
        let known = address(&primary);
        let address = match read::<Option<(String, u16)>>(answer()).map_err(|error| self.fault(node, error)) {
            // A user of earlier versions may not ask that.
            Err(fault) if fault.kind == FaultKind::Forbidden => known.clone(),
            answered => answered?,
        };
        let client = address.as_ref().and_then(|(host, port)| self.manner.at(host, *port).ok());
        let client = client.ok_or_else(|| Fault {
            kind: FaultKind::Other,
            text: format!("{node}: where it says that the primary is, is not understood"),
        })?;
        let number = |name: &str| primary.get(name).and_then(|number| number.parse::<u64>().ok());
        // What it has of the primary is about the one of before, where it names another.
        let is_of_this = address == known;
        let is_doubted = is_of_this && primary.get("flags").is_some_and(|flags| has_doubts(flags));
        let unanswered = number("last-ping-sent").filter(|_| is_of_this).unwrap_or_default();
        let timer = number("down-after-milliseconds").map_or(LONGEST, Duration::from_millis);
        let found = Found { client, config_epoch: number("config-epoch").unwrap_or_default(), node: None };
        let others: Vec<Instance> = read(answer()).unwrap_or_default();
        let view = View {
            asked_at,
            votes: true,
            voters: 1 + usize::try_from(number("num-other-sentinels").unwrap_or_default()).unwrap_or_default(),
            map: Map::of(found, is_doubted),
            good_for: timer.saturating_sub(Duration::from_millis(unanswered)).min(LONGEST),
            knows: others.iter().filter_map(|other| self.another(other)).collect(),
        };
        Ok((read(answer()).unwrap_or_else(|_| node.to_string()), view))
    }

    /// A Sentinel that another one knows.
    fn another(&self, told: &Instance) -> Option<(String, Client)> {
        let (host, port) = address(told)?;
        let client = self.among_them.at(&host, port).ok()?;
        Some((client.get_connection_info().addr().to_string(), client))
    }

    fn fault(&self, node: &Node, error: RedisError) -> Fault {
        let is_unknown = is_unknown_name(&error);
        let Fault { kind, text } = Fault::from(error);
        let text = if is_unknown { format!("knows no primary {:?}", self.master) } else { text };
        Fault { kind, text: format!("{node}: {text}") }
    }
}

fn read<T: FromRedisValue>(answer: RedisResult<Value>) -> RedisResult<T> {
    Ok(T::from_redis_value(answer?)?)
}

fn address(told: &Instance) -> Option<(String, u16)> {
    Some((told.get("ip")?.clone(), told.get("port")?.parse().ok()?))
}

fn has_doubts(flags: &str) -> bool {
    flags.split(',').any(|flag| DOUBTS.contains(&flag))
}

fn is_unknown_name(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError)
        && error.detail().is_some_and(|detail| detail.contains("No such master"))
}
