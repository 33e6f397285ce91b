//! Writes the state file on a thread of its own: a disk that is slow, or does not answer, holds up no other thread.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use tokio::sync::oneshot;
use tracing::error;

use super::attempt::Attempt;
use super::file::StateFile;
use super::saved::Saved;
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::DrainOutcome;
use crate::core::store::Moment;
use crate::memory::wheel::MemoryWheel;

/// The names of the threads.
const RESERVES: &str = "state-room";
const SAVES: &str = "state-file";

/// Makes room for the state, if the disk has it; else expires all that is in flight.
pub(in crate::memory) async fn reserve(
    wheel: Arc<MemoryWheel>,
    state_file: Arc<StateFile>,
    now: Instant,
) -> Result<DrainOutcome, Refusal> {
    let reserving = on_thread(RESERVES, {
        let wheel = Arc::clone(&wheel);
        move || state_file.reserve(Saved::most_bytes(&wheel, &wheel.outbox))
    });
    let is_reserved = match reserving {
        Ok(reserved) => reserved.await.unwrap_or(false),
        Err(error) => {
            error!(%error, "no thread could be started to write the state file: what is in flight is delivered now");
            false
        }
    };
    Ok(if is_reserved { DrainOutcome::Kept } else { wheel.expire_all(now) })
}

/// Writes the state. If the reply is dropped before it is there, the state is not written.
pub(in crate::memory) async fn save(
    wheel: Arc<MemoryWheel>,
    file: Arc<StateFile>,
    moment: Moment,
) -> Result<String, Refusal> {
    let attempt = Arc::new(Attempt::default());
    let saving = on_thread(SAVES, {
        let (wheel, file, attempt) = (Arc::clone(&wheel), Arc::clone(&file), Arc::clone(&attempt));
        move || write(&wheel, &file, moment, &attempt)
    });
    let mut unfinished = Unfinished { wheel, file, attempt, is_armed: true };
    let saved = match saving {
        Ok(saving) => saving.await.unwrap_or_else(|_| Err(String::from("the thread that wrote it has ended"))),
        Err(error) => Err(format!("no thread could be started to write it: {error}")),
    };
    unfinished.is_armed = false;
    saved.map_err(|error| unfinished.failed(error))
}

/// Returns in words what was kept, or why not.
fn write(
    wheel: &MemoryWheel,
    state_file: &StateFile,
    moment: Moment,
    attempt: &Attempt,
) -> Result<String, String> {
    let saved = Saved::of(wheel, &wheel.outbox, moment);
    let (in_flight, batches) = (saved.in_flight(), saved.batches());
    if let Err(error) = state_file.save(&saved, attempt) {
        if in_flight == 0 && batches == 0 {
            state_file.mark_in_use(false);
        }
        return Err(error.to_string());
    }
    state_file.mark_in_use(false);
    let path = state_file.path().display();
    let batches = match batches {
        0 => String::new(),
        count => format!(", with {count} batches that were not acknowledged"),
    };
    Ok(format!("{in_flight} messages in flight are kept in {path}{batches}"))
}

fn on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<oneshot::Receiver<T>> {
    let (answer, done) = oneshot::channel();
    thread::Builder::new().name(String::from(name)).spawn(move || {
        // The receiver may have given up.
        let _ = answer.send(work());
    })?;
    Ok(done)
}

/// A state that is being written; dropping it gives it up.
struct Unfinished {
    wheel: Arc<MemoryWheel>,
    file: Arc<StateFile>,
    attempt: Arc<Attempt>,
    is_armed: bool,
}

impl Unfinished {
    fn failed(&self, error: String) -> Refusal {
        error!(
            error,
            in_flight = self.wheel.in_flight.count(),
            "the wheel could not be kept, and ends with this process, with what the outbox holds: no subscriber gets these \
             messages; make room where --state is, and have the logic nodes add again what they wait for"
        );
        Refusal::new(Reason::StoreTimeout, error)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if self.is_armed && self.file.abandon(&self.attempt) {
            self.failed(String::from("the state file was not written before the drain ended: is its disk slow?"));
        }
    }
}
