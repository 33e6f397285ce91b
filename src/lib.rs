//! ackwheel: an ack-timeout tracker for IM servers, as a sidecar and as a client library.
//!
//! A logic node is an IM server that pushes messages to phones. It adds each message to ackwheel before it pushes the
//! message, and deletes the message when the Ack of the phone arrives. If the ack timeout ends first, ackwheel delivers
//! the message to logic nodes in a timeout batch. A timeout alone does not prove that the phone is offline:
//! docs/INTEGRATION.md says how to judge this.
//!
//! ```
//! use std::time::Duration;
//!
//! use ackwheel::app::Sidecar;
//! use ackwheel::client::{AddOptions, Client, ClientOptions, SubscribeOptions};
//! use ackwheel::config::Settings;
//! use ackwheel::core::Message;
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A sidecar in this process, with an ack timeout of 15 ticks of 100 ms. In production, run `ackwheel serve`.
//! let any_port = Some("127.0.0.1:0".to_owned());
//! let tick = Some(Duration::from_millis(100));
//! let settings = Settings { listen: any_port.clone(), admin: any_port, tick, ..Settings::default() };
//! let sidecar = Sidecar::start(settings.check()?).await?;
//!
//! let client = Client::connect(sidecar.address.into(), ClientOptions::default()).await?;
//! let mut timeouts = client.subscribe(SubscribeOptions::default().group("default")).await?;
//!
//! // Add a message before you push it, so that its Ack cannot arrive before the add.
//! let [acked, silent] = [Message::new(101, 7), Message::new(102, 9)];
//! client.add_new_msg(&[acked, silent], AddOptions::default()).await?;
//! client.del_msg(&[acked]).await?;
//!
//! // After 1.5 s the message without an Ack is in a timeout batch.
//! let batch = timeouts.next().await.transpose()?.expect("the subscription goes on");
//! assert_eq!(batch.messages[0].message, silent);
//! batch.ack().await?;
//! sidecar.drain().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Overview
//!
//! ```text
//!        logic nodes                                               Prometheus, probes, browsers
//!             │ AddNewMsg, DelMsg, Subscribe, BatchAck                        │ HTTP
//!             ▼                                                               ▼
//!   ┌──── protocol ────┐                                                 ┌─ admin ─┐
//!   │     server       │◀── batches ── delivery ◀─ take, settle ─┐       │ metrics │
//!   └────────┬─────────┘                  (core::dispatch)       │       └────┬────┘
//!            │ submit                                            │            │ status
//!            ▼                                                   │            │
//!   ┌───────────────────── a store: memory or redis ─────────────┴────────────▼────────┐
//!   │  ring ── expired messages ──▶ batches ──▶ outbox                       lease      │
//!   └────▲──────────────────────────────▲─────────────────────────────────────▲────────┘
//!        └── advance ───────────────────┴── publish ── ticker ──── maintain ───┘
//!                                                        ▲
//!                                                      clock (the sidecar reads the time only here)
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`core`] | ticks, messages, batches, groups; the contracts of ring, outbox and lease; no I/O, no clock |
//! | [`memory`] | the store in the memory of the process |
//! | [`redis`] | the store in Redis, shared by all sidecars |
//! | [`protocol`] | frames and their bytes; docs/PROTOCOL.md specifies them |
//! | [`client`] | the client library for logic nodes in Rust; compiles alone with the feature `client` |
//! | [`clock`] | the only place of the sidecar that reads the time |
//! | [`ticker`] | expires the ticks of each ring on time, after all Acks that have arrived are read |
//! | [`delivery`] | delivers batches from the outbox to subscribers |
//! | [`server`] | framed TCP and Unix sockets for logic nodes |
//! | [`admin`] | HTTP for metrics, probes and the status page |
//! | [`metrics`] | all Prometheus metrics |
//! | [`mod@bench`] | `ackwheel bench`: load over the real protocol, with every answer checked |
//! | [`process`] | panics, stop signals, threads with their own runtime, systemd |
//! | [`logging`] | limits repeated log lines, and never blocks on stderr |
//! | [`config`] | flags, environment and configuration file |
//! | [`app`] | builds a running sidecar from the settings |
//! | [`cli`] | the subcommands of the command line |
//!
//! For an overview, read `core/tick.rs`, `core/ring.rs`, `memory/wheel.rs`, `core/dispatch.rs`, [`ticker`] and
//! `server/session.rs`. docs/ARCHITECTURE.md says which file to change for a task.

// Set only for the library. No other crate uses the items of tests and examples, so the lint would warn about each
// `pub` there.
#![warn(unreachable_pub)]

// Unit tests include files of tests/, which refer to the library as `ackwheel`.
#[cfg(test)]
extern crate self as ackwheel;

#[cfg(feature = "sidecar")]
pub mod admin;
#[cfg(feature = "sidecar")]
pub mod app;
#[cfg(feature = "sidecar")]
pub mod bench;
#[cfg(feature = "sidecar")]
pub mod cli;
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "sidecar")]
pub mod clock;
#[cfg(feature = "sidecar")]
pub mod config;
pub mod core;
#[cfg(feature = "sidecar")]
pub mod delivery;
#[cfg(feature = "sidecar")]
pub mod logging;
#[cfg(feature = "sidecar")]
pub mod memory;
#[cfg(feature = "sidecar")]
pub mod metrics;
#[cfg(feature = "sidecar")]
pub mod process;
#[cfg(feature = "client")]
pub mod protocol;
#[cfg(feature = "sidecar")]
pub mod redis;
#[cfg(feature = "sidecar")]
pub mod server;
#[cfg(feature = "sidecar")]
pub mod ticker;
