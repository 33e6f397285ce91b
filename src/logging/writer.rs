//! Writes log lines to stderr from a bounded queue, on a thread of its own.
//!
//! The reader of stderr may be stuck or gone, and a disk may be full. No thread that logs waits for it: a line that does
//! not fit into the queue, or cannot be written, is dropped and counted. As soon as a line can be written again, a
//! warning in its place says how many lines are missing before it.
//!
//! tracing-appender has such a queue, but it does not count a line whose write failed, nobody can wait for its queue to
//! be written, and its end prints to stdout, which may be the same stuck pipe.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, Write, stderr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use tracing::warn;
use tracing_subscriber::fmt::MakeWriter;

use super::TARGET;

/// The most bytes that wait to be written.
const MAX_QUEUED_BYTES: usize = 1024 * 1024;

/// The cost of a line beside its bytes, so that the number of short lines is limited too.
const COST_OF_A_LINE: usize = 64;

/// How long the end of the process waits for the last lines. A drain may take 9.7 s, and 10 s with this.
const END_TIMEOUT: Duration = Duration::from_millis(250);

/// The writer of this process, once it logs.
static WRITER: OnceLock<LogWriter> = OnceLock::new();

thread_local! {
    /// On the thread that writes the log: the lines that it logs itself.
    static OWN_LINES: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

/// How many log lines this process has dropped.
#[must_use]
pub fn dropped_lines() -> u64 {
    WRITER.get().map_or(0, |writer| writer.0.dropped.load(Ordering::Relaxed))
}

/// Prints a line to stderr: behind all log lines if this process logs, and then without waiting for it.
pub fn print(line: &str) {
    match WRITER.get() {
        Some(writer) => writer.0.push(format!("{line}\n").as_bytes()),
        // If stderr cannot be written, there is no other place to report that.
        None => drop(writeln!(stderr(), "{line}")),
    }
}

/// Waits until all lines are written, for a quarter of a second at most. For the end of the process.
pub fn flush() {
    if let Some(writer) = WRITER.get() {
        writer.0.flush(END_TIMEOUT);
    }
}

/// Takes log lines and never waits. One write is one line. Clones share the queue.
#[derive(Clone, Debug)]
pub struct LogWriter(Arc<LogQueue>);

impl LogWriter {
    /// The writer to stderr of this process; the first call starts its thread.
    ///
    /// # Errors
    ///
    /// When the system has no thread left.
    pub fn of_process() -> io::Result<LogWriter> {
        if let Some(writer) = WRITER.get() {
            return Ok(writer.clone());
        }
        let writer = LogWriter::to(write_to_stderr)?;
        Ok(WRITER.get_or_init(|| writer).clone())
    }

    fn to(output: impl FnMut(&[u8]) -> io::Result<usize> + Send + 'static) -> io::Result<LogWriter> {
        let queue = Arc::new(LogQueue::default());
        let of_thread = Arc::clone(&queue);
        thread::Builder::new().name(String::from("log")).spawn(move || of_thread.write_to(output))?;
        Ok(LogWriter(queue))
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = LogWriter;

    fn make_writer(&'a self) -> LogWriter {
        self.clone()
    }
}

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // A thread that ends has none any more.
        let is_own = OWN_LINES.try_with(|own| own.borrow_mut().as_mut().map(|own| own.extend_from_slice(line)));
        if !matches!(is_own, Ok(Some(()))) {
            self.0.push(line);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines on their way to the thread that writes them.
#[derive(Debug, Default)]
struct LogQueue {
    lines: Mutex<Lines>,
    /// Notified when an entry is added.
    added: Condvar,
    /// Notified when all entries are written, or dropped.
    written: Condvar,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct Lines {
    entries: VecDeque<Entry>,
    bytes: usize,
    /// Whether the thread writes an entry now.
    is_writing: bool,
}

#[derive(Debug)]
enum Entry {
    Line(Vec<u8>),
    /// The number of lines that are missing in this place.
    Gap(u64),
}

impl LogQueue {
    fn push(&self, line: &[u8]) {
        let cost = line.len() + COST_OF_A_LINE;
        let entry = Entry::Line(line.to_vec());
        let mut lines = self.lines.lock();
        if lines.bytes + cost <= MAX_QUEUED_BYTES {
            lines.bytes += cost;
            lines.entries.push_back(entry);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            match lines.entries.back_mut() {
                Some(Entry::Gap(missing)) => *missing += 1,
                _ => lines.entries.push_back(Entry::Gap(1)),
            }
        }
        drop(lines);
        self.added.notify_one();
    }

    /// The next entry, as soon as there is one.
    fn next(&self) -> Entry {
        let mut lines = self.lines.lock();
        lines.is_writing = false;
        loop {
            if let Some(entry) = lines.entries.pop_front() {
                lines.is_writing = true;
                if let Entry::Line(line) = &entry {
                    lines.bytes -= line.len() + COST_OF_A_LINE;
                }
                return entry;
            }
            self.written.notify_all();
            self.added.wait(&mut lines);
        }
    }

    fn flush(&self, timeout: Duration) {
        let mut lines = self.lines.lock();
        let unwritten = |lines: &mut Lines| lines.is_writing || !lines.entries.is_empty();
        self.written.wait_while_for(&mut lines, unwritten, timeout);
    }

    /// Writes every line, for as long as the process lives.
    fn write_to(&self, output: impl FnMut(&[u8]) -> io::Result<usize>) {
        let mut output = LineOutput { output, is_torn: false };
        let mut missing = 0;
        loop {
            let line = match self.next() {
                Entry::Line(line) => Some(line),
                Entry::Gap(more) => {
                    missing += more;
                    None
                }
            };
            if missing > 0 && output.write(&missing_notice(missing)) {
                missing = 0;
            }
            if line.is_some_and(|line| !output.write(&line)) {
                self.dropped.fetch_add(1, Ordering::Relaxed);
                missing += 1;
            }
        }
    }
}

/// A line about missing lines, in the format in which this process logs.
fn missing_notice(missing: u64) -> Vec<u8> {
    OWN_LINES.set(Some(Vec::new()));
    warn!(
        target: TARGET,
        dropped = missing,
        "{missing} log lines are missing here: the reader of stderr was stuck or gone, or its disk was full"
    );
    OWN_LINES.take().unwrap_or_default()
}

/// Writes whole lines.
struct LineOutput<W> {
    output: W,
    /// Whether the last line was written in part.
    is_torn: bool,
}

impl<W: FnMut(&[u8]) -> io::Result<usize>> LineOutput<W> {
    /// Returns whether the whole line was written.
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

/// Writes to stderr without its lock, which others may hold, and without a buffer.
fn write_to_stderr(bytes: &[u8]) -> io::Result<usize> {
    let stderr = stderr();
    loop {
        match rustix::io::write(&stderr, bytes) {
            // The other side of a pipe may have made it non-blocking for its own use.
            Err(rustix::io::Errno::AGAIN) => {
                poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], None)?;
            }
            written => return Ok(written?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver, SyncSender};

    use super::*;

    type Permits = SyncSender<io::Result<usize>>;

    /// A writer whose output writes only as many bytes as it is allowed to.
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
        (LogWriter::to(output).unwrap(), allow, seen)
    }

    #[test]
    fn lines_that_do_not_fit_are_dropped_and_counted_and_those_that_fit_are_written_in_order() {
        let (mut writer, allow, seen) = held();
        let line = vec![b'x'; MAX_QUEUED_BYTES / 4 - COST_OF_A_LINE];
        writer.write_all(b"first").unwrap();
        while !writer.0.lines.lock().entries.is_empty() {
            thread::yield_now();
        }
        for _ in 0..7 {
            writer.write_all(&line).unwrap();
        }
        assert_eq!(writer.0.dropped.load(Ordering::Relaxed), 3, "the first is in hand, and four have room");
        (0..5).for_each(|_| allow.send(Ok(usize::MAX)).unwrap());
        let lengths: Vec<usize> = (0..5).map(|_| seen.recv().unwrap().len()).collect();
        assert_eq!(lengths, [5, line.len(), line.len(), line.len(), line.len()]);
        writer.0.flush(Duration::MAX / 4);
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
        assert_eq!(writer.0.dropped.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn the_end_waits_for_what_can_be_written_and_no_longer_than_it_may() {
        let (mut writer, allow, seen) = held();
        writer.write_all(b"stuck").unwrap();
        writer.0.flush(Duration::from_millis(1));
        assert!(seen.try_recv().is_err(), "nothing could be written, and nobody waits for it");
        allow.send(Ok(usize::MAX)).unwrap();
        writer.0.flush(Duration::MAX / 4);
        assert_eq!(seen.try_recv().unwrap(), "stuck");
    }
}
