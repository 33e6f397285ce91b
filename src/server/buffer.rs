//! A buffer of a connection, which knows how much memory it has.

use bytes::BytesMut;

use super::memory_budget::Charge;
use crate::core::MAX_BATCH_MESSAGES;
use crate::protocol::frame::TIMED_OUT_LENGTH;

/// The limit for the memory of an idle connection: a buffer with a larger capacity is freed once it is empty. A timeout
/// batch fits into this capacity, so that a subscriber does not allocate a buffer for every batch.
const KEEP_CAPACITY: usize = 72 * 1024;

const _: () = assert!(MAX_BATCH_MESSAGES * TIMED_OUT_LENGTH + 1024 < KEEP_CAPACITY);

/// Bytes, and the memory that was allocated for them.
#[derive(Default)]
pub(super) struct Buffer {
    pub(super) bytes: BytesMut,
    /// The largest capacity since the memory was allocated. Taking bytes from the front reduces the capacity of
    /// `bytes`, but frees nothing.
    allocated: usize,
}

impl Buffer {
    /// Returns the allocated number of bytes.
    pub(super) fn allocated(&mut self) -> usize {
        self.allocated = self.allocated.max(self.bytes.capacity());
        self.allocated
    }

    /// If there are no bytes, frees memory that is large, or that the memory budget does not let the connection keep.
    pub(super) fn free_if_unused(&mut self, charge: &Charge) {
        if self.bytes.is_empty() && (self.allocated() > KEEP_CAPACITY || !charge.may_keep()) {
            *self = Buffer::default();
        }
    }
}
