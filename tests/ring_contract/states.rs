//! The state of messages, as GetMsg returns it.

use ackwheel::core::{DelOutcome, Message, MessageState};

use super::mounts::Mount;
use super::{SLOTS, Subject, TICK};

use DelOutcome::{Acked, Late};
use MessageState::{Late as WasLate, Unknown as Gone};

pub async fn the_state_of_a_message_is_read_and_not_changed<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.advance().await;
    let asked = [Message::new(1, 7), Message::from(1), Message::from(2), Message::from(3)];
    let deadline = subject.add_with(&asked[..1], SLOTS, 1).await.deadline;
    let sooner = subject.add_with(&asked[2..3], 1, 9).await.deadline;
    let get = async |subject: &Subject<M>| subject.ring.get(&asked, subject.mount.now()).await.unwrap();
    let in_flight = |deadline, remaining_ms, attempt| MessageState::InFlight { deadline, remaining_ms, attempt };
    // A deadline ends with its tick.
    let expected = [in_flight(deadline, 6_000, 1), Gone, in_flight(sooner, 2_000, 9), Gone];
    assert_eq!(get(&subject).await, expected);
    assert_eq!(get(&subject).await, expected, "it changed nothing");
    subject.mount.pass(TICK / 4);
    assert_eq!(get(&subject).await[0], in_flight(deadline, 5_750, 1));
    subject.mount.pass(TICK * 3 / 4);
    subject.advance().await;
    subject.turn(1).await;
    assert_eq!(get(&subject).await, [in_flight(deadline, 4_000, 1), Gone, WasLate, Gone]);
    // While the pointer is late, a message can be acknowledged although its time has passed.
    subject.turn(3).await;
    subject.mount.pass(TICK + TICK / 4);
    assert_eq!(get(&subject).await[0], in_flight(deadline, 0, 1));
    assert_eq!(subject.del_with(&asked[..1], false).await, [Acked]);
    assert_eq!(subject.del(&[2]).await, [Late]);
    assert_eq!(get(&subject).await, [Gone, Gone, WasLate, Gone]);
    subject.advance().await;
    subject.turn(2).await;
    assert_eq!(get(&subject).await, [Gone; 4], "a revolution after its timeout");
}
