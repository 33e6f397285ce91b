//! Logging: limits repeated lines, and writes to stderr without a thread that waits for its reader.
//!
//! Lines are [`tracing`] events. The limit is a layer before the writer: it sees all lines, those of libraries too, and no
//! call site can forget it. Within ten seconds a call site writes at most [`MAX_LINES`] lines, of which at most
//! [`MAX_SAME`] are equal. Further lines are counted, and the count is logged: "… and 412 more like it in the last 10 s".
//!
//! The budget is one of each call site, and equal lines have a part of it, for three reasons:
//!
//! - With one budget for all call sites, a hostile client could silence a storm.
//! - With a budget for each text, there would be no limit where a client writes the text.
//! - Without the limit of equal lines, a faulty group would silence the group beside it.
//!
//! Lines are equal if their fields and their ring are. Their connection does not count: a peer that is refused and comes
//! again has a new one each time.

mod repeated_lines;
mod writer;

pub use repeated_lines::{Limit, MAX_LINES, MAX_SAME, RING, TARGET, WINDOW};
pub use writer::{LogWriter, dropped_lines, flush, print};
