//! The logic node of examples/clients/go: what becomes of its messages, and whom it believes to be offline.

use std::net::SocketAddr;

use ackwheel::protocol::frame::FrameType;
use serde::Deserialize;

use super::{GO, command};
use crate::support::frame_proxy::{FrameProxy, Planned, Trouble};
use crate::support::process::Run;
use crate::support::sidecar::Sidecar;

/// Its output about its 300 messages: 30 for the sessions of each last digit.
#[derive(Debug, Deserialize)]
struct Node {
    sent: u64,
    not_pushed: u64,
    first_push: u64,
    second_push: u64,
    late: u64,
    withdrawn: u64,
    given_up: u64,
    batches_again: u64,
    stored: u64,
    offline: Vec<u64>,
}

fn run_node(address: SocketAddr) -> Option<Node> {
    let program = GO.as_ref()?[0].with_file_name("logicnode");
    let run = Run::of(command(&[program]).args(["-addr", &address.to_string(), "-timeout", "2s"]));
    let node: Node = serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {run:?}"));
    assert_eq!(run.code, 0, "{run:?}");
    // One of ten is silent, and one has gone; all others were heard.
    assert_eq!((node.sent, &node.offline[..]), (300, &[8, 9, 18, 19][..]), "{node:?}");
    Some(node)
}

#[test]
fn the_logic_node_in_go_knows_what_became_of_each_message() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "20"]);
    let Some(node) = run_node(sidecar.listen) else { return };
    assert_eq!(node.stored, 60, "{node:?}");
    assert_eq!(node.first_push + node.second_push + node.late, 240, "{node:?}");
    assert!(node.second_push >= 30 && node.late > 0 && node.given_up >= 30, "{node:?}");
    assert_eq!(node.not_pushed + node.withdrawn, 30, "those who have gone: {node:?}");
    sidecar.wait_for_settled("default");
    let metrics = sidecar.metrics();
    assert_eq!(
        (metrics.acked("acked") + metrics.acked("late"), metrics.acked("withdrawn")),
        (240, node.withdrawn)
    );
    assert_eq!(metrics.count("messages_in_flight"), 0);
}

#[test]
fn the_logic_node_in_go_goes_on_when_its_connection_is_cut() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "20"]);
    let cut = |frame_type: FrameType, nth| Planned { frame_type: frame_type as u8, nth, trouble: Trouble::Cut };
    let cuts = [(FrameType::AddNewMsg, 20), (FrameType::DelMsgAnswer, 5), (FrameType::BatchAck, 1)];
    let proxy = FrameProxy::to(sidecar.listen, &cuts.map(|(frame_type, nth)| cut(frame_type, nth)));
    let Some(node) = run_node(proxy.address) else { return };
    assert!(proxy.still_planned().is_empty(), "{:?}", proxy.still_planned());
    assert_eq!(node.batches_again, 0, "the client repeats the BatchAck that was lost: {node:?}");
    assert_eq!(node.stored, 60, "what was refused without a connection was added again: {node:?}");
    assert_eq!(node.not_pushed + node.withdrawn, 30, "those who have gone: {node:?}");
    sidecar.wait_for_settled("default");
    assert_eq!(sidecar.metrics().count("messages_in_flight"), 0);
}
