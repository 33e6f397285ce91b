//! Decides what a panic ends: the whole process, with a non-zero exit code, or only the connection that panicked.
//!
//! A panic on any thread or in any task ends the process. Otherwise a process that lost one of its tasks could look
//! healthy but deliver nothing. A restart repairs this. The only exception is the code of a connection, which runs in
//! [`contained`]. Within a connection, the code that changes state shared with others runs in [`shared`] or
//! [`uncontained`]. A panic there ends the process, because the shared state may be half changed.

use std::any::Any;
use std::cell::Cell;
use std::future::poll_fn;
use std::panic::{PanicHookInfo, set_hook, take_hook};
use std::process::exit;
use std::thread;
use std::time::Duration;

use tracing::error;

use super::thread::MORE_THREADS;

/// The exit code of a process that a panic ended. It is the code for failures at run time.
const EXIT_CODE: i32 = 1;

/// How long writing the last log lines may take after a panic.
const LAST_LINES_TIMEOUT: Duration = Duration::from_secs(2);

/// How the panic begins with which Tokio or the standard library reports that the system starts no thread.
const NO_THREAD: [&str; 2] = ["OS can't spawn worker thread: ", "failed to spawn thread: "];

thread_local! {
    /// Whether a panic on this thread now ends only the connection that the thread is serving.
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// A scope that sets whether a panic ends only a connection. Dropping the scope restores the previous setting.
#[derive(Debug)]
pub struct Scope {
    before: bool,
}

impl Scope {
    fn enter(contained: bool) -> Scope {
        Scope { before: CONTAINED.replace(contained) }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        CONTAINED.set(self.before);
    }
}

/// Runs a connection. A panic in the connection ends only its task.
pub fn contained<T>(connection: impl Future<Output = T>) -> impl Future<Output = T> {
    scoped(connection, true)
}

/// Runs a request of a connection that uses state shared with others. A panic in the request ends the process.
pub fn uncontained<T>(request: impl Future<Output = T>) -> impl Future<Output = T> {
    scoped(request, false)
}

fn scoped<T>(future: impl Future<Output = T>, contained: bool) -> impl Future<Output = T> {
    // Put the future on the heap. An `async` block that pinned the future itself would reserve its size twice.
    let mut future = Box::pin(future);
    poll_fn(move |context| {
        let _scope = Scope::enter(contained);
        future.as_mut().poll(context)
    })
}

/// Enters a scope for code of a connection that changes state shared with others. Until the scope is dropped, a panic
/// on this thread ends the process.
#[must_use]
pub fn shared() -> Scope {
    Scope::enter(false)
}

/// Installs a panic hook. After a panic outside of [`contained`] code, the hook logs a line, calls `flush_log` on the
/// same thread, and ends the process. If this takes longer than 2 s, the process ends without the log lines.
pub fn end_the_process(flush_log: impl Fn() + Send + Sync + 'static) {
    set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = text_of(panic);
        if CONTAINED.get() {
            error!(place, text, "a panic ended this connection, and no other: please report it as a bug");
            return;
        }
        // The new thread ends the process even if logging blocks: the panic may have happened under a lock of the log,
        // or the log may have no reader.
        let _ = thread::Builder::new().name(String::from("panic")).spawn(|| {
            thread::sleep(LAST_LINES_TIMEOUT);
            exit(EXIT_CODE);
        });
        if let Some(refused) = refused_thread(text) {
            error!("{refused}");
        } else {
            error!(
                place,
                text,
                thread = thread::current().name(),
                "a panic ends the process with exit code {EXIT_CODE}, without a drain: please report it as a bug"
            );
        }
        flush_log();
        exit(EXIT_CODE);
    }));
}

/// Installs a panic hook for a program without a log. If the system starts no thread, the hook prints an error with
/// `print`, and ends the process. Other panics are handled as before.
pub fn explain_refused_threads(print: impl Fn(&str) + Send + Sync + 'static) {
    let other = take_hook();
    set_hook(Box::new(move |panic| match refused_thread(text_of(panic)) {
        Some(refused) => {
            print(&refused);
            exit(EXIT_CODE);
        }
        None => other(panic),
    }));
}

/// Returns an error if the text of a panic says that the system starts no thread. That is not a bug.
fn refused_thread(text: &str) -> Option<String> {
    let cause = NO_THREAD.iter().find_map(|begin| text.strip_prefix(begin))?;
    Some(format!("the system starts no further thread ({cause}): {MORE_THREADS}"))
}

/// Returns the message of a panic.
fn text_of<'a>(panic: &'a PanicHookInfo<'_>) -> &'a str {
    let payload: &(dyn Any + Send) = panic.payload();
    let literal = payload.downcast_ref::<&str>().copied();
    literal.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_ends_a_connection_alone_only_outside_of_what_it_shares() {
        let contained_now = || CONTAINED.get();
        assert!(!contained_now(), "this task does not run in `contained`");
        contained(async {
            assert!(contained_now());
            {
                let _shared = shared();
                assert!(!contained_now());
            }
            uncontained(async {
                tokio::task::yield_now().await;
                assert!(!contained_now());
            })
            .await;
            tokio::task::yield_now().await;
            assert!(contained_now(), "also after a wait");
        })
        .await;
        assert!(!contained_now());
    }

    #[test]
    fn the_panics_of_tokio_and_the_standard_library_about_threads_are_known() {
        let tokio = "OS can't spawn worker thread: Resource temporarily unavailable (os error 11)";
        let standard = "failed to spawn thread: Os { code: 11 }";
        for text in [tokio, standard] {
            let refused = refused_thread(text).unwrap();
            assert!(refused.contains("11") && refused.contains("pids.max"), "{refused}");
        }
        assert_eq!(refused_thread("a bug"), None);
    }

    #[tokio::test]
    async fn a_connection_that_panicked_leaves_the_rule_of_its_thread_as_it_was() {
        let connection = tokio::spawn(contained(async { panic!("a bug") }));
        assert!(connection.await.is_err_and(|error| error.is_panic()));
        assert!(!CONTAINED.get());
    }
}
