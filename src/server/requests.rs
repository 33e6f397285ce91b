//! The hot path of the native protocol: decodes adds (AddNewMsg) and dels (DelMsg) from the input, and encodes their
//! answers.

use std::cell::Cell;
use std::time::Instant;

use super::native::Native;
use super::session::Session;
use crate::core::{RequestBatch, Submitted};
use crate::protocol::codec::correlation_id;
use crate::protocol::frame::FrameType;
use crate::protocol::{DecodeError, Decoded};

/// How many messages a request batch may hold before it is submitted. Large batches share the cost of locks and of
/// memory latency among their messages. Frames are not split, so the last frame may exceed this number.
pub(super) const MAX_MESSAGES: usize = 4_096;

/// The limit for the memory that a thread keeps between two reads: a request batch with room for more messages than
/// this is freed.
pub(super) const MAX_KEPT_BY_A_THREAD: usize = 4 * MAX_MESSAGES;

thread_local! {
    /// The request batch that all connections of a thread share, so that an idle connection needs no batch. Each read
    /// takes the batch out and puts it back empty. If a connection panics, its batch is dropped with the connection.
    pub(super) static BATCH: Cell<Option<Box<RequestBatch>>> = const { Cell::new(None) };
}

impl Session<Native> {
    pub(super) fn read_frames(&mut self) {
        let now = self.shared.clock.now();
        while self.is_listening() {
            self.submit_requests(now);
            match self.stream.decode() {
                Ok(None) => break,
                Ok(Some(Decoded::Frame(frame))) => {
                    self.shared.metrics.count_frame(frame.body.frame_type());
                    self.handle_frame(frame);
                }
                Ok(Some(Decoded::Refused { correlation, refusal })) => {
                    self.refuse(correlation, &refusal);
                }
                Err(DecodeError { correlation, refusal }) => {
                    self.refuse_broken_frame(correlation, refusal);
                }
            }
        }
    }

    /// Submits the adds and dels at the front of the input, and answers the Pings between them. Stops at any other
    /// frame.
    fn submit_requests(&mut self, now: Instant) {
        let revolution = self.shared.rings.wheel().slots();
        self.before_write();
        let mut batch = BATCH.take().unwrap_or_default();
        loop {
            let echoed = self.stream.echo_pings();
            self.shared.metrics.count_frames(FrameType::Ping, echoed.pings);
            self.shared.metrics.count_frames(FrameType::Pong, echoed.pings + echoed.pongs);
            self.stream.take_requests(&mut batch, MAX_MESSAGES, revolution);
            if !batch.is_empty() {
                let (submitted, adds) = self.submit(&mut batch, now);
                self.shared.metrics.count_frames(FrameType::AddNewMsg, adds);
                self.shared.metrics.count_frames(FrameType::DelMsg, batch.requests.len() as u64 - adds);
                if submitted == Submitted::Completed {
                    self.send_answers(&batch);
                }
                batch.clear(MAX_KEPT_BY_A_THREAD);
            } else if echoed.bytes == 0 {
                break;
            }
        }
        BATCH.set(Some(batch));
    }

    pub(super) fn send_answers(&mut self, batch: &RequestBatch) {
        self.shared.metrics.count_requests(batch);
        let (mut adds, mut dels) = (0, 0);
        for request in &batch.requests {
            match &request.refusal {
                None => {
                    adds += u64::from(request.operation.is_add());
                    dels += u64::from(!request.operation.is_add());
                    let outcomes = &batch.outcomes()[request.range()];
                    self.stream.write(|codec, out| codec.encode_answer(request, outcomes, out));
                }
                Some(refusal) => self.refuse(correlation_id(request), refusal),
            }
        }
        self.shared.metrics.count_frames(FrameType::AddNewMsgAnswer, adds);
        self.shared.metrics.count_frames(FrameType::DelMsgAnswer, dels);
    }
}
