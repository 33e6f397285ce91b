//! Saves the content of a memory store to its state file before a planned restart.
//!
//! A separate thread writes the file. So a disk that is slow or does not answer delays no other thread.

mod file;
mod private_file;
mod saved;

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use tokio::sync::oneshot;
use tracing::error;

use self::file::Attempt;
use super::wheel::MemoryWheel;
use crate::core::{DrainOutcome, Moment, Reason, Refusal};

pub use self::file::StateError;
pub(super) use self::file::StateFile;
pub(super) use self::saved::Saved;

/// Reserves room for the state on the disk. If this fails, expires all messages in flight at once instead.
pub(super) async fn reserve(
    wheel: Arc<MemoryWheel>,
    file: Arc<StateFile>,
    now: Instant,
) -> Result<DrainOutcome, Refusal> {
    let reserving = on_thread("state-room", {
        let wheel = Arc::clone(&wheel);
        move || file.reserve(Saved::most_bytes(&wheel)).map_err(|error| error.to_string())
    });
    let Err(error) = reserving.await else { return Ok(DrainOutcome::Kept) };
    error!(
        %error,
        "the wheel cannot be kept: the messages in flight are delivered now instead, in batches flagged drained"
    );
    Ok(wheel.expire_all(now))
}

/// Writes the state. If the caller drops the future before the file is complete, the attempt is abandoned.
pub(super) async fn save(
    wheel: Arc<MemoryWheel>,
    file: Arc<StateFile>,
    moment: Moment,
) -> Result<String, Refusal> {
    let attempt = Arc::new(Attempt::default());
    let saving = on_thread("state-file", {
        let (wheel, file, attempt) = (Arc::clone(&wheel), Arc::clone(&file), Arc::clone(&attempt));
        move || write(&wheel, &file, &attempt, moment)
    });
    let mut unfinished = Unfinished { wheel, file, attempt, is_armed: true };
    let saved = saving.await;
    unfinished.is_armed = false;
    saved.map_err(|error| unfinished.failed(error))
}

/// Writes the state. Returns a sentence about the saved messages, or the error.
fn write(wheel: &MemoryWheel, file: &StateFile, attempt: &Attempt, moment: Moment) -> Result<String, String> {
    let saved = Saved::of(wheel, moment);
    let (in_flight, batches) = (wheel.in_flight.count(), wheel.outbox.queue.lock().batches.len());
    let written = file.save(&saved, attempt);
    if written.is_ok() || (in_flight == 0 && batches == 0) {
        file.mark_in_use(false);
    }
    written.map_err(|error| error.to_string())?;
    let batches = match batches {
        0 => String::new(),
        count => format!(", with {count} batches that were not acknowledged"),
    };
    Ok(format!("{in_flight} messages in flight are kept in {}{batches}", file.path.display()))
}

/// Runs `work` on a new thread. The error is the reason why there is no result.
fn on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> impl Future<Output = Result<T, String>> {
    let (answer, done) = oneshot::channel();
    let started = thread::Builder::new().name(String::from(name)).spawn(move || {
        // The receiver may be dropped already.
        let _ = answer.send(work());
    });
    async move {
        started.map_err(|error| format!("no thread could be started for the state file: {error}"))?;
        done.await.unwrap_or_else(|_| Err(String::from("the thread for the state file ended without an answer")))
    }
}

/// A state that is being written. Dropping it while `is_armed` abandons the attempt, removes the unfinished file, and
/// logs the loss.
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
            "the wheel could not be kept: the messages in flight and the batches in the outbox end with this process, \
             and no subscriber gets them; make room where --state is, and let the logic nodes add the messages again"
        );
        Refusal::new(Reason::StoreTimeout, error)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if self.is_armed && self.attempt.abandon() {
            self.file.remove_unfinished();
            self.failed(String::from("the state file was not written before the drain ended: is its disk slow?"));
        }
    }
}
