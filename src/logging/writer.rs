//! Writes log lines to stderr from a bounded queue, on a thread of its own.
//!
//! The reader of stderr may be stuck or gone, or its disk may be full. A thread that logs never waits for the reader. A
//! line that does not fit into the queue, or cannot be written, is dropped and counted. In the place of the missing
//! lines, the log gets a warning with their number, once lines can be written again.
//!
//! The crate tracing-appender also has such a queue. It is not used, because it does not count a line whose write
//! failed, and no caller can wait until its queue is written. At its end it also prints to stdout, which may be the
//! same stuck pipe.

use std::cell::RefCell;
use std::io::{self, Write, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use tracing::warn;

use super::repeated_lines::TARGET;

/// The maximum cost of all lines in the queue, in bytes. The cost of a line is its length plus [`COST_OF_A_LINE`].
const MAX_QUEUED_BYTES: usize = 1024 * 1024;

/// The cost of a line in addition to its length, in bytes. So the number of short lines is limited too.
const COST_OF_A_LINE: usize = 64;

thread_local! {
    /// The warning about missing lines that the writing thread itself logs. `Some` only on the writing thread, while it
    /// formats this warning.
    static OWN_LINES: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

/// The queue of log lines. Each call of `write` queues one line, and never waits. Clones share the queue.
#[derive(Clone, Debug)]
pub(super) struct LogWriter {
    queue: Sender<Entry>,
    counts: Arc<Counts>,
}

#[derive(Debug)]
enum Entry {
    /// A line, and how many lines are missing directly before it.
    Line(Vec<u8>, u64),
    /// A marker. It is dropped once all earlier lines are written or have failed, and this wakes the thread that waits.
    Flush { _written: Sender<()> },
}

#[derive(Debug, Default)]
struct Counts {
    /// The total cost of the lines in the queue: their lengths, and [`COST_OF_A_LINE`] for each line.
    queued_bytes: AtomicUsize,
    /// The number of lines that were dropped so far.
    dropped: AtomicU64,
    /// The number of lines that did not fit into the queue and that were not reported to the writing thread yet.
    missing: AtomicU64,
}

impl LogWriter {
    /// Starts the thread that writes lines to `output`. The thread ends once the last [`LogWriter`] is dropped.
    pub(super) fn start(output: impl FnMut(&[u8]) -> io::Result<usize> + Send + 'static) -> io::Result<LogWriter> {
        let ((queue, entries), counts) = (channel(), Arc::new(Counts::default()));
        let of_thread = Arc::clone(&counts);
        let thread = thread::Builder::new().name(String::from("log"));
        thread.spawn(move || write_lines(entries, &of_thread, output))?;
        Ok(LogWriter { queue, counts })
    }

    pub(super) fn dropped(&self) -> u64 {
        self.counts.dropped.load(Ordering::Relaxed)
    }

    pub(super) fn push(&self, line: &[u8]) {
        let (counts, cost) = (&self.counts, line.len() + COST_OF_A_LINE);
        if counts.queued_bytes.fetch_add(cost, Ordering::Relaxed) + cost <= MAX_QUEUED_BYTES {
            let missing = counts.missing.swap(0, Ordering::Relaxed);
            // This send does not fail, because the writing thread runs as long as a `LogWriter` exists.
            let _ = self.queue.send(Entry::Line(line.to_vec(), missing));
        } else {
            counts.queued_bytes.fetch_sub(cost, Ordering::Relaxed);
            counts.dropped.fetch_add(1, Ordering::Relaxed);
            counts.missing.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all queued lines are written or have failed, but for at most `timeout`.
    pub(super) fn wait_until_written(&self, timeout: Duration) {
        let (written, is_written) = channel();
        let _ = self.queue.send(Entry::Flush { _written: written });
        let _ = is_written.recv_timeout(timeout);
    }
}

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // A line of the writing thread itself is not queued. On a thread that is ending, `OWN_LINES` may already be
        // destroyed. Then the line is queued.
        let is_own = OWN_LINES.try_with(|own| own.borrow_mut().as_mut().map(|own| own.extend_from_slice(line)));
        if !matches!(is_own, Ok(Some(()))) {
            self.push(line);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes all queued lines. Returns once the last [`LogWriter`] is dropped.
fn write_lines(entries: Receiver<Entry>, counts: &Counts, output: impl FnMut(&[u8]) -> io::Result<usize>) {
    let mut output = LineOutput { output, is_torn: false, missing: 0 };
    for entry in entries {
        let Entry::Line(line, missing) = entry else { continue };
        let cost = line.len() + COST_OF_A_LINE;
        let is_last = counts.queued_bytes.fetch_sub(cost, Ordering::Relaxed) == cost;
        output.report_missing(missing);
        if !output.write(&line) {
            counts.dropped.fetch_add(1, Ordering::Relaxed);
            output.missing += 1;
        }
        if is_last {
            output.report_missing(counts.missing.swap(0, Ordering::Relaxed));
        }
    }
}

/// Formats a warning about `missing` lines, in the log format of this process.
fn missing_notice(missing: u64) -> Vec<u8> {
    OWN_LINES.set(Some(Vec::new()));
    warn!(
        target: TARGET,
        dropped = missing,
        "{missing} log lines are missing here: the reader of stderr was stuck or gone, or its disk was full"
    );
    OWN_LINES.take().unwrap_or_default()
}

/// An output for whole lines.
struct LineOutput<W> {
    output: W,
    /// Whether the last line was written only in part.
    is_torn: bool,
    /// The number of missing lines that are not reported yet.
    missing: u64,
}

impl<W: FnMut(&[u8]) -> io::Result<usize>> LineOutput<W> {
    fn report_missing(&mut self, more: u64) {
        self.missing += more;
        if self.missing > 0 && self.write(&missing_notice(self.missing)) {
            self.missing = 0;
        }
    }

    /// Writes a line. Returns whether the whole line was written.
    fn write(&mut self, line: &[u8]) -> bool {
        let end_of_torn: &[u8] = if self.is_torn { b"\n" } else { b"" };
        for mut rest in [end_of_torn, line] {
            while !rest.is_empty() {
                match (self.output)(rest) {
                    Ok(length @ 1..) => {
                        rest = &rest[length..];
                        self.is_torn = !rest.is_empty();
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => return false,
                }
            }
        }
        true
    }
}

/// Writes bytes to stderr without a buffer, and without the lock of stderr, which another thread may hold. Returns how
/// many bytes were written.
pub(super) fn write_to_stderr(bytes: &[u8]) -> io::Result<usize> {
    let stderr = stderr();
    loop {
        match rustix::io::write(&stderr, bytes) {
            // Another process that shares stderr may have made it non-blocking.
            Err(rustix::io::Errno::AGAIN) => {
                poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], None)?;
            }
            written => return Ok(written?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, SyncSender};

    use super::*;

    type Permits = SyncSender<io::Result<usize>>;

    /// Starts a writer whose output writes only as many bytes as the test permits.
    fn held() -> (LogWriter, Permits, Receiver<String>) {
        let ((allow, permits), (written, seen)) = (mpsc::sync_channel(1_000), mpsc::sync_channel(1_000));
        let permits: Receiver<io::Result<usize>> = permits;
        let output = move |bytes: &[u8]| {
            let most = permits.recv().unwrap_or(Err(io::ErrorKind::BrokenPipe.into()))?;
            let length = most.min(bytes.len());
            let text = String::from_utf8(bytes[..length].to_vec()).unwrap();
            let _ = written.send(text);
            Ok(length)
        };
        (LogWriter::start(output).unwrap(), allow, seen)
    }

    #[test]
    fn lines_that_do_not_fit_are_dropped_and_counted_and_those_that_fit_are_written_in_order() {
        let (mut writer, allow, seen) = held();
        let line = vec![b'x'; MAX_QUEUED_BYTES / 4 - COST_OF_A_LINE];
        writer.write_all(b"first").unwrap();
        while writer.counts.queued_bytes.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        for _ in 0..7 {
            writer.write_all(&line).unwrap();
        }
        assert_eq!(writer.dropped(), 3, "one line is being written, and four more have room");
        (0..5).for_each(|_| allow.send(Ok(usize::MAX)).unwrap());
        let lengths: Vec<usize> = (0..5).map(|_| seen.recv().unwrap().len()).collect();
        assert_eq!(lengths, [5, line.len(), line.len(), line.len(), line.len()]);
        writer.wait_until_written(Duration::MAX / 4);
        writer.write_all(b"next").unwrap();
        allow.send(Ok(usize::MAX)).unwrap();
        assert_eq!(seen.recv().unwrap(), "next");
    }

    #[test]
    fn a_line_that_cannot_be_written_is_counted_and_a_torn_one_ends_before_the_next() {
        let (mut writer, allow, seen) = held();
        let full = || Err(io::ErrorKind::StorageFull.into());
        let permits = [full(), Err(io::ErrorKind::Interrupted.into()), Ok(2), full(), Ok(9), Ok(3), Ok(9)];
        for permit in permits {
            allow.send(permit).unwrap();
        }
        for line in ["lost\n", "torn\n", "whole\n"] {
            writer.write_all(line.as_bytes()).unwrap();
        }
        let written: Vec<String> = (0..4).map(|_| seen.recv().unwrap()).collect();
        assert_eq!(written.concat(), "to\nwhole\n");
        assert_eq!(writer.dropped(), 2);
    }

    #[test]
    fn the_end_waits_for_what_can_be_written_and_no_longer_than_it_may() {
        let (mut writer, allow, seen) = held();
        writer.write_all(b"stuck").unwrap();
        writer.wait_until_written(Duration::from_millis(1));
        assert!(seen.try_recv().is_err(), "nothing was written, and the wait has ended");
        allow.send(Ok(usize::MAX)).unwrap();
        writer.wait_until_written(Duration::MAX / 4);
        assert_eq!(seen.try_recv().unwrap(), "stuck");
    }
}
