//! Defines the Lua scripts and reads their replies. The header of each Lua file describes its keys, arguments and
//! replies.

use std::sync::LazyLock;

use redis::{Arg, Cmd, FromRedisValue, Value};

use crate::redis::connection::errors::{Fault, FaultKind};

/// A Lua script. `name` is its label in metrics: the name of the file, or the former name of a renamed file, because
/// labels are public.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) name: &'static str,
    file: &'static str,
    source: String,
    hash: String,
}

macro_rules! scripts {
    ($(#[$doc:meta] $name:ident $(labelled $label:literal)? $(after $($before:literal)+)?,)+) => {
        /// All scripts, with a field for each.
        #[derive(Debug)]
        pub(super) struct Scripts {
            $(#[$doc] pub(super) $name: Script,)+
        }

        /// All scripts. The first access computes their SHA-1 hashes.
        pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
            $($name: Script::new(
                [$($label,)? stringify!($name)][0],
                stringify!($name),
                concat!($($(include_str!($before),)+)? include_str!(concat!("", stringify!($name), ".lua"))),
            ),)+
        });

        impl Scripts {
            /// Returns all scripts.
            pub(super) fn all(&'static self) -> Vec<&'static Script> {
                vec![$(&self.$name,)+]
            }
        }
    };
}

scripts! {
    /// Registers a connection of a sidecar, and creates the ring if it does not exist.
    open,
    /// Applies adds and dels, that is, the requests of clients.
    apply after "refuse_stale_connection.lua",
    /// Applies Acks again that Redis lost.
    reapply_lost_acks labelled "reapply" after "refuse_stale_connection.lua",
    /// Records that the sidecar has applied all Acks that it held in an outage.
    record_acks_applied labelled "acks_applied" after "refuse_stale_connection.lua",
    /// Moves the pointer by one tick.
    advance after "refuse_stale_connection.lua",
    /// Moves messages of an expired tick to the outbox.
    expire after "refuse_stale_connection.lua",
    /// Deletes timed-out messages after the period in which an Ack is answered `late`.
    forget_late_messages labelled "forget" after "refuse_stale_connection.lua",
    /// Repairs messages after Redis lost keys: puts them back into the set of their deadline, or deletes them.
    repair_messages labelled "mend" after "refuse_stale_connection.lua",
    /// Takes the lease of the leader. If another sidecar has the lease, registers this sidecar as a candidate.
    acquire after "refuse_stale_connection.lua",
    /// Renews the lease.
    renew after "refuse_stale_connection.lua",
    /// Gives up the lease, and removes this sidecar from the candidates.
    release after "refuse_stale_connection.lua",
    /// Reads the status of the ring.
    status,
    /// Reads the state of messages.
    get,
    /// Creates a group if it does not exist.
    open_group after "refuse_stale_connection.lua" "group_functions.lua",
    /// Deletes a group, unless other sidecars have subscribers of it.
    delete_group after "refuse_stale_connection.lua" "group_functions.lua",
    /// Removes this sidecar from the subscribers of a group.
    leave_group after "refuse_stale_connection.lua" "group_functions.lua",
    /// Delivers the next batches of a group.
    take after "refuse_stale_connection.lua" "group_functions.lua",
    /// Delivers batches again that this sidecar held or that were returned.
    retake after "refuse_stale_connection.lua" "group_functions.lua",
    /// Settles batches, so that they are not delivered to this group again.
    settle after "refuse_stale_connection.lua" "group_functions.lua",
    /// Gives batches back, so that any consumer can take them.
    return_batches labelled "give_back" after "refuse_stale_connection.lua" "group_functions.lua",
    /// Lists the batches that a sidecar holds.
    list_held_batches labelled "held",
    /// Trims the outbox to its limits.
    trim_outbox labelled "tend" after "refuse_stale_connection.lua" "group_functions.lua",
    /// Records a heartbeat of the sidecar.
    heartbeat after "refuse_stale_connection.lua",
    /// Announces the groups that have subscribers at the sidecar.
    announce_groups labelled "announce" after "refuse_stale_connection.lua" "group_functions.lua",
    /// Reads the heartbeats of all sidecars for the leader, and repairs lost groups.
    inspect_sidecars labelled "inspect" after "refuse_stale_connection.lua" "group_functions.lua",
    /// Releases the batches that a dead sidecar held, and deletes its entry.
    reap after "refuse_stale_connection.lua" "group_functions.lua",
    /// Deletes the link key of a sidecar that has been dead for long.
    delete_dead_link labelled "drop_link" after "refuse_stale_connection.lua" "group_functions.lua",
    /// Counts the batches that each group has not acknowledged.
    backlogs,
}

fn without_comment(line: &str) -> &str {
    if line.trim_start().starts_with("--") { "" } else { line }
}

impl Script {
    /// Removes the comments of `text`, so that the script has at most 16 KiB. If a client that has not authenticated
    /// sends a longer argument, Redis closes the connection before the client can read the reason. Empty lines replace
    /// the comments, so that errors of Redis name the right line.
    fn new(name: &'static str, file: &'static str, text: &str) -> Script {
        let source: String = text.lines().flat_map(|line| [without_comment(line), "\n"]).collect();
        let hash = redis::Script::new(&source).get_hash().to_owned();
        Script { name, file, source, hash }
    }

    /// Returns an EVALSHA command with `keys`. The caller must append the arguments.
    pub(super) fn call(&self, keys: &[&str]) -> Cmd {
        redis::cmd("EVALSHA").arg(&self.hash).arg(keys.len()).arg(keys).take()
    }

    /// Returns `call` as an EVAL command, with the source in place of the hash. Redis needs the source if its script
    /// cache was flushed.
    pub(super) fn in_full(&self, call: &Cmd) -> Cmd {
        let mut whole = redis::cmd("EVAL");
        whole.arg(&self.source);
        for argument in call.args_iter().skip(2) {
            if let Arg::Simple(bytes) = argument {
                whole.arg(bytes);
            }
        }
        whole
    }

    /// Returns the command that loads the script into Redis' cache.
    pub(super) fn load(&self) -> Cmd {
        redis::cmd("SCRIPT").arg("LOAD").arg(&self.source).take()
    }
}

/// The reply of a script: usually a word, such as `ok`, and then further values.
#[derive(Debug)]
pub(super) struct Answer {
    script: &'static Script,
    values: std::vec::IntoIter<Value>,
}

impl Answer {
    pub(super) fn new(script: &'static Script, value: Value) -> Result<Answer, Fault> {
        match value {
            Value::Array(values) => Ok(Answer { script, values: values.into_iter() }),
            other => Err(Answer { script, values: Vec::new().into_iter() }.strange(&format!("{other:?}"))),
        }
    }

    /// Returns whether no value is left.
    pub(super) fn is_empty(&self) -> bool {
        self.values.len() == 0
    }

    fn next<T: FromRedisValue>(&mut self) -> Result<T, Fault> {
        let value = self.values.next().ok_or_else(|| self.strange("a value is missing"))?;
        redis::from_redis_value(value).map_err(|error| self.strange(&error.to_string()))
    }

    /// Returns the next value as text.
    pub(super) fn text(&mut self) -> Result<String, Fault> {
        self.next()
    }

    /// Returns the next value as bytes, which need not be text.
    pub(super) fn bytes(&mut self) -> Result<Vec<u8>, Fault> {
        self.next()
    }

    /// Returns the next value as an integer.
    pub(super) fn number(&mut self) -> Result<i64, Fault> {
        self.next()
    }

    /// Returns the next value as an unsigned number. A negative value becomes 0.
    pub(super) fn count(&mut self) -> Result<u64, Fault> {
        Ok(u64::try_from(self.number()?).unwrap_or_default())
    }

    /// Returns the next value as a nested answer.
    pub(super) fn nested(&mut self) -> Result<Answer, Fault> {
        Answer::new(self.script, self.next()?)
    }

    /// Calls `read` until no value is left. Returns the results.
    pub(super) fn rest<T, E>(&mut self, mut read: impl FnMut(&mut Answer) -> Result<T, E>) -> Result<Vec<T>, E> {
        let mut rest = Vec::with_capacity(self.values.len());
        while !self.is_empty() {
            rest.push(read(self)?);
        }
        Ok(rest)
    }

    /// Returns the fault for an answer that this version does not understand. `word` describes the unexpected part.
    pub(super) fn strange(&self, word: &str) -> Fault {
        let file = self.script.file;
        Fault::new(FaultKind::Other, format!("the reply of the script {file}.lua is not understood: {word}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_short_enough_for_a_client_that_has_not_authenticated() {
        for script in SCRIPTS.all() {
            assert!(script.source.len() <= 16_384, "{} has {} bytes", script.name, script.source.len());
            assert!(!script.source.contains("-- "), "{} has a comment", script.name);
        }
    }
}
