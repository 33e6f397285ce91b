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
//! | [`clock`], [`gate`] | the time, and the rule that sockets are read before a decision |
//! | [`alarm`] | a sleep that ends on time |
//! | [`ticker`] | where time moves: the only caller of advance |
//! | [`delivery`] | from the outbox to subscribers |
//! | [`server`], [`admin`] | the two doors |
//! | [`certificate`] | what the first of them speaks TLS with |
//! | [`metrics`] | every metric, once |
//! | [`systemd`] | what a service manager wants to hear: ready, alive, going |
//! | [`load`] | many requests a second over the real protocol, each answer checked: `ackwheel bench` |
//! | [`panics`] | a panic ends one connection, or the process |
//! | [`log`] | a fault that repeats does not fill the log, and nobody waits for the reader of the log |
//! | [`config`], [`app`], [`cli`] | settings become a running sidecar; the verbs of the command line |
//!
//! To read it in an afternoon: [`core::tick`], [`core::ring`], `memory/ring.rs`, [`core::dispatch`],
//! [`ticker`], `server/session.rs`. docs/ARCHITECTURE.md says where to change what.

#[cfg(feature = "sidecar")]
pub mod admin;
#[cfg(feature = "sidecar")]
pub mod alarm;
#[cfg(feature = "sidecar")]
pub mod app;
#[cfg(feature = "sidecar")]
pub mod certificate;
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
pub mod gate;
#[cfg(feature = "sidecar")]
pub mod load;
#[cfg(feature = "sidecar")]
pub mod log;
#[cfg(feature = "sidecar")]
pub mod memory;
#[cfg(feature = "sidecar")]
pub mod metrics;
#[cfg(feature = "sidecar")]
pub mod panics;
#[cfg(feature = "sidecar")]
mod patience;
#[cfg(feature = "client")]
pub mod protocol;
#[cfg(feature = "sidecar")]
pub mod redis;
#[cfg(feature = "sidecar")]
mod reloaded;
#[cfg(feature = "sidecar")]
pub mod server;
#[cfg(feature = "sidecar")]
pub mod systemd;
#[cfg(feature = "sidecar")]
mod thread;
#[cfg(feature = "sidecar")]
pub mod ticker;
