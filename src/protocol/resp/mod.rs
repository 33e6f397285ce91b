//! The RESP protocol: splits bytes into commands, and parses the commands of ackwheel. docs/RESP.md lists them.

pub mod command;
pub mod parser;
