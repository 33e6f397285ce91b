//! Measures the codec: `cargo bench --bench codec`.
//!
//! - `decode`: AddNewMsg and DelMsg frames with 1 and with 512 messages each. `take_requests` decodes them into a
//!   request batch, as a session does; with one message also both kinds at random. `Decoder` decodes one frame at a
//!   time. The throughput counts messages.
//! - `encode`: the answers to such requests, at random AddNewMsg or DelMsg.
//! - `TimeoutBatch`: encodes and decodes one of 4,096 messages.

#[path = "support/messages.rs"]
mod messages;
#[path = "support/wire.rs"]
mod wire;

use std::hint::black_box;
use std::time::Duration;

use ackwheel::core::{BatchId, MAX_BATCH_MESSAGES, RequestBatch, Tick, TickCounts, TimedOut};
use ackwheel::protocol::frame::TimeoutBatch;
use ackwheel::protocol::{Body, Codec, Decoded, Frame};
use bytes::BytesMut;
use criterion::measurement::WallTime;
use criterion::{BatchSize, Bencher, BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};

use crate::messages::random_messages;

/// Name, number of frames and messages per frame: as many as one read of a busy connection brings.
const SHAPES: [(&str, usize, usize); 2] = [("1 message a frame", 256, 1), ("512 messages a frame", 8, 512)];

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    group
}

fn decode(criterion: &mut Criterion) {
    let mut group = group(criterion, "decode");
    for (shape, frames, per_frame) in SHAPES {
        let messages = random_messages(frames * per_frame, 1);
        group.throughput(Throughput::Elements(messages.len() as u64));
        for (verb, bytes) in [
            ("AddNewMsg", wire::add_frames(&messages, per_frame)),
            ("DelMsg", wire::del_frames(&messages, per_frame)),
        ] {
            group.bench_function(format!("{verb}, {shape}, take_requests"), |bencher| take_all(bencher, &bytes));
            group.bench_function(format!("{verb}, {shape}, Decoder"), |bencher| {
                decode_all(bencher, &bytes, frames);
            });
        }
    }
    let messages = random_messages(wire::MIXED, 1);
    let bytes = wire::mixed_frames(&messages);
    group.throughput(Throughput::Elements(messages.len() as u64));
    group.bench_function("AddNewMsg and DelMsg mixed, 1 message a frame, take_requests", |bencher| {
        take_all(bencher, &bytes);
    });
    group.finish();
}

/// Reads all frames into a request batch.
fn take_all(bencher: &mut Bencher<'_>, bytes: &BytesMut) {
    let mut batch = RequestBatch::default();
    bencher.iter(|| {
        batch.clear(usize::MAX);
        let taken = Codec::default().take_requests(black_box(bytes), &mut batch, usize::MAX, 15);
        assert_eq!(taken, bytes.len(), "every frame is a request without a fault");
    });
}

/// Decodes `frames` frames one by one.
fn decode_all(bencher: &mut Bencher<'_>, bytes: &BytesMut, frames: usize) {
    let decode_all = |received: &mut BytesMut| {
        for _ in 0..frames {
            let decoded = Codec::default().decode(received).expect("no frame is broken");
            assert!(matches!(black_box(decoded), Some(Decoded::Frame(_))), "a frame was refused");
        }
    };
    bencher.iter_batched_ref(|| bytes.clone(), decode_all, BatchSize::SmallInput);
}

fn encode(criterion: &mut Criterion) {
    let mut group = group(criterion, "encode");
    for (shape, frames, per_frame) in SHAPES {
        let batch = wire::answered(frames, per_frame);
        group.throughput(Throughput::Elements(batch.messages().len() as u64));
        group.bench_function(format!("answers, {shape}"), |bencher| {
            let mut out = BytesMut::new();
            bencher.iter(|| {
                out.clear();
                wire::encode_answers(black_box(&batch), &mut out);
            });
        });
    }
    group.finish();
}

fn timeout_batch(criterion: &mut Criterion) {
    let mut group = group(criterion, "TimeoutBatch");
    group.throughput(Throughput::Elements(MAX_BATCH_MESSAGES as u64));
    let messages = random_messages(MAX_BATCH_MESSAGES, 1);
    let added = MAX_BATCH_MESSAGES as u64;
    let batch = Frame::new(
        1,
        Body::TimeoutBatch(TimeoutBatch {
            id: BatchId { tick: Tick(1), epoch: 1, ring: 0, seq: 0 },
            delivery_count: 1,
            age_ms: 0,
            counts: TickCounts { added, acked: 0, storm: true, drained: false },
            last: true,
            messages: messages.into_iter().map(|message| TimedOut { message, attempt: 1 }).collect(),
        }),
    );
    let mut bytes = BytesMut::new();
    Codec::default().encode_frame(&batch, &mut bytes);
    group.bench_function("encode", |bencher| {
        let mut out = BytesMut::new();
        bencher.iter(|| {
            out.clear();
            Codec::default().encode_frame(black_box(&batch), &mut out);
        });
    });
    group.bench_function("decode", |bencher| decode_all(bencher, &bytes, 1));
    group.finish();
}

criterion_group! {
    name = benches;
    // Plots and many resamples take long and show little.
    config = Criterion::default().without_plots().nresamples(10_000);
    targets = decode, encode, timeout_batch
}
criterion_main!(benches);
