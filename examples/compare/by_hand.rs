//! Load on a server of others: as many commands in flight as it likes, one write for all that are ready.
//!
//! The load is that of `ackwheel bench`: each connection keeps its share of the messages in flight, and adds a new
//! one and deletes an old one in turn, in the same order. Every answer is compared with what it must be.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use ackwheel::bench::{acknowledged, stay_awake};
use anyhow::{Context, ensure};
use futures_util::future::try_join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Barrier;

use crate::numbers::figure;

/// Operations in flight on a connection while it fills and empties.
const FILLING: u64 = 256;

/// Numbers of different connections are this far apart.
const APART: u64 = 1 << 40;

/// How a server is spoken to. Messages have numbers, and the dialect makes ids of them.
pub trait Dialect {
    /// Appends the operation that adds the messages with these numbers.
    fn add(&mut self, numbers: Range<u64>, output: &mut Vec<u8>);

    /// Appends the operation that deletes them. They are deleted in the same ranges in which they were added.
    fn del(&mut self, numbers: Range<u64>, output: &mut Vec<u8>);

    /// Takes answers from the front of the input; returns how many bytes that were, and how many operations are
    /// complete with them. The next bytes of an operation go to the output.
    ///
    /// # Errors
    ///
    /// When an answer is not what it must be.
    fn answered(&mut self, input: &[u8], output: &mut Vec<u8>) -> anyhow::Result<(usize, u64)>;
}

/// A load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Connections.
    pub connections: u64,
    /// Operations in flight on each.
    pub depth: u64,
    /// Messages of an operation.
    pub ids: u64,
    /// Messages in flight over all connections.
    pub in_flight: u64,
    /// How long the measured part lasts.
    pub run: Duration,
    /// Whether its thread never sleeps, as that of `ackwheel bench --busy-poll`.
    pub busy_poll: bool,
}

impl Load {
    /// Runs it; returns pairs of adds and dels a second.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or answers wrongly.
    pub fn run<D: Dialect>(self, address: SocketAddr, dialect: impl Fn() -> D) -> anyhow::Result<f64> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            if self.busy_poll {
                tokio::spawn(stay_awake());
            }
            let barrier = Barrier::new(usize::try_from(self.connections)?);
            let flows = (0..self.connections).map(|number| {
                let (barrier, dialect) = (&barrier, dialect());
                async move { Flow::connect(address, dialect, self, number).await?.live(barrier).await }
            });
            let operations: u64 = try_join_all(flows).await?.into_iter().sum();
            // A pair is two operations.
            Ok(figure(operations * self.ids) / 2.0 / self.run.as_secs_f64())
        })
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Fill,
    Run {
        until: Instant,
    },
    /// Requests under way are answered, and nothing new is sent.
    Settle,
    Empty,
}

/// One connection.
struct Flow<D> {
    stream: TcpStream,
    dialect: D,
    load: Load,
    /// Numbers of the messages in flight, or on their way there.
    window: Range<u64>,
    /// How many these are to be.
    share: u64,
    unanswered: u64,
    output: Vec<u8>,
    input: Vec<u8>,
}

impl<D: Dialect> Flow<D> {
    async fn connect(address: SocketAddr, dialect: D, load: Load, number: u64) -> anyhow::Result<Flow<D>> {
        let stream = TcpStream::connect(address).await.with_context(|| format!("cannot reach {address}"))?;
        stream.set_nodelay(true)?;
        let share = (load.in_flight / load.connections).next_multiple_of(load.ids);
        // While every operation in flight is a del, there must be something to delete.
        let share = share.max(load.ids * (load.depth + 1));
        let first = number * APART;
        let window = first..first;
        let (output, input) = (Vec::new(), Vec::with_capacity(64 * 1_024));
        Ok(Flow { stream, dialect, load, window, share, unanswered: 0, output, input })
    }

    /// Fills, runs and empties; returns how many operations were answered while it ran.
    async fn live(mut self, barrier: &Barrier) -> anyhow::Result<u64> {
        self.pass(Phase::Fill).await?;
        barrier.wait().await;
        let operations = self.pass(Phase::Run { until: Instant::now() + self.load.run }).await?;
        self.pass(Phase::Settle).await?;
        barrier.wait().await;
        self.pass(Phase::Empty).await?;
        Ok(operations)
    }

    /// Sends and receives until the phase is over; returns how many operations were answered in it.
    async fn pass(&mut self, phase: Phase) -> anyhow::Result<u64> {
        let mut operations = 0;
        loop {
            while self.send_one(phase) {}
            if !self.output.is_empty() {
                self.stream.write_all(&self.output).await?;
                self.output.clear();
            }
            if self.unanswered == 0 {
                return Ok(operations);
            }
            let answered = self.receive().await?;
            if let Phase::Run { until } = phase
                && Instant::now() >= until
            {
                return Ok(operations);
            }
            operations += answered;
        }
    }

    /// Writes the next operation, if there is one and room for it.
    fn send_one(&mut self, phase: Phase) -> bool {
        let Load { depth, ids, .. } = self.load;
        let most = if matches!(phase, Phase::Run { .. }) { depth } else { FILLING.div_ceil(ids).max(depth) };
        let count = self.window.end - self.window.start;
        let is_add = match phase {
            Phase::Settle => return false,
            Phase::Fill if count == self.share => return false,
            Phase::Empty if count == 0 => return false,
            Phase::Fill => true,
            Phase::Empty => false,
            Phase::Run { .. } => count <= self.share,
        };
        if self.unanswered >= most {
            return false;
        }
        if is_add {
            let end = self.window.end + ids;
            self.dialect.add(self.window.end..end, &mut self.output);
            self.window.end = end;
        } else {
            let first = self.window.start - self.window.start % APART;
            let operation = |number: u64| (number - first) / ids;
            let (nth, added) = (operation(self.window.start), operation(self.window.end));
            let start = first + acknowledged(nth, self.share / ids, added) * ids;
            self.dialect.del(start..start + ids, &mut self.output);
            self.window.start += ids;
        }
        self.unanswered += 1;
        true
    }

    async fn receive(&mut self) -> anyhow::Result<u64> {
        ensure!(self.stream.read_buf(&mut self.input).await? > 0, "the server has closed the connection");
        let (bytes, operations) = self.dialect.answered(&self.input, &mut self.output)?;
        self.input.drain(..bytes);
        self.unanswered = self.unanswered.checked_sub(operations).context("more answers than questions")?;
        Ok(operations)
    }
}
