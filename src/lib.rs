//! ackwheel: an ack-timeout tracker for IM servers, as a sidecar and as a client library.
//!
//! A logic node adds a message before it pushes it to a phone and deletes it when the phone's Ack arrives.
//! What is still in flight after the ack timeout comes back in a timeout batch: that client is offline.
//!
//! # The tour
//!
//! ```text
//!        logic nodes                                                   Prometheus, probes, people
//!             │ AddNewMsg, DelMsg, Subscribe, BatchAck                             │ HTTP
//!             ▼                                                                    ▼
//!   ┌──── protocol ────┐                                                      ┌─ admin ─┐
//!   │     server       │◀── batches ── delivery ◀─ take, settle ─┐            │ metrics │
//!   └───────┬──────────┘                  (core::dispatch)       │            └────┬────┘
//!           │ add_new_msg, del_msg                               │                 │ status
//!           ▼                                                    │                 │
//!   ┌───────────────────────── a store: memory, … ───────────────┴─────────────────▼────┐
//!   │  ring  ── what is decided ──▶  expire ── batches ──▶  outbox            lease      │
//!   └────▲───────────────────────────────▲──────────────────────────────────────▲───────┘
//!        └────────── advance ────────────┴────────── ticker ──────── tend ──────┘
//!                                                      ▲
//!                                                    clock (the one place that reads time)
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | [`core`] | what a wheel, a message, a batch and a group are; contracts of the stores; no I/O, no clock |
//! | [`memory`] | the store that lives in the process |
//! | [`protocol`] | frames and their bytes; docs/PROTOCOL.md specifies them |
//! | [`client`] | what a logic node in Rust links; compiles alone with the feature `client` |
//! | [`clock`] | the only place that reads a clock |
//! | [`ticker`] | moves time: the only caller of advance; with the read barrier and the precise timer |
//! | [`delivery`] | from the outbox to subscribers |
//! | [`server`], [`admin`] | the two doors: framed TCP for logic nodes, HTTP for metrics and probes |
//! | [`metrics`] | every metric, once |
//! | [`bench`] | `ackwheel bench`: load over the real protocol, every answer checked |
//! | [`process`] | panics, threads with a runtime of their own, systemd |
//! | [`logging`] | limits repeated log lines; no thread waits for the reader of stderr |
//! | [`config`], [`app`], [`cli`] | settings become a running sidecar; the verbs of the command line |
//!
//! To read it in an afternoon: [`core::tick`], [`core::ring`], `memory/ring.rs`, [`core::dispatch`],
//! [`ticker`], `server/session.rs`. docs/ARCHITECTURE.md says where to change what.

// Unit tests share code of tests/, which names the library.
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
