//! The state file: keeps a memory store across a planned restart.

mod attempt;
mod file;
mod outbox;
mod saved;
pub(super) mod writer;

pub use self::file::StateError;
pub(super) use self::file::StateFile;
#[cfg(test)]
pub(super) use self::saved::Saved;
