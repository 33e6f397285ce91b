//! Encodes replies. The shape of an AW.* reply is the same in RESP2 and RESP3: arrays, bulk strings, integers and errors.

use bytes::{BufMut, BytesMut};

use crate::core::{Delivery, Message, MessageState, Promise, Refusal};
use crate::protocol::resp::command::{Arguments, quoted};

/// The version of the Redis protocol that a connection speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Version {
    #[default]
    Resp2 = 2,
    Resp3 = 3,
}

pub(super) fn array(out: &mut BytesMut, elements: usize) {
    header(out, b'*', elements as u64);
}

/// Begins a map of `pairs` keys and values. In RESP2, it is a flat array.
pub(super) fn map(out: &mut BytesMut, version: Version, pairs: usize) {
    match version {
        Version::Resp2 => array(out, pairs * 2),
        Version::Resp3 => header(out, b'%', pairs as u64),
    }
}

/// Begins a set. In RESP2, it is an array.
pub(super) fn set(out: &mut BytesMut, version: Version, elements: usize) {
    header(out, if version == Version::Resp3 { b'~' } else { b'*' }, elements as u64);
}

pub(super) fn integer(out: &mut BytesMut, number: u64) {
    header(out, b':', number);
}

pub(super) fn bulk(out: &mut BytesMut, text: &[u8]) {
    header(out, b'$', text.len() as u64);
    out.put_slice(text);
    out.put_slice(b"\r\n");
}

/// Writes a text for people. In RESP2, it is a bulk string.
pub(super) fn verbatim(out: &mut BytesMut, version: Version, text: &str) {
    let (first, format) = if version == Version::Resp3 { (b'=', "txt:") } else { (b'$', "") };
    header(out, first, (format.len() + text.len()) as u64);
    out.put_slice(format!("{format}{text}\r\n").as_bytes());
}

pub(super) fn simple(out: &mut BytesMut, text: &str) {
    out.put_u8(b'+');
    out.put_slice(text.as_bytes());
    out.put_slice(b"\r\n");
}

pub(super) fn null(out: &mut BytesMut, version: Version) {
    out.put_slice(match version {
        Version::Resp2 => b"$-1\r\n",
        Version::Resp3 => b"_\r\n",
    });
}

/// Writes an error. `text` begins with the code. Control characters, which could end the line, become spaces.
pub(super) fn error(out: &mut BytesMut, text: &str) {
    out.put_u8(b'-');
    out.extend(text.bytes().map(|byte| if byte.is_ascii_control() { b' ' } else { byte }));
    out.put_slice(b"\r\n");
}

/// Writes keys and values, as a part of a map.
pub(super) fn pairs(out: &mut BytesMut, pairs: &[(&str, &str)]) {
    pairs.iter().flat_map(|(key, value)| [key, value]).for_each(|text| bulk(out, text.as_bytes()));
}

/// Writes the error for a subcommand that is unknown or has other arguments.
pub(super) fn unknown_subcommand(out: &mut BytesMut, arguments: Arguments<'_>) {
    let shown = quoted(arguments.get(1).unwrap_or_default());
    error(out, &format!("ERR unknown subcommand or wrong number of arguments for {shown}"));
}

/// Writes a refusal: its code, its promise and its sentence.
pub(super) fn refusal(out: &mut BytesMut, refusal: &Refusal) {
    refusal_with(out, refusal, refusal.reason.promise());
}

/// Writes a refusal with another promise than that of its reason.
pub(super) fn refusal_with(out: &mut BytesMut, refusal: &Refusal, promise: Promise) {
    let code = refusal.reason.as_str().to_ascii_uppercase();
    let promise = match promise {
        Promise::NotApplied => "not applied",
        Promise::OutcomeUnknown => "outcome unknown",
    };
    error(out, &format!("{code} {promise}: {}", refusal.text));
}

/// Writes a message as `id` or `id:client`.
pub(super) fn message(out: &mut BytesMut, message: Message) {
    let (mut id, mut client) = (itoa::Buffer::new(), itoa::Buffer::new());
    let id = id.format(message.msg_id.0);
    match message.client.0 {
        0 => bulk(out, id.as_bytes()),
        number => {
            let client = client.format(number);
            header(out, b'$', (id.len() + 1 + client.len()) as u64);
            out.put_slice(id.as_bytes());
            out.put_u8(b':');
            out.put_slice(client.as_bytes());
            out.put_slice(b"\r\n");
        }
    }
}

/// Writes the state of a message: its name, deadline, remaining time and attempt, which are 0 unless it is in flight.
pub(super) fn state(out: &mut BytesMut, state: MessageState) {
    let (deadline, remaining_ms, attempt) = match state {
        MessageState::InFlight { deadline, remaining_ms, attempt } => (deadline.0, remaining_ms, attempt),
        MessageState::Late | MessageState::Unknown => (0, 0, 0),
    };
    array(out, 4);
    bulk(out, state.as_str().as_bytes());
    integer(out, deadline);
    integer(out, remaining_ms.into());
    integer(out, attempt.into());
}

/// Writes a batch: its id, delivery count, messages, attempts, age, the counts of its tick, and its flags.
pub(super) fn delivery(out: &mut BytesMut, delivery: &Delivery) {
    let batch = &*delivery.batch;
    array(out, 8);
    bulk(out, batch.id.to_string().as_bytes());
    integer(out, delivery.delivery_count.into());
    array(out, batch.messages.len());
    batch.messages.iter().for_each(|timed_out| message(out, timed_out.message));
    array(out, batch.messages.len());
    batch.messages.iter().for_each(|timed_out| integer(out, timed_out.attempt.into()));
    integer(out, u64::try_from(delivery.age.as_millis()).unwrap_or(u64::MAX));
    integer(out, batch.counts.added);
    integer(out, batch.counts.acked);
    let flags = [(batch.last, "last"), (batch.counts.storm, "storm"), (batch.counts.drained, "drained")];
    let flags: Vec<&str> = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).collect();
    bulk(out, flags.join(" ").as_bytes());
}

fn header(out: &mut BytesMut, first: u8, number: u64) {
    out.put_u8(first);
    out.put_slice(itoa::Buffer::new().format(number).as_bytes());
    out.put_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Reason;

    fn written(write: impl FnOnce(&mut BytesMut)) -> String {
        let mut out = BytesMut::new();
        write(&mut out);
        String::from_utf8(out.to_vec()).unwrap()
    }

    #[test]
    fn a_refusal_is_one_line_with_its_code_and_promise() {
        let lines = Refusal::new(Reason::StoreTimeout, "Redis said\r\n+OK");
        assert_eq!(written(|out| refusal(out, &lines)), "-STORE_SILENT outcome unknown: Redis said  +OK\r\n");
        let full = Refusal::new(Reason::MaxInFlight, "too many");
        assert_eq!(written(|out| refusal(out, &full)), "-MAX_IN_FLIGHT not applied: too many\r\n");
    }

    #[test]
    fn a_client_of_0_is_not_written() {
        assert_eq!(written(|out| message(out, Message::new(101, 0))), "$3\r\n101\r\n");
        assert_eq!(
            written(|out| message(out, Message::new(u64::MAX, u64::MAX))),
            format!("$41\r\n{0}:{0}\r\n", u64::MAX)
        );
    }

    #[test]
    fn only_maps_sets_texts_and_nulls_differ_between_the_versions() {
        assert_eq!(written(|out| map(out, Version::Resp2, 3)), "*6\r\n");
        assert_eq!(written(|out| map(out, Version::Resp3, 3)), "%3\r\n");
        assert_eq!(written(|out| set(out, Version::Resp2, 3)), "*3\r\n");
        assert_eq!(written(|out| set(out, Version::Resp3, 3)), "~3\r\n");
        assert_eq!(written(|out| verbatim(out, Version::Resp2, "ä")), "$2\r\nä\r\n");
        assert_eq!(written(|out| verbatim(out, Version::Resp3, "ä")), "=6\r\ntxt:ä\r\n");
        assert_eq!(written(|out| null(out, Version::Resp2)), "$-1\r\n");
        assert_eq!(written(|out| null(out, Version::Resp3)), "_\r\n");
    }
}
