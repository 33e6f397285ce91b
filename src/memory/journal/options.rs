//! The settings of a journal, and what opening it can give.

use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::Damage;
use crate::core::Wheel;
use crate::process::thread::MORE_THREADS;

/// When written records are synced to the disk, so that a power failure does not lose them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncPolicy {
    /// The system decides.
    #[default]
    None,
    /// In the background, at this interval.
    Every(Duration),
    /// Before each answer.
    Always,
}

impl FromStr for SyncPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<SyncPolicy, String> {
        match text {
            "none" => Ok(SyncPolicy::None),
            "always" => Ok(SyncPolicy::Always),
            _ => match humantime::parse_duration(text) {
                Ok(interval) if !interval.is_zero() => Ok(SyncPolicy::Every(interval)),
                _ => Err(format!("write none, always, or a duration above 0s such as 100ms, and not {text:?}")),
            },
        }
    }
}

impl<'de> Deserialize<'de> for SyncPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<SyncPolicy, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// The settings of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalOptions {
    /// The folder.
    pub folder: PathBuf,
    /// When records are synced.
    pub sync: SyncPolicy,
}

/// The reason why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Reading or writing failed.
    #[error("cannot {what} {path} of the journal: {cause}; check --journal and the permissions of its folder")]
    Io {
        /// The action that failed.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// A thread could not be started.
    #[error("a thread for --journal could not be started: {0}; {remedy}", remedy = MORE_THREADS)]
    Thread(io::Error),
    /// Another process uses the folder.
    #[error("another sidecar keeps its wheel in {path}: give each sidecar its own --journal")]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// A file has the name of a segment, and another content.
    #[error(
        "{path} is no segment of a journal of this version: move it away, start the version that wrote it, or name another \
         folder with --journal"
    )]
    NoSegment {
        /// The file.
        path: PathBuf,
    },
    /// The journal was written by a ring of other dimensions.
    #[error(
        "{path} was written by a ring of {} slots and {}ms ticks, and this one has {} slots and {}ms ticks: start with \
         --slots {} --tick {}ms, or name another folder with --journal to start with an empty wheel",
        saved.slots(), saved.tick_ms(), asked.slots(), asked.tick_ms(), saved.slots(), saved.tick_ms()
    )]
    OtherWheel {
        /// The folder.
        path: PathBuf,
        /// The dimensions in the journal.
        saved: Wheel,
        /// The dimensions of this ring.
        asked: Wheel,
    },
}

/// The content of a journal when it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The number of messages in flight.
    pub in_flight: u64,
    /// Whether there was a journal.
    pub is_old: bool,
    /// The damaged parts.
    pub damages: Vec<Damage>,
}
