//! Fixed workloads whose instructions and branch mispredictions `.ci/instructions` counts. The counts show
//! regressions also on a busy machine. `instructions WORKLOAD ROUNDS` prepares the workload, runs its rounds, and
//! prints the number of operations. The script compares two numbers of rounds, so the preparation does not count.
//!
//! Every run has the same requests with the same messages. Counts differ by about one percent, since hashes are keyed
//! per process and place messages differently.

#[path = "support/messages.rs"]
mod messages;
#[path = "support/wheel.rs"]
mod wheel;
#[path = "support/wire.rs"]
mod wire;

use std::hint::black_box;
use std::process::ExitCode;

use ackwheel::bench::Order;
use ackwheel::core::{Outcome, RequestBatch};
use ackwheel::protocol::Codec;
use bytes::BytesMut;

use crate::messages::random_messages;
use crate::wheel::{BATCH, SLOTS, Subject, Window};

const IN_FLIGHT: usize = 100_000;

/// Number of messages of each tick in `expire`.
const OF_TICK: usize = 16_384;

/// Runs this number of rounds. Returns the number of operations.
type Workload = fn(u64) -> u64;

const WORKLOADS: [(&str, Workload); 6] = [
    ("pairs", pairs),
    ("single", single),
    ("mixed", mixed),
    ("decode", decode),
    ("encode", encode),
    ("expire", expire),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo bench` runs every bench with this flag, and with other arguments for criterion.
    if arguments.iter().any(|argument| argument == "--bench") {
        for (name, workload) in WORKLOADS {
            // The first round of `expire` only closes a tick.
            println!("{name}: {} operations, not measured", workload(2));
        }
        return ExitCode::SUCCESS;
    }
    let [name, rounds] = arguments.as_slice() else { return usage() };
    let workload = WORKLOADS.iter().find(|(known, _)| known == name);
    let (Some((_, workload)), Ok(rounds)) = (workload, rounds.parse()) else { return usage() };
    println!("{}", workload(rounds));
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    let names = WORKLOADS.map(|(name, _)| name).join("|");
    eprintln!("usage: instructions {names} ROUNDS");
    ExitCode::from(64)
}

fn batch_operations(rounds: u64) -> u64 {
    rounds * BATCH as u64
}

/// A ring with messages in flight.
fn busy() -> (Subject, Window) {
    let (mut subject, window) = (Subject::new(), Window::new(IN_FLIGHT));
    subject.add(window.inside(), SLOTS, Outcome::Added);
    (subject, window)
}

/// An AddNewMsg of 256 messages, then a DelMsg of as many. An operation is a message of a request.
fn pairs(rounds: u64) -> u64 {
    let (mut subject, mut window) = busy();
    for _ in 0..rounds {
        let (entering, leaving) = window.step();
        subject.add(entering, SLOTS, Outcome::Added);
        subject.del(leaving);
    }
    2 * batch_operations(rounds)
}

/// Request batches of 256 requests with one message each, AddNewMsg and DelMsg in turn. An operation is a request.
fn single(rounds: u64) -> u64 {
    singly(rounds, Order::InTurn)
}

/// The same in random order, which no branch predictor guesses.
fn mixed(rounds: u64) -> u64 {
    singly(rounds, Order::Mixed)
}

fn singly(rounds: u64, order: Order) -> u64 {
    let (mut subject, mut window) = busy();
    for _ in 0..rounds {
        let (entering, leaving) = window.step();
        subject.singly(entering, leaving, order);
    }
    2 * batch_operations(rounds)
}

/// Decodes frames of one message each, at random AddNewMsg or DelMsg, into a request batch. An operation is a frame.
fn decode(rounds: u64) -> u64 {
    let bytes = wire::mixed_frames(&random_messages(wire::MIXED, 1));
    let mut batch = RequestBatch::default();
    for _ in 0..rounds {
        batch.clear(usize::MAX);
        let taken = Codec::default().take_requests(black_box(&bytes), &mut batch, usize::MAX, 15);
        assert_eq!(taken, bytes.len(), "every frame is a request without a fault");
    }
    rounds * wire::MIXED as u64
}

/// Encodes answers to requests of one message each, at random AddNewMsg or DelMsg. An operation is an answer.
fn encode(rounds: u64) -> u64 {
    let batch = wire::answered(wire::MIXED, 1);
    let mut out = BytesMut::new();
    for _ in 0..rounds {
        out.clear();
        wire::encode_answers(black_box(&batch), &mut out);
    }
    rounds * wire::MIXED as u64
}

/// All messages of each tick time out. A round is a tick. After two revolutions and two ticks the last one is expired,
/// published and forgotten. An operation is a message that timed out.
fn expire(rounds: u64) -> u64 {
    let mut subject = Subject::new();
    let messages = random_messages(usize::from(SLOTS) * OF_TICK, 1);
    for (ack_timeout_ticks, of_tick) in (1..).zip(messages.chunks(OF_TICK)) {
        subject.add(of_tick, ack_timeout_ticks, Outcome::Added);
    }
    let mut timed_out = 0;
    for _ in 0..rounds {
        subject.advance();
        while let Some(published) = subject.publish_expired() {
            timed_out += published;
        }
    }
    timed_out
}
