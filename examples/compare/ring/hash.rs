//! A map alone: hashbrown with foldhash, on one thread.

use ackwheel::core::Message;
use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::subject::Subject;

/// Id and client to deadline.
#[derive(Default)]
pub struct Hashed(HashMap<(u64, u64), u64, RandomState>);

impl Subject for Hashed {
    fn add(&mut self, messages: &[Message]) -> usize {
        messages.iter().filter(|message| self.0.insert((message.msg_id.0, message.client.0), 15).is_none()).count()
    }

    fn del(&mut self, messages: &[Message]) -> usize {
        messages.iter().filter(|message| self.0.remove(&(message.msg_id.0, message.client.0)).is_some()).count()
    }
}
