//! Tests the queue: the requests of connections, the chunks for scripts, and the answers.

use super::*;
use crate::clock::Clock;
use crate::core::{Completions, Message, Outcome, Promise, RequestBatch, Tick};
use std::task::Context;

const MAX: u64 = 1_000_000;

const ADD: Operation = Operation::Add { ack_timeout_ticks: 3, attempt: 1 };
const DEL: Operation = Operation::Del { withdraw: false };

/// A queue, and the answers that one connection gets from it.
#[derive(Default)]
struct Bench {
    queue: Queue,
    progress: Arc<Progress>,
    completions: Arc<Completions>,
    asked: u64,
}

/// An answer that the connection received.
#[derive(Debug)]
struct Answer {
    id: u64,
    deadline: Tick,
    outcomes: Vec<Outcome>,
    refusal: Option<Refusal>,
    measured: u64,
    latency_ms: u64,
}

impl Bench {
    fn new() -> Bench {
        let progress = Arc::<Progress>::default();
        Bench { queue: Queue::new(Arc::clone(&progress), MAX, 1_000), progress, ..Bench::default() }
    }

    /// Pushes a request. Returns its id, which its answer repeats.
    fn ask(&mut self, operation: Operation, ids: impl Iterator<Item = u64>) -> u64 {
        self.ask_as(ConnectionId::default(), operation, ids)
    }

    fn ask_as(&mut self, connection: ConnectionId, operation: Operation, ids: impl Iterator<Item = u64>) -> u64 {
        let messages: Vec<Message> = ids.map(Message::from).collect();
        self.asked += 1;
        if matches!(operation, Operation::Del { .. }) {
            self.progress.unanswered_acks.fetch_add(messages.len() as u64, Ordering::Relaxed);
        }
        let frame = Frame::new(operation, connection, self.asked, &messages, &self.completions);
        self.queue.push(Item::Frame(frame));
        self.asked
    }

    fn add(&mut self, count: u64) -> u64 {
        self.ask(ADD, 0..count)
    }

    fn del(&mut self, count: u64) -> u64 {
        self.ask(DEL, 0..count)
    }

    fn chunk(&mut self, number: u64) -> Chunk {
        self.queue.next_chunk(number, MAX_CHUNK).unwrap()
    }

    fn applied(&mut self, chunk: Chunk, letters: &str, times: &str) {
        let (letters, times) = (letters.to_owned(), times.to_owned());
        let applied = Applied { tick_due: Tick(7), letters, times, in_flight: Some(9) };
        self.queue.apply(chunk, &applied, Clock::start().now());
    }

    /// Returns the answers since the last call.
    fn answers(&mut self) -> Vec<Answer> {
        let mut batch = RequestBatch::default();
        let mut context = Context::from_waker(Waker::noop());
        if self.completions.poll(&mut context, &mut batch).is_pending() {
            return Vec::new();
        }
        let (measured, latency_ms) = (batch.ack_latency.counts.iter().sum(), batch.ack_latency.sum_micros / 1000);
        let answer = |request: &crate::core::Request| Answer {
            id: request.id,
            deadline: request.deadline,
            outcomes: batch.outcomes()[request.range()].to_vec(),
            refusal: request.refusal.as_deref().cloned(),
            measured,
            latency_ms,
        };
        batch.requests.iter().map(answer).collect()
    }

    /// Returns the only answer since the last call.
    fn answer(&mut self) -> Answer {
        let mut answers = self.answers();
        assert_eq!(answers.len(), 1, "{answers:?}");
        answers.remove(0)
    }

    /// Returns the arguments of the script, beginning with `ARGV[5]`.
    fn words(&mut self, chunk: &Chunk) -> Vec<Vec<u8>> {
        let mut call = redis::cmd("x");
        self.queue.write(chunk, &mut call);
        let bytes = |argument| match argument {
            redis::Arg::Simple(bytes) => Vec::from(bytes),
            _ => unreachable!("the script has no cursor"),
        };
        call.args_iter().skip(4).map(bytes).collect()
    }
}

fn text(words: &[Vec<u8>]) -> Vec<String> {
    words.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

#[test]
fn frames_travel_together_in_order_and_each_gets_its_answer() {
    let mut bench = Bench::new();
    let (added, deleted) = (bench.ask(ADD, 5..7), bench.ask(DEL, [9, 10, 11].into_iter()));
    let chunk = bench.chunk(1);
    let words = bench.words(&chunk);
    assert_eq!(words[2], [129, 1, 130, 2, 2], "the class of each message, plus 128 at the beginning of a frame");
    let plain = text(&[&words[..2], &words[3..]].concat());
    assert_eq!(plain, ["2", "a 3 1 d 0 0 ", "", "", "", "0", "5", "6", "9", "10", "11"]);
    bench.applied(chunk, "arklu", "1000,988,960");
    let answers = bench.answers();
    assert_eq!((answers[0].id, answers[0].deadline), (added, Tick(10)));
    assert_eq!(answers[0].outcomes, [Outcome::Added, Outcome::Rearmed]);
    assert_eq!((answers[1].id, answers[1].measured, answers[1].latency_ms), (deleted, 2, 12 + 40));
    assert_eq!(answers[1].outcomes, [Outcome::Acked, Outcome::Late, Outcome::Unknown]);
    assert!(bench.queue.next_chunk(2, MAX_CHUNK).is_none());
    assert_eq!(bench.progress.unanswered_acks.load(Ordering::Relaxed), 0);
}

#[test]
fn each_connection_has_its_own_answers_in_the_order_in_which_it_asked() {
    let mut bench = Bench::new();
    let all = [Arc::default(), Arc::default()];
    // In a chunk, the requests of connection 0 come before those of connection 1.
    for (of, id) in [(0, 1), (1, 3), (1, 4), (0, 2), (1, 5)] {
        bench.completions = Arc::clone(&all[of]);
        bench.ask_as(ConnectionId(of as u64), DEL, id..=id);
    }
    let chunk = bench.chunk(1);
    bench.applied(chunk, "kluku", "1000,990,980,970");
    let told = all.map(|answers| {
        bench.completions = answers;
        bench.answers().into_iter().flat_map(|answer| answer.outcomes).collect::<Vec<_>>()
    });
    assert_eq!(told[0], [Outcome::Acked, Outcome::Late]);
    assert_eq!(told[1], [Outcome::Unknown, Outcome::Acked, Outcome::Unknown]);
}

#[test]
fn refused_requests_of_a_chunk_are_answered_in_order() {
    let mut bench = Bench::new();
    let asked = [bench.del(1), bench.ask(ADD, 5..7), bench.ask(DEL, 8..10)];
    let chunk = bench.chunk(1);
    bench.applied(chunk, "kxxuk", "1000,990,970");
    let answers = bench.answers();
    assert_eq!(answers.iter().map(|answer| answer.id).collect::<Vec<_>>(), asked);
    assert_eq!(answers[1].refusal.as_ref().unwrap().reason, Reason::MaxInFlight);
    assert_eq!(answers[2].outcomes, [Outcome::Unknown, Outcome::Acked]);
    assert_eq!((answers[0].measured, answers[0].latency_ms), (2, 10 + 30));
}

#[test]
fn an_acknowledgement_before_its_message_was_added_took_no_time() {
    let mut bench = Bench::new();
    bench.del(2);
    let chunk = bench.chunk(1);
    bench.applied(chunk, "kk", "1000,1040,970");
    let answer = bench.answer();
    assert_eq!((answer.measured, answer.latency_ms), (2, 30), "Redis' clock was set back");
}

#[test]
fn a_message_that_occurs_twice_is_named_once_with_positions() {
    let mut bench = Bench::new();
    bench.ask(ADD, [7, 8, 7].into_iter());
    bench.ask(Operation::Del { withdraw: true }, [8].into_iter());
    let chunk = bench.chunk(1);
    let words = bench.words(&chunk);
    assert_eq!((&words[2][..], &words[3][..]), (&[129, 1, 1, 130][..], &[0, 1, 0, 2, 0, 1, 0, 2][..]));
    assert_eq!(text(&words[7..]), ["7", "8"]);
    // The positions in the next chunk do not refer to the names of this chunk.
    bench.ask(DEL, [8, 9].into_iter());
    let chunk = bench.chunk(2);
    let words = bench.words(&chunk);
    assert_eq!((&words[2][..], words[3].is_empty()), (&[129, 1][..], true));
    assert_eq!(text(&words[7..]), ["8", "9"]);
}

#[test]
fn a_long_frame_is_cut_and_answered_when_all_of_it_is() {
    let mut bench = Bench::new();
    let added = bench.add(2_500);
    let name = String::from("0");
    let cuts = [
        (1, MAX_CHUNK, ["2500", "", &name, "2500"]),
        (2, MAX_CHUNK, ["1000", &name, "", "0"]),
        (3, 500, ["500", &name, "", "0"]),
    ];
    for (number, count, [to_add, goes_on, cut, whole]) in cuts {
        assert!(bench.answers().is_empty());
        let chunk = bench.chunk(number);
        let words = text(&bench.words(&chunk));
        assert_eq!((&*words[0], &*words[4], &*words[5], &*words[6]), (to_add, goes_on, cut, whole));
        bench.applied(chunk, &"a".repeat(count), "6");
    }
    let answer = bench.answer();
    assert_eq!((answer.id, answer.outcomes), (added, vec![Outcome::Added; 2_500]));
}

#[test]
fn a_frame_that_is_too_many_is_refused_once_and_the_rest_of_it_not_sent() {
    let mut bench = Bench::new();
    bench.add(1_500);
    let deleted = bench.del(1);
    let chunk = bench.chunk(1);
    bench.applied(chunk, &"x".repeat(MAX_CHUNK), "6");
    assert_eq!(bench.answer().refusal.unwrap().reason, Reason::MaxInFlight);
    let chunk = bench.chunk(2);
    bench.applied(chunk, "k", "6,5");
    let answer = bench.answer();
    assert_eq!((answer.id, answer.outcomes), (deleted, vec![Outcome::Acked]));
}

#[test]
fn a_chunk_is_one_with_adds_also_when_the_add_has_ended_and_its_dels_come_again() {
    let mut bench = Bench::new();
    bench.add(1_500);
    let deleted = bench.del(2);
    let (head, tail) = (bench.chunk(1), bench.chunk(2));
    bench.applied(head, &"x".repeat(MAX_CHUNK), "6");
    assert_eq!(bench.answer().refusal.unwrap().reason, Reason::MaxInFlight);
    // Redis is out of memory and refuses the whole second chunk, because it was sent as a chunk with an add.
    assert!(tail.has_adds);
    bench.queue.send_again(vec![tail], Some(&Refusal::new(Reason::StoreUnreachable, "no memory")));
    assert!(bench.answers().is_empty());
    let dels = bench.chunk(2);
    assert!(!dels.has_adds);
    bench.applied(dels, "kk", "6,5,5");
    assert_eq!(bench.answer().id, deleted);
}

#[test]
fn requests_of_many_classes_are_sent_in_more_chunks() {
    let mut bench = Bench::new();
    for attempt in 1..=250 {
        bench.ask(Operation::Add { ack_timeout_ticks: 1, attempt }, [u64::from(attempt)].into_iter());
    }
    let mut carried = Vec::new();
    for number in 1.. {
        let Some(chunk) = bench.queue.next_chunk(number, MAX_CHUNK) else { break };
        let words = bench.words(&chunk);
        assert!(words[2].iter().all(|kind| (129..=228).contains(kind)), "{:?}", words[2]);
        carried.extend(text(&words[7..]));
        let letters = "a".repeat(words[2].len());
        bench.applied(chunk, &letters, "6");
    }
    assert_eq!(carried, (1..=250).map(|id| id.to_string()).collect::<Vec<_>>());
    assert_eq!((bench.answers().len(), bench.queue.waiting), (250, 0));
}

#[test]
fn when_redis_is_unreachable_adds_are_refused_by_their_outcome_and_dels_are_held() {
    let mut bench = Bench::new();
    let sent = bench.add(600);
    let acked = bench.del(400);
    let chunk = bench.chunk(1);
    let unsent = bench.add(1);
    bench.queue.end_session(9, std::iter::once(chunk));
    let answers = bench.answers();
    let ids: Vec<u64> = answers.iter().map(|answer| answer.id).collect();
    assert_eq!(ids, [sent, unsent]);
    assert_eq!(answers[0].refusal.as_ref().unwrap().reason.promise(), Promise::OutcomeUnknown);
    assert_eq!(answers[1].refusal.as_ref().unwrap().reason, Reason::StoreUnreachable);
    assert_eq!(bench.progress.unanswered_acks.load(Ordering::Relaxed), 400);

    // Redis had applied the chunk and stored its answer. The next session reads this answer.
    let answer = format!("9|1|7|{}{}|{}", "a".repeat(600), "k".repeat(400), vec!["5"; 401].join(","));
    bench.queue.begin_session(&[String::new(), answer], Clock::start().now());
    let answer = bench.answer();
    assert_eq!((answer.id, answer.outcomes, answer.measured), (acked, vec![Outcome::Acked; 400], 400));
    assert!(bench.queue.next_chunk(2, MAX_CHUNK).is_none());
    assert_eq!(bench.progress.unanswered_acks.load(Ordering::Relaxed), 0);
}

#[test]
fn chunks_that_were_not_applied_are_sent_again_before_later_requests() {
    let mut bench = Bench::new();
    let first = bench.del(2);
    let chunk = bench.chunk(5);
    let second = bench.del(1);
    bench.queue.end_session(9, std::iter::once(chunk));
    bench.queue.begin_session(&["9|4|7|u|6".into(), String::new()], Clock::start().now());
    assert_eq!(bench.queue.waiting, 3);
    let chunk = bench.chunk(5);
    bench.applied(chunk, "kku", "6,5,5");
    let answers = bench.answers();
    assert_eq!((answers[0].id, &answers[0].outcomes[..]), (first, &[Outcome::Acked; 2][..]));
    assert_eq!((answers[1].id, &answers[1].outcomes[..]), (second, &[Outcome::Unknown][..]));
}

#[test]
fn a_barrier_is_passed_when_earlier_requests_are_answered() {
    let mut bench = Bench::new();
    bench.del(1);
    let (told, mut passed) = oneshot::channel();
    bench.queue.push(Item::Barrier(told));
    let chunk = bench.chunk(1);
    assert!(passed.try_recv().is_err());
    bench.applied(chunk, "k", "6,5");
    assert_eq!(passed.try_recv(), Ok(()));
}

#[test]
fn requests_are_refused_when_the_queue_is_dropped() {
    let mut bench = Bench::new();
    bench.del(2);
    drop(std::mem::take(&mut bench.queue));
    assert_eq!(bench.answer().refusal.unwrap().reason, Reason::StoreUnreachable);
}

#[test]
fn frames_that_are_cut_again_and_again_hold_up_no_other_connection() {
    for size in [999, 1_000, 2_000, 5_000] {
        let mut bench = Bench::new();
        // The first frame is shorter by one, so that each of the other frames is cut.
        bench.ask_as(ConnectionId(1), DEL, 0..size - 1);
        for _ in 0..20 {
            bench.ask_as(ConnectionId(1), DEL, 0..size);
        }
        bench.chunk(1);
        let single = bench.ask_as(ConnectionId(2), DEL, 0..1);
        // The rests of two cut frames are sent before the single message.
        let most = 2 + 2 * size.div_ceil(1_000);
        for number in 2..=most {
            let chunk = bench.chunk(number);
            let messages = chunk.slices.iter().map(|slice| slice.to - slice.from).sum();
            bench.applied(chunk, &"u".repeat(messages), "0");
        }
        let answered = bench.answers().into_iter().any(|answer| answer.id == single);
        assert!(answered, "frames of {size} messages: the request of connection 2 is in none of {most} chunks");
    }
}
