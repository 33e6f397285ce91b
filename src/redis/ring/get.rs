//! Reads the state of messages in Redis.

use super::RedisRing;
use crate::core::{Message, MessageState, Refusal, Tick};
use crate::redis::scripts::SCRIPTS;

/// The maximum number of messages of one script, so that it does not block Redis for long.
const MAX_READ: usize = 1_000;

impl RedisRing {
    /// Returns the state of each message.
    pub(super) async fn read_states(&self, messages: &[Message]) -> Result<Vec<MessageState>, Refusal> {
        let keys = &self.link.keys;
        let mut states = Vec::with_capacity(messages.len());
        for part in messages.chunks(MAX_READ) {
            let names: Vec<String> = part.iter().map(ToString::to_string).collect();
            let mut answer = self.link.read(&SCRIPTS.get, &[&keys.meta, &keys.messages], names).await?;
            if answer.is_empty() {
                states.resize(states.len() + part.len(), MessageState::Unknown);
                continue;
            }
            let (pointer, left_ms) = (answer.count()?, answer.number()?);
            let (tick_ms, slots) = (answer.count()?, answer.count()?);
            let state = |entry: &str| match parse(entry) {
                Some((deadline, attempt)) if deadline >= pointer => {
                    let ahead = i64::try_from((deadline - pointer).saturating_mul(tick_ms)).unwrap_or(i64::MAX);
                    let remaining = left_ms.saturating_add(ahead).max(0);
                    let remaining_ms = u32::try_from(remaining).unwrap_or(u32::MAX);
                    MessageState::InFlight { deadline: Tick(deadline), remaining_ms, attempt }
                }
                Some((deadline, _)) if pointer - deadline <= slots => MessageState::Late,
                _ => MessageState::Unknown,
            };
            states.extend(answer.rest(|entry| entry.text().map(|entry| state(&entry)))?);
        }
        Ok(states)
    }
}

/// Parses the deadline and the attempt of an entry.
fn parse(entry: &str) -> Option<(u64, u8)> {
    let mut fields = entry.split(' ');
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}
