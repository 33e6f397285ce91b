//! Makes every panic end either one connection alone, or the process with a non-zero exit code.
//!
//! The rule is the same for every thread and task: a panic ends the process. A process that lost a task looks healthy and
//! delivers nothing, and a restart repairs that. The only exception is a connection, which runs in [`contained`]. Code of
//! a connection that changes state of others too runs in [`shared`], and is no part of the exception: a panic there may
//! leave that state half changed.

use std::any::Any;
use std::cell::Cell;
use std::future::poll_fn;
use std::panic::{PanicHookInfo, set_hook};
use std::process::exit;
use std::thread;
use std::time::Duration;

use tracing::error;

/// The exit code of a process that a panic ended: a failure at run time.
const EXIT_CODE: i32 = 1;

/// How long the last lines of the log may take.
const LAST_LINES_TIMEOUT: Duration = Duration::from_secs(2);

thread_local! {
    /// Whether a panic on this thread ends only the connection that it serves at this moment.
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// A scope with another rule; dropping it restores the rule from before.
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

/// Runs a connection: a panic in it ends its task, and nothing else.
pub fn contained<T>(connection: impl Future<Output = T>) -> impl Future<Output = T> {
    scoped(connection, true)
}

/// Runs a part of a connection that uses state of others too: a panic in it ends the process.
pub fn uncontained<T>(request: impl Future<Output = T>) -> impl Future<Output = T> {
    scoped(request, false)
}

fn scoped<T>(future: impl Future<Output = T>, contained: bool) -> impl Future<Output = T> {
    // On the heap at once: a future that is moved twice would take its room twice.
    let mut future = Box::pin(future);
    poll_fn(move |context| {
        let _scope = Scope::enter(contained);
        future.as_mut().poll(context)
    })
}

/// Begins code of a connection that changes state of others too: until this is dropped, a panic ends the process.
#[must_use]
pub fn shared() -> Scope {
    Scope::enter(false)
}

/// Makes each panic outside of [`contained`] code log a line, call `flush_log` on its thread, and end the process.
pub fn end_the_process(flush_log: impl Fn() + Send + Sync + 'static) {
    set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let text = text_of(panic);
        if CONTAINED.get() {
            error!(place, text, "a panic ended this connection, and no other: please report it as a bug");
            return;
        }
        // The panic may have happened under a lock of the log, or the log may have no reader: the process ends all the same.
        let _ = thread::Builder::new().name(String::from("panic")).spawn(|| {
            thread::sleep(LAST_LINES_TIMEOUT);
            exit(EXIT_CODE);
        });
        let current = thread::current();
        error!(
            place,
            text,
            thread = current.name(),
            "a panic ends the process with exit code {EXIT_CODE}, without a drain: please report it as a bug"
        );
        flush_log();
        exit(EXIT_CODE);
    }));
}

/// The message of a panic.
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
        assert!(!contained_now(), "a task that nobody contains");
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
            assert!(contained_now(), "also when it goes on after a wait");
        })
        .await;
        assert!(!contained_now());
    }

    #[tokio::test]
    async fn a_connection_that_panicked_leaves_the_rule_of_its_thread_as_it_was() {
        let connection = tokio::spawn(contained(async { panic!("a bug") }));
        assert!(connection.await.is_err_and(|error| error.is_panic()));
        assert!(!CONTAINED.get());
    }
}
