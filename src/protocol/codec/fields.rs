//! Reads the body of a frame field by field. The error for a wrong field says what the field must be.

use std::fmt;

use super::super::frame::{FrameType, MAX_MESSAGES, VERSIONS};
use super::{RawFrame, flag};
use crate::core::{BatchId, Message, Reason, Refusal, Tick};

/// The number of bytes of a batch id.
pub(super) const BATCH_ID_LENGTH: usize = 24;

/// A reader of the fields of a frame. `rest` holds the bytes that are not read yet.
pub(super) struct Fields<'a> {
    pub(super) frame_type: FrameType,
    pub(super) flags: u8,
    pub(super) rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Creates a reader for a frame. Refuses an unknown type, flags that the type does not define, and a wrong status:
    /// this build does not know their meaning, so it must not ignore them. In an Error, the status must be the error
    /// code. In any other frame, the status must be 0.
    pub(super) fn of(frame: &RawFrame<'a>) -> Result<Fields<'a>, Refusal> {
        let RawFrame { number, flags, status, body, .. } = *frame;
        let Some(frame_type) = FrameType::from_number(number) else {
            let version = VERSIONS.end();
            let text = format!(
                "frames of type {number:#04x} are not known to version {version} of the protocol: send only the types \
                 that docs/PROTOCOL.md lists"
            );
            return Err(Refusal::new(Reason::UnknownType, text));
        };
        let fields = Fields { frame_type, flags, rest: body };
        let undefined = flags & !flag::defined(frame_type);
        if undefined != 0 {
            let text = format_args!("has flags {undefined:#04x}, which its type does not define: leave them 0");
            return Err(fields.wrong(text));
        }
        match (frame_type, status) {
            (FrameType::Error, 0) => {
                Err(fields.wrong(format_args!("has status 0, but must have the error's code")))
            }
            (FrameType::Error, _) | (_, 0) => Ok(fields),
            _ => Err(fields.wrong(format_args!("has status {status}, but must have 0: it is no error"))),
        }
    }

    /// Refuses bytes after the last field.
    pub(super) fn end(&self) -> Result<(), Refusal> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(self.wrong(format_args!("has {extra} bytes after its last field: leave them out"))),
        }
    }

    /// Returns whether a flag is set.
    pub(super) const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Reads the next `LENGTH` bytes.
    pub(super) fn take<const LENGTH: usize>(&mut self, field: &str) -> Result<[u8; LENGTH], Refusal> {
        let Some((bytes, rest)) = self.rest.split_first_chunk() else { return Err(self.short(LENGTH, field)) };
        self.rest = rest;
        Ok(*bytes)
    }

    pub(super) fn u8(&mut self, field: &str) -> Result<u8, Refusal> {
        self.take(field).map(u8::from_be_bytes)
    }

    pub(super) fn u16(&mut self, field: &str) -> Result<u16, Refusal> {
        self.take(field).map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self, field: &str) -> Result<u32, Refusal> {
        self.take(field).map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self, field: &str) -> Result<u64, Refusal> {
        self.take(field).map(u64::from_be_bytes)
    }

    /// Reads bytes that must be 0 because they are reserved for later versions.
    pub(super) fn reserved<const LENGTH: usize>(&mut self) -> Result<(), Refusal> {
        let bytes = self.take::<LENGTH>("reserved")?;
        if bytes == [0; LENGTH] {
            return Ok(());
        }
        Err(self.wrong(format_args!("has {bytes:02x?} in its reserved field, but must have 0")))
    }

    pub(super) fn bytes(&mut self, length: usize, field: &str) -> Result<&'a [u8], Refusal> {
        let Some((bytes, rest)) = self.rest.split_at_checked(length) else {
            return Err(self.short(length, field));
        };
        self.rest = rest;
        Ok(bytes)
    }

    /// Reads all bytes up to the end of the frame.
    pub(super) fn all(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    pub(super) fn text(&self, bytes: &[u8], field: &str) -> Result<String, Refusal> {
        match str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(self.wrong(format_args!("has a field {field} that is not UTF-8: {error}"))),
        }
    }

    /// Reads the length of a text, which is one byte, and then the text.
    pub(super) fn short_text(&mut self, field: &str) -> Result<String, Refusal> {
        let length = usize::from(self.u8(field)?);
        let bytes = self.bytes(length, field)?;
        self.text(bytes, field)
    }

    /// Reads the number of messages or batch ids in the frame, which must be from 1 to `most`.
    pub(super) fn count(&mut self, most: usize) -> Result<usize, Refusal> {
        let count = self.u32("count")?;
        match usize::try_from(count) {
            Ok(count) if (1..=most).contains(&count) => Ok(count),
            _ => {
                let reason = match self.frame_type {
                    FrameType::AddNewMsg | FrameType::DelMsg | FrameType::GetMsg | FrameType::BatchAck => {
                        Reason::BadCount
                    }
                    // The other types that have a count are not requests.
                    _ => Reason::MalformedRequest,
                };
                let text =
                    format!("{} has a count of {count}, but must have 1 to {most}", self.frame_type.as_str());
                Err(Refusal::new(reason, text))
            }
        }
    }

    /// Refuses the frame unless exactly `expected` bytes remain. `count` is the number in the frame from which the
    /// caller computed `expected`; the error text repeats this count. The caller must not reserve memory for the bytes
    /// before this check.
    pub(super) fn must_remain(&self, expected: usize, count: usize) -> Result<(), Refusal> {
        let actual = self.rest.len();
        if actual == expected {
            return Ok(());
        }
        Err(self.wrong(format_args!(
            "has a count of {count} and flags {:#04x}, so exactly {expected} bytes of lists must end the frame, \
             but {actual} do",
            self.flags
        )))
    }

    /// Reads the number of entries of the list that ends the frame, from 1 to `most`. Checks that the rest of the frame
    /// is exactly these entries, each of `length` bytes.
    pub(super) fn count_of_list(&mut self, most: usize, length: usize) -> Result<usize, Refusal> {
        let count = self.count(most)?;
        self.must_remain(count * length, count)?;
        Ok(count)
    }

    /// Reads the end of an AddNewMsg or a DelMsg: the number of messages, their ids and, if `flag::CLIENTS` is set,
    /// their client ids.
    pub(super) fn messages(&mut self) -> Result<Messages<'a>, Refusal> {
        let with_clients = self.has(flag::CLIENTS);
        let count = self.count_of_list(MAX_MESSAGES, if with_clients { 16 } else { 8 })?;
        let (ids, clients) = self.all().split_at(count * 8);
        Ok(Messages { ids, clients: with_clients.then_some(clients) })
    }

    pub(super) fn batch_id(&mut self) -> Result<BatchId, Refusal> {
        let ring = self.u16("ring")?;
        self.reserved::<2>()?;
        let seq = self.u32("seq")?;
        let epoch = self.u64("epoch")?;
        Ok(BatchId { tick: Tick(self.u64("tick")?), epoch, ring, seq })
    }

    /// Returns a refusal whose text is the frame type and then `what`.
    #[cold]
    pub(super) fn wrong(&self, what: fmt::Arguments<'_>) -> Refusal {
        let reason = match self.frame_type {
            FrameType::Hello => Reason::BadHello,
            _ => Reason::MalformedRequest,
        };
        Refusal::new(reason, format!("{} {what}", self.frame_type.as_str()))
    }

    #[cold]
    fn short(&self, length: usize, field: &str) -> Refusal {
        let remaining = self.rest.len();
        self.wrong(format_args!(
            "ends in its field {field}: {length} bytes are needed there, {remaining} are left"
        ))
    }
}

/// The messages of a request, as bytes of its frame: message ids and client ids of 8 bytes each. Without `clients`, all
/// client ids are 0.
pub(super) struct Messages<'a> {
    pub(super) ids: &'a [u8],
    pub(super) clients: Option<&'a [u8]>,
}

impl Messages<'_> {
    pub(super) fn to_vec(&self) -> Vec<Message> {
        match self.clients {
            None => numbers(self.ids).map(Message::from).collect(),
            Some(clients) => pair(self.ids, clients).collect(),
        }
    }
}

/// Combines message ids and client ids into messages.
pub(super) fn pair<'a>(ids: &'a [u8], clients: &'a [u8]) -> impl Iterator<Item = Message> + 'a {
    numbers(ids).zip(numbers(clients)).map(Message::from)
}

pub(super) fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|number| u64::from_be_bytes(*number))
}
