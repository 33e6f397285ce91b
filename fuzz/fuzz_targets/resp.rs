//! Bytes that anybody may send to the RESP listener: how the parser splits them into commands, and what the commands of
//! ackwheel are.
//!
//! The first byte of an input says in which pieces the rest arrives, and with which limits.

#![no_main]

use std::ops::Range;

use ackwheel::protocol::resp::command::{Arguments, Usage};
use ackwheel::protocol::resp::parser::{Limits, Parser};
use libfuzzer_sys::fuzz_target;
use redis_protocol::resp2::decode::decode;
use redis_protocol::resp2::types::OwnedFrame;

fuzz_target!(|input: &[u8]| {
    let Some((how, bytes)) = input.split_first() else { return };
    let limits = if how & 0x80 == 0 { Limits::GREETING } else { Limits::ADMITTED };
    let whole = read(bytes, bytes.len().max(1), limits);
    let pieces = read(bytes, usize::from(how & 0x7f).max(1), limits);
    assert_eq!(pieces, whole, "it does not matter how bytes arrive");
    whole.commands.iter().for_each(|(command, ranges)| {
        is_the_command_of_the_oracle(command, ranges);
        is_parsed(command, ranges);
    });
});

/// Compares a command with the frame of the crate redis-protocol, which knows no inline lines.
fn is_the_command_of_the_oracle(command: &[u8], ranges: &[Range<usize>]) {
    if command.first() != Some(&b'*') || ranges.is_empty() {
        return;
    }
    let words = ranges.iter().map(|range| OwnedFrame::BulkString(command[range.clone()].to_vec())).collect();
    assert_eq!(decode(command).unwrap(), Some((OwnedFrame::Array(words), command.len())));
}

/// The commands in some bytes, and the error that ended them.
#[derive(Debug, PartialEq)]
struct Read {
    commands: Vec<(Vec<u8>, Vec<Range<usize>>)>,
    error: Option<String>,
}

fn read(bytes: &[u8], piece: usize, limits: Limits) -> Read {
    let (mut parser, mut read) = (Parser::new(limits), Read { commands: Vec::new(), error: None });
    let (mut received, mut begin) = (0, 0);
    while received < bytes.len() {
        received = (received + piece).min(bytes.len());
        loop {
            match parser.parse(&bytes[begin..received]) {
                Ok(None) => break,
                Ok(Some(length)) => {
                    assert!(length > 0 && begin + length <= received);
                    read.commands.push((bytes[begin..begin + length].to_vec(), parser.arguments().to_vec()));
                    begin += length;
                }
                Err(error) => {
                    read.error = Some(error.to_string());
                    return read;
                }
            }
        }
    }
    read
}

/// Parses a command of ackwheel, and checks what no command may break.
fn is_parsed(command: &[u8], ranges: &[Range<usize>]) {
    let arguments = Arguments { bytes: command, ranges };
    let Some(usage) = arguments.get(0).and_then(Usage::find) else { return };
    let mut messages = Vec::new();
    match usage.parse(arguments, &mut messages) {
        Ok(_) => assert!(messages.len() < ranges.len().max(1)),
        Err(refusal) => assert!(!refusal.reason.closes() && !refusal.text.is_empty()),
    }
}
