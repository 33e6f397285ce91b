//! A timer for each message: tokio's DelayQueue, with the map from id to key that deleting by id needs.

use std::time::Duration;

use ackwheel::core::Message;
use foldhash::fast::RandomState;
use hashbrown::HashMap;
use tokio::runtime::Runtime;
use tokio::time::Instant;
use tokio_util::time::DelayQueue;
use tokio_util::time::delay_queue::Key;

use super::subject::Subject;

const ACK_TIMEOUT: Duration = Duration::from_secs(15);

/// Id and client to their place in the queue.
pub struct Delayed {
    queue: DelayQueue<(u64, u64)>,
    keys: HashMap<(u64, u64), Key, RandomState>,
    /// The queue takes its time from it.
    runtime: Runtime,
}

impl Delayed {
    /// An empty queue.
    pub fn new() -> Delayed {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.expect("a runtime without I/O can be made");
        Delayed { queue: DelayQueue::new(), keys: HashMap::default(), runtime }
    }
}

impl Subject for Delayed {
    fn add(&mut self, messages: &[Message]) -> usize {
        let _entered = self.runtime.enter();
        let deadline = Instant::now() + ACK_TIMEOUT;
        let mut added = 0;
        for message in messages {
            let id = (message.msg_id.0, message.client.0);
            let key = self.queue.insert_at(id, deadline);
            match self.keys.insert(id, key) {
                Some(before) => drop(self.queue.remove(&before)),
                None => added += 1,
            }
        }
        added
    }

    fn del(&mut self, messages: &[Message]) -> usize {
        let _entered = self.runtime.enter();
        let keys = messages.iter().filter_map(|message| self.keys.remove(&(message.msg_id.0, message.client.0)));
        keys.map(|key| self.queue.remove(&key)).count()
    }
}
