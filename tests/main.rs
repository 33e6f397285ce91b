//! The tests from outside: one binary, a harness in `support`, and a file a behaviour.
//!
//! They see what users see: the program's output, its exit codes, its log, its admin endpoints, and bytes on
//! its sockets, which `support::raw` writes and reads by docs/PROTOCOL.md alone. Every sidecar listens on free
//! ports, so all of them can run at the same time.
#![expect(
    clippy::unwrap_used,
    clippy::unchecked_time_subtraction,
    clippy::similar_names,
    reason = "a panic is how a test fails, and giver and given are who and what"
)]

mod support;

mod protocol_document;

mod access;
mod admin;
mod at_the_limit;
mod bench;
mod check;
mod command_line;
mod compare;
mod concurrent;
mod configuration;
mod connection_memory;
mod connections;
mod container;
mod dashboards;
mod delivery_fairness;
mod deploy;
mod drain;
mod example_configuration;
mod failover;
mod failover_losses;
mod fault_run;
mod fencing;
mod foreign_clients;
mod groups;
mod handshake_flood;
mod harness_network;
mod harness_redis;
mod hostile;
mod journal;
mod journal_faults;
mod kubernetes;
mod leaderships;
mod limits;
mod log_output;
mod logs;
mod man_pages;
mod manual;
mod metrics;
mod model;
mod page;
mod panics;
mod partitions;
mod probes;
mod readme;
mod redelivery;
mod redis_ages;
mod redis_bulk;
mod redis_bursts;
mod redis_clock;
mod redis_cluster;
mod redis_connections;
mod redis_far;
mod redis_faults;
mod redis_heartbeats;
mod redis_lease;
mod redis_losses;
mod redis_lost_writes;
mod redis_overload;
mod redis_refusals;
mod redis_scripts;
mod redis_secrets;
mod redis_stalls;
mod refusals;
mod replay;
mod requests;
mod resp;
mod ring_contract;
mod rings;
mod sentinels;
mod shared_model;
mod shared_wheel;
mod stall;
mod starting;
mod strangers;
mod systemd;
mod take;
mod terminal_output;
mod tidy;
mod tls;
mod usage;
