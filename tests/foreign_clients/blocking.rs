//! A Python consumer whose handler blocks the event loop.

use std::fs;

use super::{GROUP, command, python_example};
use crate::support::process::{Process, lines};
use crate::support::sidecar::Sidecar;
use crate::support::{PATIENCE, wait_until};

/// A consumer that blocks its event loop for two ping intervals: the server closes each of its connections.
const BLOCKING: &str = r"
import asyncio, pathlib, sys, time
from ackwheel import AckwheelError, Client, Message

async def main(address, group, gate):
    dealt_with = []
    async with Client(address, group=group, credit=100, from_end=True) as client:
        batches = client.batches()
        for number in 1, 2:
            await client.add_new_msg([Message(number)], ack_timeout_ticks=number)
        while not pathlib.Path(gate).exists():
            try:
                batch = await asyncio.wait_for(anext(batches), 0.1)
            except asyncio.TimeoutError:
                continue
            dealt_with += [message.msg_id for message in batch.messages]
            time.sleep(2.5)
            try:
                await client.batch_ack(batch)
            except AckwheelError as error:
                assert error.outcome_unknown, error
        print(dealt_with, client.connections > 1)

asyncio.run(main(*sys.argv[1:]))
";

#[test]
fn a_python_consumer_that_blocks_its_event_loop_for_two_ping_intervals_deals_with_each_batch_once() {
    let folder = tempfile::tempdir().unwrap();
    let Some(words) = python_example(BLOCKING, folder.path()) else { return };
    let gate = folder.path().join("gate");
    // The least ping interval there is: 1 s.
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "30"]);
    let mut process = Process::spawn(command(&words).arg(sidecar.listen.to_string()).arg(GROUP).arg(&gate));
    wait_until("both messages have timed out and are settled", || {
        let metrics = sidecar.metrics();
        metrics.count("messages_timed_out_total") == 2
            && sidecar.group(GROUP).is_some_and(|group| group.outbox_batches == 0)
    });
    fs::write(&gate, "").unwrap();
    let (_, line) = lines(process.stdout()).recv_timeout(PATIENCE).unwrap();
    assert_eq!(line, "[1, 2] True", "once each, though its connections were lost");
}
