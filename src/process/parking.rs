//! Calls a function when a thread of the runtime has nothing to do.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

type Callback = Box<dyn Fn() + Send + Sync>;

static IS_INSTALLED: AtomicBool = AtomicBool::new(false);
static CALLBACK: OnceLock<Callback> = OnceLock::new();

/// Returns the hook for [`tokio::runtime::Builder::on_thread_park`].
pub fn hook() -> impl Fn() + Send + Sync + 'static {
    IS_INSTALLED.store(true, Ordering::Relaxed);
    || {
        if let Some(callback) = CALLBACK.get() {
            callback();
        }
    }
}

/// Registers a function that the hook calls. Returns false if no runtime has the hook, or if another function is
/// registered.
pub fn on_park(callback: impl Fn() + Send + Sync + 'static) -> bool {
    IS_INSTALLED.load(Ordering::Relaxed) && CALLBACK.set(Box::new(callback)).is_ok()
}
