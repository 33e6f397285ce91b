//! docs/PROTOCOL.md says what the codec does: its examples are decoded and encoded, its tables compared.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use ackwheel::core::{MAX_BATCH_MESSAGES, MAX_GROUPS, MAX_NAME_LENGTH, Promise, Reason};
use ackwheel::protocol::frame::{
    DEFAULT_MAX_FRAME_LENGTH, FrameType, MAX_BATCH_IDS, MAX_MESSAGES, MAX_PING_LENGTH, MAX_TOKEN_LENGTH,
};
use ackwheel::protocol::{Body, Codec, DecodeError, Decoded};
use bytes::BytesMut;
use serde::Deserialize;

use crate::support::skipped::skip;

/// A fenced block: "```kind name: sentence", then bytes in hexadecimal with comments.
struct Example {
    name: String,
    line: usize,
    bytes: Vec<u8>,
}

fn document() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/PROTOCOL.md");
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn examples(document: &str, kind: &str) -> Vec<Example> {
    let mut examples = Vec::new();
    let mut lines = document.lines().enumerate();
    while let Some((line, text)) = lines.next() {
        let Some(fence) = text.strip_prefix("```").and_then(|fence| fence.strip_prefix(kind)) else { continue };
        let (name, sentence) = fence.split_once(':').unwrap_or_else(|| panic!("line {}: no sentence", line + 1));
        assert!(sentence.trim_end().ends_with('.'), "line {}: not a sentence: {sentence}", line + 1);
        let block = lines.by_ref().map(|(_, text)| text).take_while(|text| *text != "```");
        let bytes = block.flat_map(|text| hex(text.split('#').next().unwrap_or_default())).collect();
        examples.push(Example { name: name.trim().to_owned(), line: line + 1, bytes });
    }
    assert!(!examples.is_empty(), "no blocks of kind {kind}");
    examples
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<char> = text.chars().filter(|digit| !digit.is_whitespace()).collect();
    let byte = |pair: &[char]| {
        let pair: String = pair.iter().collect();
        assert_eq!(pair.len(), 2, "half a byte in {text:?}");
        u8::from_str_radix(&pair, 16).unwrap_or_else(|error| panic!("{pair:?} in {text:?}: {error}"))
    };
    digits.chunks(2).map(byte).collect()
}

/// The rows of all tables, as their trimmed cells.
fn rows(document: &str) -> Vec<Vec<&str>> {
    document
        .lines()
        .filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'))
        .map(|row| row.split('|').map(str::trim).collect())
        .collect()
}

/// A number as the document prints it: 1048576 as 1,048,576.
fn with_commas(number: usize) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).expect("digits are ASCII")).collect();
    groups.join(",")
}

#[test]
fn every_example_is_one_frame_of_its_type_and_is_encoded_to_its_bytes() {
    for Example { name, line, bytes } in examples(&document(), "hex ") {
        let mut received = BytesMut::from(&bytes[..]);
        let frame = match Codec::default().decode(&mut received) {
            Ok(Some(Decoded::Frame(frame))) => frame,
            other => panic!("line {line}: {name} is not a frame: {other:?}"),
        };
        assert!(received.is_empty(), "line {line}: {} bytes behind the frame", received.len());
        assert_eq!(frame.body.frame_type().as_str(), name, "line {line}");
        let mut encoded = BytesMut::new();
        Codec::default().encode_frame(&frame, &mut encoded);
        assert_eq!(&encoded[..], bytes, "line {line}: {name} is encoded to other bytes");
    }
}

/// A row of docs/protocol-vectors.json: a frame of a type, or bytes that are refused for a reason.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Vector {
    name: String,
    frame: Option<String>,
    refused: Option<String>,
    hex: String,
}

#[test]
fn the_file_of_vectors_has_every_example_and_more() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/protocol-vectors.json");
    let vectors: Vec<Vector> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for vector in &vectors {
        let mut received = BytesMut::from(&hex(&vector.hex)[..]);
        let (frame, refused) = match Codec::default().decode(&mut received) {
            Ok(Some(Decoded::Frame(frame))) => {
                let mut encoded = BytesMut::new();
                Codec::default().encode_frame(&frame, &mut encoded);
                assert_eq!(encoded, hex(&vector.hex), "{}", vector.name);
                (Some(frame.body.frame_type().as_str().to_owned()), None)
            }
            Ok(Some(Decoded::Refused { refusal, .. })) | Err(DecodeError { refusal, .. }) => {
                (None, Some(refusal.reason.to_string()))
            }
            other => panic!("{}: {other:?}", vector.name),
        };
        assert_eq!((&vector.frame, &vector.refused), (&frame, &refused), "{}", vector.name);
    }
    let bytes: BTreeSet<Vec<u8>> = vectors.iter().map(|vector| hex(&vector.hex)).collect();
    for Example { line, bytes: example, .. } in
        ["hex ", "refused "].iter().flat_map(|kind| examples(&document(), kind))
    {
        assert!(bytes.contains(&example), "line {line}: docs/protocol-vectors.json lacks it");
    }
    assert!(vectors.len() >= 40, "only {} vectors", vectors.len());
}

#[test]
fn the_program_of_the_page_on_clients_reads_all_vectors() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let page = std::fs::read_to_string(docs.join("CLIENTS.md")).unwrap();
    let (_, program) = page.split_once("```python\n").expect("the page has a program");
    let mut python = Command::new("python3");
    python.args(["-B", "-c", program.split("```").next().unwrap()]).current_dir(docs);
    match python.stdin(Stdio::null()).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("frames, whole and in pieces"), "{output:?}");
        }
        Err(error) => skip(&format!("the program of docs/CLIENTS.md, because python3 cannot be run: {error}")),
    }
}

#[test]
fn every_type_has_a_row_and_an_example() {
    let document = document();
    let (examples, rows) = (examples(&document, "hex "), rows(&document));
    for frame_type in FrameType::ALL {
        let (name, number) = (frame_type.as_str(), format!("`{:#04x}`", frame_type as u8));
        assert!(examples.iter().any(|example| example.name == name), "no example of {name}");
        let quoted = format!("`{name}`");
        let row = rows.iter().any(|row| row[0] == number && row.get(1) == Some(&quoted.as_str()));
        assert!(row, "no row for {name} with number {number}");
    }
}

#[test]
fn every_refused_example_is_refused_for_its_reason() {
    for Example { name, line, bytes } in examples(&document(), "refused ") {
        let refusal = match Codec::default().decode(&mut BytesMut::from(&bytes[..])) {
            Ok(Some(Decoded::Refused { refusal, .. })) => {
                assert!(!refusal.reason.closes(), "line {line}: it closes, so it should be broken");
                refusal
            }
            Err(DecodeError { refusal, .. }) => {
                assert!(refusal.reason.closes(), "line {line}: it is broken, so it should close");
                refusal
            }
            other => panic!("line {line}: {name} is not refused: {other:?}"),
        };
        assert_eq!(refusal.reason.as_str(), name, "line {line}");
    }
}

#[test]
fn every_reason_has_a_row_that_says_what_it_promises() {
    let document = document();
    let rows = rows(&document);
    let yes_or_no = |yes| if yes { "yes" } else { "no" };
    for reason in Reason::ALL {
        let (code, name) = (reason.code().to_string(), format!("`{reason}`"));
        let promise = match reason.promise() {
            Promise::NotApplied => "not applied",
            Promise::OutcomeUnknown => "outcome unknown",
        };
        let expected = [&code, &name, promise, yes_or_no(reason.retryable()), yes_or_no(reason.closes())];
        let row = rows.iter().find(|row| row.len() == 7 && row[1] == name);
        let row = row.unwrap_or_else(|| panic!("no row for {reason}"));
        assert_eq!(row[..5], expected);
        assert!(!row[5].is_empty() && !row[6].is_empty(), "{reason} needs its meaning and what to do");
    }
    let known = rows.iter().filter(|row| row.len() == 7 && row[0].parse::<u16>().is_ok()).count();
    assert_eq!(known, Reason::ALL.len(), "the table has codes that do not exist");
}

#[test]
fn the_examples_of_errors_say_of_their_code_what_the_table_says() {
    for Example { line, bytes, .. } in examples(&document(), "hex error") {
        let decoded = Codec::default().decode(&mut BytesMut::from(&bytes[..]));
        let Ok(Some(Decoded::Frame(frame))) = decoded else { panic!("line {line}: {decoded:?}") };
        let Body::Error(error) = frame.body else { panic!("line {line}: {frame:?}") };
        let reason = error.reason().unwrap_or_else(|| panic!("line {line}: no reason has code {}", error.code));
        assert_eq!((error.promise, error.retryable), (reason.promise(), reason.retryable()), "line {line}");
    }
}

#[test]
fn the_limits_are_those_of_the_code() {
    let document = document();
    let rows = rows(&document);
    for (what, limit) in [
        ("length of a frame", DEFAULT_MAX_FRAME_LENGTH as usize),
        ("messages in an AddNewMsg, DelMsg or GetMsg", MAX_MESSAGES),
        ("messages in a timeout batch", MAX_BATCH_MESSAGES),
        ("batch ids in a BatchAck", MAX_BATCH_IDS),
        ("bytes in a Ping", MAX_PING_LENGTH),
        ("bytes in a token", MAX_TOKEN_LENGTH),
        ("bytes in a group's name", MAX_NAME_LENGTH),
        ("groups of a server", MAX_GROUPS),
    ] {
        let row = rows.iter().find(|row| row[0] == what).unwrap_or_else(|| panic!("no row for {what}"));
        assert_eq!(row[2], with_commas(limit), "{what}");
    }
}
