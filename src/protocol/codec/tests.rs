//! Tests that frames survive encoding and decoding, and that the decoder survives arbitrary bytes.

use bytes::{BufMut, BytesMut};
use proptest::collection::vec;
use proptest::prelude::*;

use super::super::frame::{
    AddNewMsgAnswer, Body, Error, Frame, FrameType, GoAwayReason, Hello, MAX_MESSAGES, Secret, Subscribe,
    TimeoutBatch, Welcome,
};
use super::{Codec, DecodeError, Decoded};
use crate::core::{
    AddOutcome, BatchId, DelOutcome, Message, MessageState, Promise, Reason, Tick, TickCounts, TimedOut,
};

fn bytes_of(frame: &Frame) -> BytesMut {
    let mut bytes = BytesMut::new();
    Codec::default().encode_frame(frame, &mut bytes);
    bytes
}

fn decode(bytes: &mut BytesMut) -> Option<Decoded> {
    Codec::default().decode(bytes).unwrap()
}

/// Returns the bytes of a frame, with the length field in front.
fn with_length(counted: &[u8]) -> BytesMut {
    let mut bytes = BytesMut::new();
    bytes.put_u32(u32::try_from(counted.len()).unwrap());
    bytes.put_slice(counted);
    bytes
}

/// Returns the reason and the text with which the decoder refuses a frame.
fn refused(counted: &[u8]) -> (Reason, String) {
    match decode(&mut with_length(counted)) {
        Some(Decoded::Refused { correlation: 7, refusal }) => (refusal.reason, refusal.text.into_owned()),
        other => panic!("not refused, or under another correlation id: {other:?}"),
    }
}

/// Returns the head of a frame with correlation id 7, without its length.
fn head(number: u8, flags: u8, status: u8) -> Vec<u8> {
    vec![number, flags, 0, status, 0, 0, 0, 7]
}

fn broken(bytes: &[u8]) -> (u32, Reason, String) {
    match Codec::default().decode(&mut BytesMut::from(bytes)) {
        Err(DecodeError { correlation, refusal }) => (correlation, refusal.reason, refusal.text.into_owned()),
        other => panic!("not broken: {other:?}"),
    }
}

fn messages() -> impl Strategy<Value = Vec<Message>> {
    let without_clients = vec(any::<u64>().prop_map(Message::from), 1..40);
    let with_clients = vec(any::<(u64, u64)>().prop_map(Message::from), 1..40);
    prop_oneof![without_clients, with_clients]
}

fn batch_id() -> impl Strategy<Value = BatchId> {
    any::<(u64, u64, u16, u32)>().prop_map(|(tick, epoch, ring, seq)| BatchId {
        tick: Tick(tick),
        epoch,
        ring,
        seq,
    })
}

fn session_body() -> impl Strategy<Value = Body> {
    let hello = (any::<(u8, u8)>(), vec(any::<u8>(), 0..=1_024), ".{0,60}").prop_map(|(versions, token, name)| {
        let (lowest_version, highest_version) = (versions.0.min(versions.1), versions.0.max(versions.1));
        Body::Hello(Hello { lowest_version, highest_version, token: Secret(token), client_name: name })
    });
    let welcome =
        (any::<(u8, u16, [u32; 5])>(), ".{0,60}", ".{0,60}").prop_map(|(numbers, store, server_name)| {
            let (version, slots, [tick_ms, max_frame_length, max_messages, max_credit, ping_interval_ms]) =
                numbers;
            Body::Welcome(Welcome {
                version,
                slots,
                tick_ms,
                max_frame_length,
                max_messages,
                max_credit,
                ping_interval_ms,
                store,
                server_name,
            })
        });
    let go_away = any::<(bool, u32)>().prop_map(|(done, grace_ms)| {
        let reason = if done { GoAwayReason::Done } else { GoAwayReason::Draining };
        Body::GoAway { reason, grace_ms }
    });
    let error =
        (1..=u16::MAX, any::<(bool, bool)>(), ".{0,200}").prop_map(|(code, (unknown, retryable), text)| {
            let promise = if unknown { Promise::OutcomeUnknown } else { Promise::NotApplied };
            Body::Error(Error { code, promise, retryable, text })
        });
    let payload = || vec(any::<u8>(), 0..=64);
    prop_oneof![hello, welcome, go_away, error, payload().prop_map(Body::Ping), payload().prop_map(Body::Pong),]
}

fn message_body() -> impl Strategy<Value = Body> {
    let add = (messages(), any::<(u16, u8)>()).prop_map(|(messages, (ack_timeout_ticks, attempt))| {
        Body::AddNewMsg { messages, ack_timeout_ticks, attempt }
    });
    let added = (any::<u64>(), vec(any::<bool>(), 1..80)).prop_map(|(deadline, rearmed)| {
        let outcome = |rearmed| if rearmed { AddOutcome::Rearmed } else { AddOutcome::Added };
        let outcomes = rearmed.into_iter().map(outcome).collect();
        Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline: Tick(deadline), outcomes })
    });
    let del = (messages(), any::<bool>()).prop_map(|(messages, withdraw)| Body::DelMsg { messages, withdraw });
    let deleted = vec(prop::sample::select(&DelOutcome::ALL[..]), 1..80).prop_map(Body::DelMsgAnswer);
    let in_flight = |n| MessageState::InFlight { deadline: Tick(u64::from(n) << 32), remaining_ms: n, attempt: 7 };
    let state =
        prop_oneof![any::<u32>().prop_map(in_flight), Just(MessageState::Late), Just(MessageState::Unknown)];
    let found = vec(state, 1..40).prop_map(Body::GetMsgAnswer);
    prop_oneof![add, added, del, deleted, messages().prop_map(Body::GetMsg), found]
}

fn batch_body() -> impl Strategy<Value = Body> {
    let subscribe =
        ("[a-z.]{0,64}", any::<(u32, bool, bool)>()).prop_map(|(group, (credit, ephemeral, from_end))| {
            Body::Subscribe(Subscribe { group, credit, ephemeral, from_end })
        });
    let subscribed =
        ("[a-z.]{0,64}", any::<bool>()).prop_map(|(group, created)| Body::Subscribed { group, created });
    let timed_out = any::<(u64, u64, u8)>()
        .prop_map(|(msg_id, client, attempt)| TimedOut { message: Message::new(msg_id, client), attempt });
    let batch = (batch_id(), any::<(u32, u64, [u64; 2], [bool; 3])>(), vec(timed_out, 1..40)).prop_map(
        |(id, (delivery_count, age_ms, tick, [storm, drained, last]), messages)| {
            let (added, acked) = (tick[0].max(tick[1]), tick[0].min(tick[1]));
            let counts = TickCounts { added, acked, storm, drained };
            Body::TimeoutBatch(TimeoutBatch { id, delivery_count, age_ms, counts, last, messages })
        },
    );
    let nack = (batch_id(), any::<u32>()).prop_map(|(batch, delay_ms)| Body::BatchNack { batch, delay_ms });
    prop_oneof![
        subscribe,
        subscribed,
        batch,
        nack,
        vec(batch_id(), 1..20).prop_map(Body::BatchAck),
        any::<u32>().prop_map(|settled| Body::BatchAckAnswer { settled }),
        any::<bool>().prop_map(|held| Body::BatchNackAnswer { held }),
        "[a-z.]{0,64}".prop_map(Body::GroupDelete),
        Just(Body::GroupDeleteAnswer),
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    (any::<u32>(), prop_oneof![session_body(), message_body(), batch_body()])
        .prop_map(|(correlation, body)| Frame::new(correlation, body))
}

/// Changes, inserts, removes or truncates bytes of a frame.
fn mutate(bytes: &mut Vec<u8>, (kind, at, byte): (u8, prop::sample::Index, u8)) {
    if bytes.is_empty() {
        return;
    }
    let at = at.index(bytes.len());
    match kind % 5 {
        0 => bytes[at] = byte,
        1 => bytes[at] ^= 1 << (byte % 8),
        2 => bytes.insert(at, byte),
        3 => drop(bytes.remove(at)),
        _ => bytes.truncate(at),
    }
}

/// Decodes all frames in `bytes`. Checks that each decoded frame survives encoding and decoding.
fn exhaust(mut bytes: BytesMut) {
    loop {
        let before = bytes.len();
        match Codec::default().decode(&mut bytes) {
            Ok(Some(decoded)) => {
                assert!(bytes.len() + 12 <= before, "a frame takes at least its head");
                if let Decoded::Frame(frame) = decoded {
                    assert_eq!(decode(&mut bytes_of(&frame)), Some(Decoded::Frame(frame)));
                }
            }
            Ok(None) | Err(DecodeError { .. }) => return,
        }
    }
}

proptest! {
    #[test]
    fn frames_survive_their_bytes_however_they_arrive(frames in vec(frame(), 1..6), chunk in 1..100_usize) {
        let mut sent = BytesMut::new();
        for frame in &frames {
            Codec::default().encode_frame(frame, &mut sent);
        }
        let (mut received, mut decoded) = (BytesMut::new(), Vec::new());
        for chunk in sent.chunks(chunk) {
            received.put_slice(chunk);
            while let Some(frame) = decode(&mut received) {
                decoded.push(frame);
            }
        }
        prop_assert!(received.is_empty());
        prop_assert_eq!(decoded, frames.into_iter().map(Decoded::Frame).collect::<Vec<_>>());
    }

    #[test]
    fn a_frame_is_decoded_with_its_last_byte_and_not_before(frame in frame()) {
        let bytes = bytes_of(&frame);
        for end in 0..bytes.len() {
            prop_assert_eq!(decode(&mut BytesMut::from(&bytes[..end])), None);
        }
    }

    #[test]
    fn arbitrary_bytes_are_judged(bytes in vec(any::<u8>(), 0..200)) {
        exhaust(BytesMut::from(&bytes[..]));
        exhaust(with_length(&bytes));
    }

    #[test]
    fn arbitrary_bodies_of_every_type_are_judged(
        frame_type in prop::sample::select(&FrameType::ALL[..]), flags in 0..8_u8, body in vec(0..3_u8, 0..120),
    ) {
        exhaust(with_length(&[head(frame_type as u8, flags, 0), body].concat()));
    }

    #[test]
    fn mutated_frames_are_judged(
        frame in frame(), mutations in vec(any::<(u8, prop::sample::Index, u8)>(), 1..4), whole in any::<bool>(),
    ) {
        let bytes = bytes_of(&frame);
        let mut mutated = bytes[if whole { 0 } else { 4 }..].to_vec();
        for mutation in mutations {
            mutate(&mut mutated, mutation);
        }
        exhaust(if whole { BytesMut::from(&mutated[..]) } else { with_length(&mutated) });
    }
}

#[test]
fn a_length_is_judged_before_the_frame_arrives() {
    let (correlation, reason, text) = broken(&[0, 0, 0, 7]);
    assert_eq!((correlation, reason), (0, Reason::MalformedFrame));
    assert!(text.contains("is 7") && text.contains("least 8"), "{text}");

    let (correlation, reason, text) = broken(&[0, 0x10, 0, 1]);
    assert_eq!((correlation, reason), (0, Reason::FrameTooLarge));
    assert!(text.contains("1048577") && text.contains("1048576"), "{text}");
    let (correlation, ..) = broken(&[0, 0x10, 0, 1, 0x10, 0, 0, 0, 0, 0, 0, 9]);
    assert_eq!(correlation, 9, "the answer names its request");

    assert!(matches!(Codec::new(8).decode(&mut with_length(&head(0xa4, 0, 0))), Ok(Some(Decoded::Frame(_)))));
    assert!(Codec::new(7).decode(&mut with_length(&head(0xa4, 0, 0))).is_err());
}

#[test]
fn an_announced_length_costs_no_memory() {
    let mut received = BytesMut::from(&[0, 0x10, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 9][..]);
    assert_eq!(decode(&mut received), None);
    assert!(received.capacity() < 100, "{} bytes", received.capacity());
}

#[test]
fn other_protocols_are_told_what_this_port_speaks() {
    for request in ["GET / HTTP/1.1", "POST /", "HEAD /", "PUT /", "PRI * HTTP/2.0"] {
        let (correlation, reason, text) = broken(request.as_bytes());
        assert_eq!((correlation, reason), (0, Reason::FrameTooLarge));
        assert!(text.contains("HTTP") && text.contains("admin port"), "{text}");
    }
    let (_, _, text) = broken(&[0x16, 0x03, 0x01, 0x02, 0x00]);
    assert!(text.contains("TLS"), "{text}");
}

#[test]
fn the_largest_requests_fit_the_default_limit() {
    let messages: Vec<Message> = (0..MAX_MESSAGES as u64).map(|i| Message::new(i, !i)).collect();
    let largest = Frame::new(7, Body::AddNewMsg { messages, ack_timeout_ticks: 0, attempt: 1 });
    assert_eq!(decode(&mut bytes_of(&largest)), Some(Decoded::Frame(largest)));
}

#[test]
fn a_refusal_names_the_frame_and_the_field_and_the_remedy() {
    let with = |number, flags, status, body: &[u8]| [&head(number, flags, status)[..], body].concat();
    let id: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 9];
    let add: &[u8] = &[0, 0, 1, 0];
    let cases: &[(Vec<u8>, Reason, &[&str])] = &[
        (with(0x7f, 0, 0, &[]), Reason::UnknownType, &["0x7f", "docs/PROTOCOL.md"]),
        (with(0x02, 0x10, 0, &[]), Reason::MalformedRequest, &["ping", "flags 0x10", "0"]),
        (with(0x02, 0, 5, &[]), Reason::MalformedRequest, &["ping", "status 5", "must have 0"]),
        (with(0xff, 0, 0, b"why"), Reason::MalformedRequest, &["error", "status 0", "code"]),
        (with(0xff, 0, 1, &[0xff]), Reason::MalformedRequest, &["error", "text", "UTF-8"]),
        (with(0x02, 0, 0, &[0; 65]), Reason::MalformedRequest, &["ping", "65", "at most 64"]),
        (with(0x10, 0, 0, add), Reason::MalformedRequest, &["add_new_msg", "count", "4 bytes", "0 are left"]),
        (with(0x10, 0, 0, &[add, &[0; 4]].concat()), Reason::BadCount, &["add_new_msg", "1 to 32768"]),
        (with(0x10, 0, 0, &[add, &[0, 0, 0x80, 1]].concat()), Reason::BadCount, &["32769", "1 to 32768"]),
        (with(0x10, 1, 0, &[add, &[0, 0, 0, 1], id].concat()), Reason::MalformedRequest, &["16 bytes", "8 do"]),
        (with(0x11, 0, 0, &[&[0, 0, 0, 1], id, &[0]].concat()), Reason::MalformedRequest, &["8 bytes", "9 do"]),
        (with(0x10, 0, 0, &[0, 0, 1, 4]), Reason::MalformedRequest, &["reserved", "04", "must have 0"]),
        (with(0x20, 0, 0, &[0, 0, 0, 1, 1, 0xc3]), Reason::MalformedRequest, &["subscribe", "group", "UTF-8"]),
        (with(0x24, 0, 0, &[1, b'a', b'b']), Reason::MalformedRequest, &["group_delete", "1 bytes after"]),
        (with(0x22, 0, 0, &[0, 0, 0x10, 1]), Reason::BadCount, &["batch_ack", "4097", "1 to 4096"]),
        (with(0x91, 0, 0, &[0, 0, 0, 1, 4]), Reason::MalformedRequest, &["outcome of 4", "0 to 3"]),
        (with(0x01, 0, 0, b"HTTP"), Reason::BadHello, &["hello", "ACKW"]),
        (with(0x01, 0, 0, b"ACKW\x02\x01"), Reason::BadHello, &["lowest", "highest"]),
        (with(0x01, 0, 0, b"ACKW\x01\x01\x04\x01"), Reason::BadHello, &["1025", "1024"]),
        (
            with(0x01, 0, 0, b"ACKW\x01\x01\0\0\x05abc"),
            Reason::BadHello,
            &["client name", "5 bytes", "3 are left"],
        ),
        (with(0x01, 4, 0, b"ACKW\x01\x01\0\0\0"), Reason::BadHello, &["flags 0x04"]),
    ];
    for (counted, expected, words) in cases {
        let (reason, text) = refused(counted);
        assert_eq!(reason, *expected, "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{text:?} should say {words:?}");
    }
}

#[test]
fn a_re_arm_bitmap_agrees_with_its_count() {
    let answer = |count: u8, rearmed: u8, bits: &[u8]| {
        [&head(0x90, 0, 0)[..], &[0; 8], &[0, 0, 0, count, 0, 0, 0, rearmed], bits].concat()
    };
    let frame = decode(&mut with_length(&answer(9, 2, &[0b0000_0001, 0b0000_0001])));
    let Some(Decoded::Frame(Frame { body: Body::AddNewMsgAnswer(decoded), .. })) = frame else {
        panic!("{frame:?}")
    };
    let rearmed = |i: usize| decoded.outcomes[i] == AddOutcome::Rearmed;
    assert_eq!((0..9).filter(|i| rearmed(*i)).collect::<Vec<_>>(), [0, 8], "least significant bit first");
    for (count, claimed, bits) in [(9, 1, &[1, 1][..]), (9, 2, &[1, 2]), (1, 0, &[0, 0])] {
        assert_eq!(refused(&answer(count, claimed, bits)).0, Reason::MalformedRequest);
    }
}

#[test]
fn later_versions_may_extend_hello_and_go_away() {
    let hello = [&head(0x01, 0, 0)[..], b"ACKW\x01\x09\0\x02pw\x04node", b"what version 9 adds"].concat();
    let expected = Hello {
        lowest_version: 1,
        highest_version: 9,
        token: Secret(b"pw".to_vec()),
        client_name: "node".to_owned(),
    };
    assert_eq!(decode(&mut with_length(&hello)), Some(Decoded::Frame(Frame::new(7, Body::Hello(expected)))));

    let go_away = [&head(0x03, 0, 0)[..], &[0x12, 0x34, 0, 0, 0, 0, 0, 1]].concat();
    let expected = Body::GoAway { reason: GoAwayReason::Draining, grace_ms: 1 };
    assert_eq!(decode(&mut with_length(&go_away)), Some(Decoded::Frame(Frame::new(7, expected))));
}
