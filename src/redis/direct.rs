//! Calls the script of adds and dels without a sidecar, to measure the speed of Redis itself.
//!
//! A call is written by the same [`Queue`] that writes those of a sidecar, so the two are the same bytes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Waker};

use redis::{Client, Connection, ErrorKind, RedisError, RedisResult, Value};

use crate::clock::Clock;
use crate::core::completions::Completions;
use crate::core::message::Message;
use crate::core::request_batch::{Operation, RequestBatch};
use crate::core::ring::ConnectionId;
use crate::core::tick::Wheel;
use crate::metrics::Metrics;
use crate::redis::batching::chunk::{Applied, Chunk, MAX_CHUNK};
use crate::redis::batching::frames::Frame;
use crate::redis::batching::inbox::Item;
use crate::redis::batching::queue::Queue;
use crate::redis::connection::errors::Fault;
use crate::redis::connection::link::LinkOptions;
use crate::redis::connection::reconnect::registration;
use crate::redis::keys::Keys;
use crate::redis::options::connection_info;
use crate::redis::scripts::{Answer, SCRIPTS};
use crate::redis::topology::Topology;

/// A connection to Redis that calls the script of adds and dels, as often in flight as its user likes.
pub struct DirectCalls {
    connection: Connection,
    keys: Arc<Keys>,
    generation: i64,
    queue: Queue,
    clock: Arc<Clock>,
    last: u64,
    unanswered: VecDeque<Chunk>,
    completions: Arc<Completions>,
    /// The last answers; the memory is used again.
    answered: RequestBatch,
}

impl DirectCalls {
    /// Connects to the Redis at `url`, loads the script, and joins the ring of the usual dimensions in `namespace`.
    /// Where there is none it is made, and turns as soon as a sidecar joins it.
    ///
    /// # Errors
    ///
    /// When Redis cannot be reached or does not carry this out.
    pub fn open(url: &str, namespace: &str) -> RedisResult<DirectCalls> {
        let client = Client::open(connection_info(url)?)?;
        let mut connection = client.get_connection()?;
        SCRIPTS.apply.load().exec(&mut connection)?;
        SCRIPTS.open.load().exec(&mut connection)?;
        let wheel = Wheel::default();
        let keys = Arc::new(Keys::new(namespace, 0, wheel.slots(), &crate::redis::random_name()));
        let clock = Arc::new(Clock::start());
        let options = LinkOptions {
            place: Arc::new(Topology::of(client)),
            peers: Arc::default(),
            ring: 0,
            rings: 1,
            wheel,
            catch_up_max_ticks: 0,
            keys: Arc::clone(&keys),
            incarnation: crate::redis::random_name(),
            clock: Arc::clone(&clock),
            metrics: Arc::new(Metrics::default()),
        };
        let value = registration(&options, 0, (0, 0)).query(&mut connection)?;
        let generation = Answer::new(&SCRIPTS.open, value).and_then(|mut answer| {
            answer.text()?;
            answer.number()
        });
        let generation = generation.map_err(into_redis_error)?;
        let (queue, unanswered) = (Queue::new(Arc::default(), u64::MAX >> 12, 0), VecDeque::new());
        let (completions, answered) = (Arc::default(), RequestBatch::default());
        Ok(DirectCalls { connection, keys, generation, queue, clock, last: 0, unanswered, completions, answered })
    }

    /// The bytes of a call that adds messages, at most 1,000. Calls are sent in the order in which they are made.
    ///
    /// # Panics
    ///
    /// When there is no message, or there are more than a call can carry.
    pub fn add(&mut self, messages: &[Message]) -> Vec<u8> {
        self.call(Operation::Add { ack_timeout_ticks: 15, attempt: 1 }, messages)
    }

    /// The bytes of a call that deletes messages, at most 1,000. Calls are sent in the order in which they are made.
    ///
    /// # Panics
    ///
    /// When there is no message, or there are more than a call can carry.
    pub fn del(&mut self, messages: &[Message]) -> Vec<u8> {
        self.call(Operation::Del { withdraw: false }, messages)
    }

    fn call(&mut self, operation: Operation, messages: &[Message]) -> Vec<u8> {
        let frame = Frame::new(operation, ConnectionId::default(), 0, messages, &self.completions);
        self.queue.push(Item::Frame(frame));
        self.last += 1;
        let chunk = self.queue.next_chunk(self.last, MAX_CHUNK).expect("a call carries a message");
        let Keys { meta, link, messages, ticks, .. } = &*self.keys;
        let mut call = SCRIPTS.apply.call(&self.keys.and_lists(&[meta, link, messages, ticks]));
        call.arg(self.generation);
        self.queue.write(&chunk, &mut call);
        self.unanswered.push_back(chunk);
        assert!(self.queue.next_chunk(0, MAX_CHUNK).is_none(), "a call carries at most {MAX_CHUNK} messages");
        call.get_packed_command()
    }

    /// Sends a call, and does not wait for its answer.
    ///
    /// # Errors
    ///
    /// When the connection is lost.
    pub fn send(&mut self, call: &[u8]) -> RedisResult<()> {
        self.connection.send_packed_command(call)
    }

    /// Waits for the next answer; says how many messages it added or acknowledged.
    ///
    /// # Errors
    ///
    /// When the connection is lost, or Redis did not carry the call out.
    pub fn receive(&mut self) -> RedisResult<usize> {
        let value = self.connection.recv_response().and_then(Value::extract_error)?;
        let applied = Answer::new(&SCRIPTS.apply, value).and_then(|mut answer| Applied::read(&mut answer));
        let applied = applied.map_err(into_redis_error)?;
        let chunk = self
            .unanswered
            .pop_front()
            .ok_or_else(|| RedisError::from((ErrorKind::UnexpectedReturnType, "an answer without a call")))?;
        self.queue.apply(chunk, &applied, self.clock.now());
        self.answered.clear(MAX_CHUNK);
        let _ = self.completions.poll(&mut Context::from_waker(Waker::noop()), &mut self.answered);
        Ok(applied.letters.bytes().filter(|letter| matches!(letter, b'a' | b'k')).count())
    }
}

fn into_redis_error(fault: Fault) -> RedisError {
    RedisError::from((ErrorKind::UnexpectedReturnType, "the script of adds and dels", fault.text))
}
