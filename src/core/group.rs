//! The names of consumer groups.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The maximum length of a name in bytes.
pub const MAX_NAME_LENGTH: usize = 64;

/// The maximum number of groups that exist at a time. Ephemeral groups, which are deleted with their last subscriber,
/// count too.
pub const MAX_GROUPS: usize = 64;

/// The prefix of the names that are generated for ephemeral groups.
const GENERATED: &str = "ephemeral-";

/// The name of a consumer group: `[A-Za-z0-9_.-]{1,64}`. Each group gets every timeout batch, and a batch is delivered
/// to one subscriber of the group at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct GroupName(Arc<str>);

/// The error for a text that is not a group name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a group name: use 1 to {MAX_NAME_LENGTH} of the characters A-Z a-z 0-9 _ . -")]
pub struct GroupNameError(String);

impl GroupName {
    /// The name of the group that always exists. For this group the outbox keeps batches even before the first
    /// subscriber connects.
    pub const DEFAULT: &str = "default";

    /// Returns the name of the default group.
    pub fn default_group() -> GroupName {
        GroupName(Arc::from(GroupName::DEFAULT))
    }

    /// Returns whether this is the name of the default group.
    pub fn is_default(&self) -> bool {
        &*self.0 == GroupName::DEFAULT
    }

    /// Generates a name for an ephemeral group. `process` distinguishes this process from others, and `subscriber`
    /// distinguishes the subscribers of this process.
    pub fn generated(process: u32, subscriber: u64) -> GroupName {
        GroupName(Arc::from(format!("{GENERATED}{process:08x}-{subscriber}")))
    }

    /// Returns whether the name has the form of generated names.
    pub fn is_generated(&self) -> bool {
        let numbers = self.0.strip_prefix(GENERATED).and_then(|numbers| numbers.split_once('-'));
        numbers.is_some_and(|(process, subscriber)| {
            process.len() == 8 && u32::from_str_radix(process, 16).is_ok() && subscriber.parse::<u64>().is_ok()
        })
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for GroupName {
    type Err = GroupNameError;

    fn from_str(text: &str) -> Result<GroupName, GroupNameError> {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        if (1..=MAX_NAME_LENGTH).contains(&text.len()) && text.bytes().all(legal) {
            Ok(GroupName(Arc::from(text)))
        } else {
            Err(GroupNameError(text.chars().take(MAX_NAME_LENGTH + 1).collect()))
        }
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names_are_distinguished_from_given_ones() {
        assert!(
            GroupName::generated(0xa, 7).is_generated() && GroupName::generated(u32::MAX, u64::MAX).is_generated()
        );
        for given in ["default", "ephemeral", "ephemeral-audit", "ephemeral-0000000a", "ephemeral-a-7"] {
            assert!(!given.parse::<GroupName>().unwrap().is_generated(), "{given}");
        }
    }

    #[test]
    fn only_plain_names_are_groups() {
        for name in ["default", "a", "A-z_0.9", &"x".repeat(64)] {
            assert_eq!(name.parse::<GroupName>().unwrap().as_str(), name);
        }
        for name in ["", "a b", "ü", "a/b", "a\n", &"x".repeat(65)] {
            assert!(name.parse::<GroupName>().is_err(), "{name:?}");
        }
    }
}
