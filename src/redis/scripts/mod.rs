//! Defines the Lua scripts and reads their replies. The header of each script names its keys, arguments and replies.

use std::sync::LazyLock;

use redis::{Arg, Cmd, Value};

use crate::redis::connection::errors::Fault;

/// A script, and its name in logs and metrics.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) name: &'static str,
    source: String,
    hash: String,
}

macro_rules! scripts {
    ($(#[$doc:meta] $name:ident $(after $($before:literal)+)?,)+) => {
        /// Every script.
        #[derive(Debug)]
        pub(super) struct Scripts {
            $(#[$doc] pub(super) $name: Script,)+
        }

        /// The scripts, hashed once.
        pub(super) static SCRIPTS: LazyLock<Scripts> = LazyLock::new(|| Scripts {
            $($name: Script::new(
                stringify!($name),
                concat!($($(include_str!($before),)+)? include_str!(concat!("", stringify!($name), ".lua"))),
            ),)+
        });

        impl Scripts {
            /// All of them.
            pub(super) fn all(&'static self) -> Vec<&'static Script> {
                vec![$(&self.$name,)+]
            }
        }
    };
}

scripts! {
    /// Registers a link, and makes the ring where there is none.
    open,
    /// Adds and dels.
    apply after "guard.lua",
    /// Applies Acks again that Redis lost.
    reapply after "guard.lua",
    /// Notes that all held Acks are applied.
    acks_applied after "guard.lua",
    /// Moves the pointer.
    advance after "guard.lua",
    /// From the ring to the outbox.
    expire after "guard.lua",
    /// Forgets what is no longer late.
    forget after "guard.lua",
    /// Puts back what has lost its list, and deletes what nobody forgets.
    mend after "guard.lua",
    /// Stands for election.
    acquire after "guard.lua",
    /// Keeps the lease.
    renew after "guard.lua",
    /// Gives the lease up.
    release after "guard.lua",
    /// The ring at a glance.
    status,
    /// Makes sure that a group exists.
    open_group after "guard.lua" "groups.lua",
    /// Deletes a group.
    delete_group after "guard.lua" "groups.lua",
    /// The last subscriber here has left a group.
    leave_group after "guard.lua" "groups.lua",
    /// Takes batches.
    take after "guard.lua" "groups.lua",
    /// Takes a batch once more.
    take_again after "guard.lua" "groups.lua",
    /// Settles batches.
    settle after "guard.lua" "groups.lua",
    /// Gives batches back.
    give_back after "guard.lua" "groups.lua",
    /// What a sidecar holds.
    held,
    /// Trims the outbox and keeps its bounds.
    tend after "guard.lua" "groups.lua",
    /// Tells that the sidecar lives.
    heartbeat after "guard.lua",
    /// Tells which groups have subscribers at the sidecar.
    announce after "guard.lua" "groups.lua",
    /// The leader's look at all sidecars.
    inspect after "guard.lua" "groups.lua",
    /// Frees what a dead sidecar held.
    reap after "guard.lua" "groups.lua",
    /// Deletes the link of a sidecar that has been dead for long.
    drop_link after "guard.lua" "groups.lua",
    /// What each group has not acknowledged.
    backlogs,
}

impl Script {
    fn new(name: &'static str, source: &str) -> Script {
        Script { name, source: source.to_owned(), hash: redis::Script::new(source).get_hash().to_owned() }
    }

    /// A call with its keys. The caller appends the arguments.
    pub(super) fn call<'a>(&self, keys: impl ExactSizeIterator<Item = &'a str>) -> Cmd {
        let mut call = redis::cmd("EVALSHA");
        call.arg(&self.hash).arg(keys.len());
        for key in keys {
            call.arg(key);
        }
        call
    }

    /// The same call with the source in place of its hash, for a Redis whose cache was flushed.
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

    /// The command that puts it into Redis' cache.
    pub(super) fn load(&self) -> Cmd {
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(&self.source);
        load
    }
}

/// The reply of a script: a word, and what belongs to it.
#[derive(Debug)]
pub(super) struct Answer {
    script: &'static str,
    values: std::vec::IntoIter<Value>,
}

impl Answer {
    pub(super) fn new(script: &'static Script, value: Value) -> Result<Answer, Fault> {
        match value {
            Value::Array(values) => Ok(Answer { script: script.name, values: values.into_iter() }),
            other => Err(Fault::strange(script.name, &format!("{other:?}"))),
        }
    }

    /// Whether nothing is left.
    pub(super) fn is_empty(&self) -> bool {
        self.values.len() == 0
    }

    /// How many values are left.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    fn next(&mut self) -> Result<Value, Fault> {
        self.values.next().ok_or_else(|| Fault::strange(self.script, "it ends too soon"))
    }

    /// The next value, as text.
    pub(super) fn text(&mut self) -> Result<String, Fault> {
        let value = self.next()?;
        redis::from_redis_value(value).map_err(|error| Fault::strange(self.script, &error.to_string()))
    }

    /// The next value, as a whole number.
    pub(super) fn number(&mut self) -> Result<i64, Fault> {
        let value = self.next()?;
        redis::from_redis_value(value).map_err(|error| Fault::strange(self.script, &error.to_string()))
    }

    /// The next value, as a count: below zero is none.
    pub(super) fn count(&mut self) -> Result<u64, Fault> {
        Ok(u64::try_from(self.number()?).unwrap_or_default())
    }

    /// The next value, as an answer in the answer.
    pub(super) fn nested(&mut self) -> Result<Answer, Fault> {
        match self.next()? {
            Value::Array(values) => Ok(Answer { script: self.script, values: values.into_iter() }),
            other => Err(Fault::strange(self.script, &format!("{other:?}"))),
        }
    }

    /// A word that the script does not say.
    pub(super) fn strange(&self, word: &str) -> Fault {
        Fault::strange(self.script, word)
    }
}
