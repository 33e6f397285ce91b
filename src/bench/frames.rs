//! Keeps the unanswered requests of a connection, encodes Pings, and checks answers without decoding them.
//!
//! The bench shares its machine with the server that it measures, so it may spend only nanoseconds on a frame. It
//! recognises an expected answer by its bytes. [`Codec`] decodes any other frame.

use bytes::BytesMut;

use crate::core::{AddOutcome, DelOutcome};
use crate::protocol::codec::{Codec, DecodeError, Decoded, LENGTH_LENGTH, begin};
use crate::protocol::frame::{
    Body, COUNTED_HEAD_LENGTH, DEFAULT_MAX_FRAME_LENGTH, Frame, FrameType, HEAD_LENGTH, MAX_PING_LENGTH,
};

/// The number of the outcome "acked" in a DelMsgAnswer.
const ACKED: u8 = 1;

/// Returns the number of bytes in the body of an AddNewMsg, the request that adds messages. `with_clients` says whether
/// the messages have client ids.
pub(super) const fn add_body_length(messages: usize, with_clients: bool) -> usize {
    8 + messages * if with_clients { 16 } else { 8 }
}

/// The bytes that follow the number in the payload of a Ping, repeated up to its end.
const FILLING: [u8; 8] = [0xa5; 8];

/// Appends a Ping. Its payload is `number`, followed by [`FILLING`] up to `length` bytes. `length` must be a multiple
/// of 8 from 8 to 64.
pub(super) fn put_ping(out: &mut BytesMut, correlation: u32, number: u64, length: usize) {
    let mut ping = [FILLING[0]; HEAD_LENGTH + MAX_PING_LENGTH];
    ping[..8].copy_from_slice(&begin(HEAD_LENGTH + length, FrameType::Ping, 0).to_be_bytes());
    ping[8..12].copy_from_slice(&correlation.to_be_bytes());
    ping[12..20].copy_from_slice(&number.to_be_bytes());
    out.extend_from_slice(&ping[..HEAD_LENGTH + length]);
}

/// Returns the frame at the front of the bytes, or `None` if it is not complete yet. Fails if its length is invalid.
pub(super) fn next_frame(bytes: &[u8]) -> Result<Option<&[u8]>, String> {
    let Some(length) = u32_at(bytes, 0) else { return Ok(None) };
    if (length as usize) < COUNTED_HEAD_LENGTH || length > DEFAULT_MAX_FRAME_LENGTH {
        return Err(format!("the server sent a frame whose length is {length}, which no frame can have"));
    }
    Ok(bytes.get(..LENGTH_LENGTH + length as usize))
}

fn u32_at(frame: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*frame.get(at..)?.first_chunk()?))
}

fn u64_at(frame: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*frame.get(at..)?.first_chunk()?))
}

/// Returns the correlation id of a complete frame, which links an answer to its request.
pub(super) fn correlation(frame: &[u8]) -> u32 {
    u32_at(frame, 8).unwrap_or_default()
}

/// Returns the deadline, the tick at whose end the messages time out, from the answer to an AddNewMsg. Returns `None`
/// unless the frame says that all `count` messages were added.
pub(super) fn added(frame: &[u8], count: u32) -> Option<u64> {
    let length = HEAD_LENGTH + 16 + (count as usize).div_ceil(8);
    let (found, deadline, counts) = (u64_at(frame, 0)?, u64_at(frame, 12)?, u64_at(frame, 20)?);
    // The lower 32 bits of `counts` are the number of re-armed messages (messages that were in flight already), which
    // must be 0.
    let right = found == begin(length, FrameType::AddNewMsgAnswer, 0)
        && counts == u64::from(count) << 32
        && frame[HEAD_LENGTH + 16..].iter().all(|bits| *bits == 0);
    right.then_some(deadline)
}

/// Returns whether the frame answers a DelMsg of `count` messages and says that all of them were acknowledged.
pub(super) fn acked(frame: &[u8], count: u32) -> bool {
    u64_at(frame, 0) == Some(begin(HEAD_LENGTH + 4 + count as usize, FrameType::DelMsgAnswer, 0))
        && u32_at(frame, 12) == Some(count)
        && frame[HEAD_LENGTH + 4..].iter().all(|outcome| *outcome == ACKED)
}

/// Returns whether the frame answers the Ping with this number and this payload length.
pub(super) fn echoed(frame: &[u8], number: u64, length: usize) -> bool {
    u64_at(frame, 0) == Some(begin(HEAD_LENGTH + length, FrameType::Pong, 0))
        && u64_at(frame, HEAD_LENGTH) == Some(number)
        && frame[HEAD_LENGTH + 8..].chunks(FILLING.len()).all(|eight| eight == FILLING)
}

/// Describes a wrong answer to the request `sent`. Fails if the answer cannot be decoded.
#[cold]
pub(super) fn wrong(frame: &[u8], sent: Sent) -> Result<String, String> {
    let request = match sent.kind {
        Kind::Add => "an AddNewMsg",
        Kind::Del => "a DelMsg",
        Kind::Ping => "a Ping",
    };
    let asked = u64::from(sent.count);
    Ok(match decode(frame)?.body {
        Body::Error(error) => format!("{request} was refused: {}", error.text),
        Body::AddNewMsgAnswer(answer) if sent.kind == Kind::Add && answer.outcomes.len() as u64 == asked => {
            let rearmed = answer.outcomes.iter().filter(|outcome| **outcome == AddOutcome::Rearmed).count();
            format!("{request} was answered with re-armed for {rearmed} of {asked} messages, not with added")
        }
        Body::DelMsgAnswer(outcomes) if sent.kind == Kind::Del && outcomes.len() as u64 == asked => {
            let wrong = outcomes.iter().find(|outcome| **outcome != DelOutcome::Acked);
            let advice = if wrong == Some(&DelOutcome::Late) {
                ": the message timed out before its turn came; keep fewer --in-flight, or raise --ack-timeout-ticks"
            } else {
                ""
            };
            let wrong = wrong.unwrap_or(&DelOutcome::Acked);
            format!("{request} was answered with {wrong}, not with acked{advice}")
        }
        body => format!("{request} was answered with an unexpected {}", body.frame_type().as_str()),
    })
}

/// Handles a frame that answers no request. Answers a Ping in `out`. Returns an error text if the server must not send
/// such a frame. Fails if the connection can no longer be used.
#[cold]
pub(super) fn unsolicited(frame: &[u8], out: &mut BytesMut) -> Result<Option<String>, String> {
    let Frame { correlation, body } = decode(frame)?;
    match body {
        Body::Ping(payload) => {
            Codec::default().encode_frame(&Frame::new(correlation, Body::Pong(payload)), out);
            Ok(None)
        }
        Body::GoAway { .. } => Err("the server says that it will close the connection".to_owned()),
        Body::Error(error) => Err(format!("the server said: {}", error.text)),
        body => Ok(Some(format!("the server sent a {} that nobody asked for", body.frame_type().as_str()))),
    }
}

/// Decodes a complete frame.
fn decode(frame: &[u8]) -> Result<Frame, String> {
    match Codec::default().decode(&mut BytesMut::from(frame)) {
        Ok(Some(Decoded::Frame(frame))) => Ok(frame),
        Ok(Some(Decoded::Refused { refusal, .. })) | Err(DecodeError { refusal, .. }) => {
            Err(format!("the server sent a frame that cannot be read: {}", refusal.text))
        }
        Ok(None) => Err("the server sent a frame that does not end".to_owned()),
    }
}

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An AddNewMsg.
    Add,
    /// A DelMsg.
    Del,
    /// A Ping.
    Ping,
}

/// A request in flight. Its size is half of a cache line (32 bytes), because the requests of all connections share the
/// caches with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    /// When the request was sent or, at a fixed rate, when it was due, in ns since the load began.
    pub(super) at: u64,
    /// The number of the first message, or the number of the Ping.
    pub(super) first: u64,
    correlation: u32,
    /// How long after `at` the request was encoded, in ns, for [`Sent::made_at`]. The maximum is about four seconds
    /// (the range of a `u32`). So `made_at` may return too early a time, but never too late a time.
    made_after: u32,
    /// How many messages the request has; 0 after it is answered.
    pub(super) count: u32,
    /// The type of the request.
    pub(super) kind: Kind,
}

const _: () = assert!(size_of::<Sent>() == 32, "two requests fill a cache line");

impl Sent {
    /// Creates a request that was due at `at` and encoded at `made_at`.
    pub(super) fn new(kind: Kind, first: u64, count: u32, at: u64, made_at: u64) -> Sent {
        let made_after = u32::try_from(made_at.saturating_sub(at)).unwrap_or(u32::MAX);
        Sent { at, first, correlation: 0, made_after, count, kind }
    }

    /// Returns when the request was encoded. It was written at this time or later.
    pub(super) fn made_at(&self) -> u64 {
        self.at + u64::from(self.made_after)
    }
}

/// The number of slots for each unanswered request that the pipeline allows. Answers may come in any order, but a slot
/// is free only after all earlier requests are answered. So answered requests still occupy slots for some time.
const SPARE: usize = 2;

/// The unanswered requests, in a ring of slots. The correlation id gives the slot, so no search is needed.
#[derive(Debug)]
pub(super) struct Outstanding {
    slots: Box<[Sent]>,
    /// The pipeline: the maximum number of unanswered requests.
    pipeline: usize,
    /// How many requests are unanswered.
    count: usize,
    /// The sequence number of the next request. Its lower 32 bits are the correlation id.
    next: u64,
    /// The first sequence number whose slot may be occupied. All earlier requests are answered.
    oldest: u64,
}

impl Outstanding {
    /// Creates a ring for up to `pipeline` unanswered requests. `first` is the first correlation id to use.
    pub(super) fn new(pipeline: usize, first: u32) -> Outstanding {
        let slots = vec![Sent::new(Kind::Add, 0, 0, 0, 0); (pipeline * SPARE).next_power_of_two()];
        let first = u64::from(first);
        Outstanding { slots: slots.into_boxed_slice(), pipeline, count: 0, next: first, oldest: first }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns whether another request may be made.
    pub(super) const fn has_room(&self) -> bool {
        // One slot stays free, because `next_correlation` may skip a correlation id.
        self.count < self.pipeline && self.next - self.oldest < self.slots.len() as u64 - 1
    }

    #[expect(clippy::cast_possible_truncation, reason = "the ring has fewer places than a usize has values")]
    const fn place(&self, sequence: u64) -> usize {
        sequence as usize & (self.slots.len() - 1)
    }

    /// Returns the correlation id of the next request. Skips 0, which the server uses for its own frames.
    #[expect(clippy::cast_possible_truncation, reason = "correlation ids start again after four billion")]
    pub(super) const fn next_correlation(&mut self) -> u32 {
        if self.next as u32 == 0 {
            self.next += 1;
        }
        self.next as u32
    }

    /// Stores a request under the correlation id that [`next_correlation`](Outstanding::next_correlation) returns. The
    /// request must have at least one message.
    pub(super) fn push(&mut self, sent: Sent) {
        debug_assert!(sent.count > 0, "a slot without messages counts as free");
        let correlation = self.next_correlation();
        let place = self.place(self.next);
        self.slots[place] = Sent { correlation, ..sent };
        self.next += 1;
        self.count += 1;
    }

    /// Removes and returns the unanswered request with this correlation id, if there is one.
    pub(super) fn take(&mut self, correlation: u32) -> Option<Sent> {
        let place = self.place(u64::from(correlation));
        let slot = &mut self.slots[place];
        if slot.correlation != correlation || slot.count == 0 {
            return None;
        }
        let sent = *slot;
        slot.count = 0;
        self.count -= 1;
        if self.count == 0 {
            // Start again at the first slot: if requests come in bursts, the same few slots stay in the caches.
            self.next = self.next.next_multiple_of(self.slots.len() as u64);
            self.oldest = self.next;
            return Some(sent);
        }
        while self.oldest < self.next && self.slots[self.place(self.oldest)].count == 0 {
            self.oldest += 1;
        }
        Some(sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Message, Tick};
    use crate::protocol::frame::AddNewMsgAnswer;

    const COUNTS: [u32; 5] = [1, 2, 8, 9, 512];

    fn encoded(correlation: u32, body: Body) -> Vec<u8> {
        let mut bytes = BytesMut::new();
        Codec::default().encode_frame(&Frame::new(correlation, body), &mut bytes);
        bytes.to_vec()
    }

    fn payload(number: u64, length: usize) -> Vec<u8> {
        let mut payload = number.to_be_bytes().to_vec();
        payload.resize(length, 0xa5);
        payload
    }

    #[test]
    fn pings_are_those_of_the_codec_and_as_long_as_adds() {
        for (count, with_clients) in COUNTS.into_iter().flat_map(|count| [(count, false), (count, true)]) {
            let messages = (0..u64::from(count)).map(|n| Message::new(!n, if with_clients { n + 1 } else { 0 }));
            let body = Body::AddNewMsg { messages: messages.collect(), ack_timeout_ticks: 3, attempt: 1 };
            let length = encoded(7, body).len() - HEAD_LENGTH;
            assert_eq!(length, add_body_length(count as usize, with_clients));
        }
        for length in [8, 16, 64] {
            let mut out = BytesMut::new();
            put_ping(&mut out, 11, 5, length);
            assert_eq!(out, encoded(11, Body::Ping(payload(5, length))));
        }
    }

    #[test]
    fn right_answers_are_known_as_the_codec_writes_them() {
        for count in COUNTS {
            let outcomes = vec![AddOutcome::Added; count as usize];
            let answer = encoded(7, Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline: Tick(115), outcomes }));
            assert_eq!((added(&answer, count), correlation(&answer)), (Some(115), 7));
            assert_eq!(added(&answer, count + 1), None);
            assert!(!acked(&answer, count));

            let answer = encoded(9, Body::DelMsgAnswer(vec![DelOutcome::Acked; count as usize]));
            assert!(acked(&answer, count) && !acked(&answer, count + 1));
            assert_eq!(added(&answer, count), None);
        }
        for length in [8, 16, 64] {
            let pong = encoded(1, Body::Pong(payload(5, length)));
            assert!(echoed(&pong, 5, length) && !echoed(&pong, 6, length) && !echoed(&pong, 5, length + 8));
            for changed in HEAD_LENGTH..pong.len() {
                let mut pong = pong.clone();
                pong[changed] ^= 1;
                assert!(!echoed(&pong, 5, length));
            }
        }
    }

    #[test]
    fn one_wrong_outcome_among_many_is_seen() {
        for wrong in [0, 1, 7, 8, 511] {
            let mut outcomes = vec![AddOutcome::Added; 512];
            outcomes[wrong] = AddOutcome::Rearmed;
            let mut answer = encoded(7, Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline: Tick(1), outcomes }));
            assert_eq!(added(&answer, 512), None);
            // The answer stays wrong if its count of re-armed messages becomes 0.
            answer[24..28].fill(0);
            assert_eq!(added(&answer, 512), None);
            for outcome in [DelOutcome::Unknown, DelOutcome::Late, DelOutcome::Withdrawn] {
                let mut outcomes = vec![DelOutcome::Acked; 512];
                outcomes[wrong] = outcome;
                assert!(!acked(&encoded(9, Body::DelMsgAnswer(outcomes)), 512));
            }
        }
    }

    #[test]
    fn frames_are_cut_where_they_end_and_broken_lengths_are_named() {
        let mut bytes = encoded(1, Body::Pong(vec![1, 2]));
        bytes.extend(encoded(2, Body::Pong(vec![3])));
        let first = next_frame(&bytes).unwrap().unwrap();
        assert_eq!((first.len(), correlation(first)), (14, 1));
        let second = next_frame(&bytes[14..]).unwrap().unwrap();
        assert_eq!((second.len(), correlation(second)), (13, 2));
        for cut in 0..13 {
            assert_eq!(next_frame(&second[..cut]), Ok(None));
        }
        for (bytes, length) in [(&[0, 0, 0, 7], "length is 7,"), (b"HTTP", "length is 1213486160,")] {
            assert!(next_frame(bytes).is_err_and(|text| text.contains(length)));
        }
    }

    fn sent(first: u64) -> Sent {
        Sent::new(Kind::Add, first, 1, 0, 0)
    }

    #[test]
    fn every_request_is_answered_once_in_whatever_order() {
        let mut outstanding = Outstanding::new(3, 5);
        let mut ids = Vec::new();
        while outstanding.has_room() {
            ids.push(outstanding.next_correlation());
            outstanding.push(sent(u64::from(*ids.last().unwrap())));
        }
        assert_eq!(ids, [5, 6, 7]);
        for id in [6, 7, 5] {
            assert_eq!(outstanding.take(id).map(|sent| sent.first), Some(u64::from(id)));
            assert_eq!(outstanding.take(id), None);
        }
        assert!(outstanding.is_empty() && outstanding.take(8).is_none() && outstanding.take(0).is_none());
    }

    #[test]
    fn a_request_is_what_it_was_when_it_is_answered_and_was_made_no_later() {
        for (late_by, reported) in [(0, 0), (77, 77), (5_000_000_000, u64::from(u32::MAX))] {
            for kind in [Kind::Add, Kind::Del, Kind::Ping] {
                let mut outstanding = Outstanding::new(1, 1);
                outstanding.push(Sent::new(kind, u64::MAX, 32_768, 1 << 50, (1 << 50) + late_by));
                let taken = outstanding.take(1).expect("the request is unanswered");
                assert_eq!((taken.kind, taken.first, taken.count), (kind, u64::MAX, 32_768));
                assert_eq!((taken.at, taken.made_at()), (1 << 50, (1 << 50) + reported));
            }
        }
    }

    #[test]
    fn a_request_that_is_never_answered_holds_up_the_ring_and_is_not_overwritten() {
        let mut outstanding = Outstanding::new(2, 1);
        outstanding.push(sent(77));
        let mut others = 0;
        while outstanding.has_room() {
            let id = outstanding.next_correlation();
            outstanding.push(sent(0));
            assert!(outstanding.take(id).is_some());
            others += 1;
        }
        assert_eq!((others, outstanding.take(1).map(|sent| sent.first)), (2, Some(77)));
        assert!(outstanding.has_room());
    }

    #[test]
    fn correlation_ids_start_again_after_the_last_and_skip_0() {
        let mut outstanding = Outstanding::new(2, u32::MAX - 1);
        let mut ids = vec![outstanding.next_correlation()];
        outstanding.push(sent(9));
        for _ in 0..7 {
            ids.push(outstanding.next_correlation());
            outstanding.push(sent(9));
            // One request is always unanswered.
            assert_eq!(outstanding.take(ids[ids.len() - 2]).map(|sent| sent.first), Some(9));
        }
        assert_eq!(ids, [u32::MAX - 1, u32::MAX, 1, 2, 3, 4, 5, 6]);
        assert!(outstanding.take(6).is_some() && outstanding.is_empty() && outstanding.has_room());
    }

    #[test]
    fn the_first_places_are_used_again_when_nothing_is_unanswered() {
        let mut outstanding = Outstanding::new(8, u32::MAX - 20);
        let mut places = Vec::new();
        for _ in 0..4 {
            let ids = [0; 3].map(|_| {
                let id = outstanding.next_correlation();
                assert_eq!(id, outstanding.next_correlation(), "a second call returns the same id");
                places.push(id % 16);
                outstanding.push(sent(9));
                id
            });
            for id in ids {
                assert_eq!(outstanding.take(id).map(|sent| sent.first), Some(9));
            }
            assert!(outstanding.is_empty() && outstanding.has_room());
        }
        // After the last correlation id, the ids start again at 1.
        assert_eq!(places, [11, 12, 13, 0, 1, 2, 1, 2, 3, 0, 1, 2]);
    }
}
