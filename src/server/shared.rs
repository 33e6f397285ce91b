//! The parts of a sidecar that all connections share, and the options of connections.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::core::{Rings, Store};
use crate::delivery::Delivery;
use crate::metrics::Metrics;
use crate::ticker::read_barrier::ReadBarrier;

/// The minimum time for which connections are still served after GoAway, the frame that announces a drain.
pub const DRAIN_GRACE: Duration = Duration::from_millis(500);

/// The limits and timeouts of connections.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The maximum length of a frame, in bytes.
    pub max_frame_length: u32,
    /// The maximum number of admitted connections of each listener.
    pub max_connections: usize,
    /// The time within which a connection must send Hello.
    pub hello_timeout: Duration,
    /// How long a peer may be silent before it is pinged. After twice this time of silence, its connection is closed.
    pub ping_interval: Duration,
    /// The number of queued bytes at which a session stops reading. At half of this number it stops sending batches.
    pub max_queued_bytes: usize,
    /// The number of bytes that the buffers of all connections may have together.
    pub max_connection_memory: usize,
}

/// The parts of a sidecar that all connections share.
#[expect(missing_docs, reason = "each is described by its type")]
pub struct Shared {
    pub options: ServerOptions,
    pub store: Arc<dyn Store>,
    /// The rings of `store`.
    pub rings: Rings,
    pub delivery: Arc<Delivery>,
    pub clock: Arc<Clock>,
    pub read_barrier: Arc<ReadBarrier>,
    pub metrics: Arc<Metrics>,
}

/// The phases of a server's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Serving,
    Draining,
    Closed,
}
