//! The state file: a memory store across a planned restart.
//!
//! Layout: the magic, then u32 CRC-32 and u64 length of what follows (little-endian), then [`Saved`] in
//! postcard. It is written beside its place, synced and renamed, so that there is a whole file or none; and
//! it is removed once it was taken over, so that a later crash cannot bring an old wheel back.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::entry::{Entry, Marks, ShortTick};
use super::outbox::MemoryOutbox;
use super::ring::MemoryRing;
use super::saved_outbox::SavedOutbox;
use crate::core::message::Message;
use crate::core::store::Moment;
use crate::core::tally::{STAMP_UNIT, Stamp};
use crate::core::tick::{Tick, Wheel};

/// The first bytes of a state file; the digit is the version of its layout.
const MAGIC: &[u8; 16] = b"ackwheel state 1";
const HEAD_LENGTH: usize = MAGIC.len() + 4 + 8;

/// Why a state file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Reading or writing failed.
    #[error("cannot {what} the state file {path}: {cause}; check --state and the permissions of its folder")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// The file is not what was written.
    #[error(
        "{path} is not a whole state file of this version ({why}): move it away to start with an empty wheel, \
         or name another with --state"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The file is of a ring of other dimensions.
    #[error(
        "{path} was written by a ring of {} slots and {}ms ticks, and this one has {} slots and {}ms ticks: \
         start with --slots {} --tick {}ms, or move the file away to start with an empty wheel",
        saved.slots(), saved.tick_ms(), asked.slots(), asked.tick_ms(), saved.slots(), saved.tick_ms()
    )]
    OtherWheel {
        /// The file.
        path: PathBuf,
        /// The dimensions that it holds.
        saved: Wheel,
        /// The dimensions asked for.
        asked: Wheel,
    },
}

/// What a state file holds. Ages count from `unix_ms`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Saved {
    slots: u16,
    tick_ms: u32,
    unix_ms: u64,
    pub(super) epoch: u64,
    pub(super) pointer: u64,
    messages: Vec<SavedMessage>,
    /// Messages acknowledged so far of ticks that are not decided.
    acked: Vec<(u64, u64)>,
    outbox: SavedOutbox,
}

/// A message in flight, or remembered for `late`.
#[derive(Debug, Serialize, Deserialize)]
struct SavedMessage {
    msg_id: u64,
    client: u64,
    deadline: u64,
    age_units: u32,
    attempt: u8,
    late_counted: bool,
}

/// Reads a state file, if there is one, and makes sure that one can be written.
pub(super) fn load(path: &Path, wheel: Wheel) -> Result<Option<Saved>, StateError> {
    let io_error = |what| move |cause| StateError::Io { what, path: path.to_owned(), cause };
    // What is no file may have no end.
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        let cause = io::Error::new(io::ErrorKind::InvalidInput, "it is not a file");
        return Err(io_error("read")(cause));
    }
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let beside = beside(path);
            File::create(&beside).and_then(|_| fs::remove_file(&beside)).map_err(io_error("write"))?;
            return Ok(None);
        }
        Err(error) => return Err(io_error("read")(error)),
    };
    let saved = decode(&bytes).map_err(|why| StateError::Damaged { path: path.to_owned(), why })?;
    let saved_wheel = Wheel::new(saved.slots, Duration::from_millis(u64::from(saved.tick_ms)))
        .map_err(|error| StateError::Damaged { path: path.to_owned(), why: error.to_string() })?;
    if saved_wheel != wheel {
        return Err(StateError::OtherWheel { path: path.to_owned(), saved: saved_wheel, asked: wheel });
    }
    Ok(Some(saved))
}

/// Removes a state file that was taken over.
pub(super) fn consume(path: &Path) -> Result<(), StateError> {
    match fs::remove_file(path).and_then(|()| sync_folder(path)) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
            Err(StateError::Io { what: "remove", path: path.to_owned(), cause })
        }
        _ => Ok(()),
    }
}

/// Writes the store to a state file; returns the number of messages in flight.
pub(super) fn save(
    path: &Path,
    ring: &MemoryRing,
    outbox: &MemoryOutbox,
    moment: Moment,
) -> Result<u64, StateError> {
    let saved = Saved::of(ring, outbox, moment);
    let body = postcard::to_stdvec(&saved).expect("a state has no type that postcard cannot write");
    let write = || -> io::Result<()> {
        let beside = beside(path);
        let mut file = File::create(&beside)?;
        file.write_all(MAGIC)?;
        file.write_all(&crc32fast::hash(&body).to_le_bytes())?;
        file.write_all(&(body.len() as u64).to_le_bytes())?;
        file.write_all(&body)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        sync_folder(path)
    };
    write().map_err(|cause| {
        // A part of a state helps nobody, and the disk may be full.
        let _ = fs::remove_file(beside(path));
        StateError::Io { what: "write", path: path.to_owned(), cause }
    })?;
    Ok(saved.messages.iter().filter(|message| message.deadline >= saved.pointer).count() as u64)
}

/// Makes a rename or a removal last, a power cut included.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

fn decode(bytes: &[u8]) -> Result<Saved, String> {
    let Some((head, body)) = bytes.split_at_checked(HEAD_LENGTH) else {
        return Err(format!("it has only {} bytes", bytes.len()));
    };
    let (magic, numbers) = head.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(String::from("it begins with other bytes"));
    }
    let (crc, length) = numbers.split_at(4);
    if length != (body.len() as u64).to_le_bytes() {
        return Err(format!("its length is not the {} bytes that follow", body.len()));
    }
    if crc != crc32fast::hash(body).to_le_bytes() {
        return Err(String::from("its checksum is wrong"));
    }
    postcard::from_bytes(body).map_err(|error| error.to_string())
}

impl Saved {
    fn of(ring: &MemoryRing, outbox: &MemoryOutbox, moment: Moment) -> Saved {
        let now = moment.now;
        while ring.expire_step(now).more {}
        let pointer = ring.pointer();
        let stamp = ring.stamp(now);
        let mut messages = Vec::new();
        for shard in &ring.shards {
            messages.extend(shard.lock().table.iter().map(|entry| SavedMessage::of(entry, pointer, stamp)));
        }
        let acked = ring.alive().map(|tick| (tick.0, ring.counts(tick).acked));
        Saved {
            slots: ring.options.wheel.slots(),
            tick_ms: ring.options.wheel.tick_ms(),
            unix_ms: moment.unix_ms(),
            epoch: ring.options.epoch,
            pointer: pointer.0,
            messages,
            acked: acked.filter(|(_, acked)| *acked > 0).collect(),
            outbox: outbox.save(now),
        }
    }

    /// Puts everything back; returns the number of messages in flight.
    pub(super) fn restore(self, ring: &MemoryRing, outbox: &MemoryOutbox, moment: Moment) -> u64 {
        let now = moment.now;
        let away = Duration::from_millis(moment.unix_ms().saturating_sub(self.unix_ms));
        let stamp = ring.stamp(now);
        let acked: Vec<(Tick, u64)> = self.acked.iter().map(|(tick, acked)| (Tick(*tick), *acked)).collect();
        let entries = self.messages.iter().map(|saved| saved.entry(away, stamp));
        let in_flight = ring.restore(entries, &acked, now);
        let mut remembered: BTreeMap<Tick, u64> = BTreeMap::new();
        for message in self.messages.iter().filter(|message| message.deadline < self.pointer) {
            *remembered.entry(Tick(message.deadline)).or_default() += 1;
        }
        let mut expiry = ring.expiry.lock();
        for (tick, messages) in remembered {
            expiry.remember(tick, messages);
        }
        drop(expiry);
        outbox.restore(self.outbox, away, now);
        in_flight
    }
}

impl SavedMessage {
    fn of(entry: &Entry, pointer: Tick, now: Stamp) -> SavedMessage {
        SavedMessage {
            msg_id: entry.message.msg_id.0,
            client: entry.message.client.0,
            deadline: entry.deadline.seen_from(pointer).0,
            age_units: now.0.wrapping_sub(entry.added_at.0),
            attempt: entry.attempt,
            late_counted: entry.marks.has(Marks::LATE_COUNTED),
        }
    }

    fn entry(&self, away: Duration, now: Stamp) -> Entry {
        let age = Stamp::after(STAMP_UNIT.saturating_mul(self.age_units) + away);
        let added_at = Stamp(now.0.wrapping_sub(age.0));
        let message = Message::new(self.msg_id, self.client);
        let mut entry = Entry::in_flight(message, ShortTick::of(Tick(self.deadline)), added_at, self.attempt);
        if self.late_counted {
            entry.marks.set(Marks::LATE_COUNTED);
        }
        entry
    }
}
