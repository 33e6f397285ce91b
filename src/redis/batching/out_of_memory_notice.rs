//! A Redis without memory, as people are told of it: when adds are first refused for it, and when they are taken again.

use tracing::{error, info};

/// Whether adds are refused, as far as people were told.
#[derive(Debug, Default)]
pub(crate) struct OutOfMemoryNotice(bool);

impl OutOfMemoryNotice {
    /// Adds are refused for it.
    pub(crate) fn begins(&mut self, cause: &str) {
        if !std::mem::replace(&mut self.0, true) {
            error!(
                cause,
                "Redis has no memory left: new messages are refused, and nobody watches what is refused; raise its \
                 maxmemory, or lower --max-in-flight"
            );
        }
    }

    /// A script was carried out that had adds, or had not.
    pub(crate) fn ends_if(&mut self, has_adds: bool) {
        if self.0 && has_adds {
            self.0 = false;
            info!("Redis has memory again, and new messages are taken");
        }
    }
}
