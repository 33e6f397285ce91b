//! Makes the answers that need the store, on a separate thread. An endpoint makes one answer at a time. A request waits
//! at most [`ANSWER_TIMEOUT`].
//!
//! The admin thread itself never waits for a lock of the store or for busy connections, so `/livez` answers in time.
//! During a flood of requests, an endpoint makes at most one answer per [`PAUSE`]. Each answer serves all requests that
//! came before it was begun.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::sync::Mutex;
use tokio::time::{sleep_until, timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::clock::Clock;
use crate::process::thread::RuntimeThread;

/// How long a request waits for its answer. Prometheus and probes wait longer by default.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The minimum time between the beginnings of two answers.
const PAUSE: Duration = Duration::from_millis(10);

/// An answer: its status, its media type, and its text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer(pub(super) StatusCode, pub(super) &'static str, pub(super) Bytes);

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let Answer(status, media_type, text) = self;
        (status, [(header::CONTENT_TYPE, media_type)], text).into_response()
    }
}

/// The last answer of one endpoint, shared by all its requests.
#[derive(Debug)]
pub struct SharedAnswer {
    thread: Arc<RuntimeThread>,
    /// The last answer, and when it was begun. The mutex is locked while the next answer is made.
    last: Arc<Mutex<Option<(Instant, Answer)>>>,
}

impl SharedAnswer {
    /// Creates a shared answer that is made on `thread`. This thread may wait for locks of the store.
    pub fn made_on(thread: &Arc<RuntimeThread>) -> SharedAnswer {
        SharedAnswer { thread: Arc::clone(thread), last: Arc::default() }
    }

    /// Runs `make` and returns its answer. If another request has begun an answer since this call, returns that answer
    /// instead. Returns `None` if no answer is ready within [`ANSWER_TIMEOUT`].
    pub(super) async fn get(
        &self,
        clock: &Arc<Clock>,
        make: impl Future<Output = Answer> + Send + 'static,
    ) -> Option<Answer> {
        let (clock, asked) = (Arc::clone(clock), clock.now());
        let answer = async {
            let mut last = Arc::clone(&self.last).lock_owned().await;
            if let Some((begun, answer)) = &*last {
                if *begun >= asked {
                    return Some(answer.clone());
                }
                sleep_until((*begun + PAUSE).into()).await;
            }
            let task = self.thread.handle.spawn(async move {
                let begun = clock.now();
                let answer = make.await;
                *last = Some((begun, answer.clone()));
                answer
            });
            // If this request stops waiting, the handle is dropped. This aborts the task at its next await.
            AbortOnDropHandle::new(task).await.ok()
        };
        timeout(ANSWER_TIMEOUT, answer).await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use futures_util::future::join_all;

    use super::*;

    fn shared() -> SharedAnswer {
        SharedAnswer::made_on(&Arc::new(RuntimeThread::start("answers").unwrap()))
    }

    fn answer(text: &'static str) -> Answer {
        Answer(StatusCode::OK, "text/plain", Bytes::from_static(text.as_bytes()))
    }

    #[tokio::test]
    async fn requests_that_come_together_share_one_answer_and_a_later_one_gets_a_fresh_one() {
        let (shared, clock, made) = (shared(), Arc::new(Clock::start()), Arc::new(AtomicUsize::new(0)));
        let get = || {
            let made = Arc::clone(&made);
            shared.get(&clock, async move {
                made.fetch_add(1, Ordering::Relaxed);
                answer("made")
            })
        };
        let answers = join_all((0..100).map(|_| get())).await;
        assert!(answers.iter().all(|given| given.as_ref() == Some(&answer("made"))));
        let first = made.load(Ordering::Relaxed);
        assert!(first <= 2, "{first} answers were made for requests that came together");
        assert_eq!(get().await, Some(answer("made")));
        assert_eq!(made.load(Ordering::Relaxed), first + 1, "the later request gets a fresh answer");
    }

    #[tokio::test]
    async fn a_store_that_blocks_its_thread_or_never_answers_holds_up_no_request_beyond_its_time() {
        let (shared, clock) = (shared(), Arc::new(Clock::start()));
        let (release, blocked) = mpsc::channel::<()>();
        let begun = clock.now();
        let stuck = shared.get(&clock, async move {
            let _ = blocked.recv();
            answer("at last")
        });
        assert_eq!(stuck.await, None);
        let next = shared.get(&clock, async { answer("not asked while another is") });
        assert_eq!(next.await, None);
        assert!(clock.now() - begun < ANSWER_TIMEOUT * 3);
        release.send(()).unwrap();
        let after = shared.get(&clock, async { answer("the next") });
        assert_eq!(after.await, Some(answer("the next")));
        let never = shared.get(&clock, async {
            pending::<()>().await;
            answer("never")
        });
        assert_eq!(never.await, None);
        let after = shared.get(&clock, async { answer("and the next") });
        assert_eq!(after.await, Some(answer("and the next")), "the answer that never came was given up");
    }
}
