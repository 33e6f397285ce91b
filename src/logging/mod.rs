//! What the process says of itself, and the rule that a fault which repeats does not fill the log.
//!
//! Lines are [`tracing`] events, and the limit is a layer between them and whoever writes them: it sees all of
//! them, those of libraries too, and no call site can forget it. A *place* is a call site. Within ten seconds a
//! place writes at most [`MAX_LINES`] lines, of which at most [`MAX_SAME`] are the same; what it says beyond that
//! is counted, and the count is written: "… and 412 more like it in the last 10 s".
//!
//! Why by place, and the same lines apart: one budget for all places would let a hostile client silence a storm;
//! a budget for each text would be none where a stranger writes the text; and a plain budget for each place would
//! let a group in trouble crowd out the group beside it. So the lines of a place that differ, in their fields or in the
//! ring that they belong to, come first. The connection is not asked: a peer that is refused and comes again has a new
//! one each time, and would crowd out all others.

//!
//! Behind the limit a line goes through a bounded queue to a thread that writes it: no thread that logs waits for the
//! reader of stderr.

mod layer;
mod repeats;
mod writer;

pub use layer::{Limit, RING, TARGET};
pub use repeats::{MAX_LINES, MAX_SAME, WINDOW};
pub use writer::{LogWriter, dropped_lines, flush, print};
