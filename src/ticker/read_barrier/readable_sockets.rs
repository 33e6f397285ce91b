//! Asks the kernel, with one call for many sockets, which of them have bytes to read.

use std::collections::HashSet;
use std::os::fd::{BorrowedFd, OwnedFd};

#[cfg(target_os = "linux")]
use rustix::{
    buffer::spare_capacity,
    event::epoll::{self, CreateFlags, EventData, EventFlags},
    io::Errno,
    time::Timespec,
};

/// The number of sockets that fit into the first answer of the kernel.
#[cfg(target_os = "linux")]
const ROOM: usize = 64;

/// The watched sockets, each with a number. The kernel stops watching a socket that is closed.
#[derive(Debug)]
pub(super) struct ReadableSockets(Option<OwnedFd>);

#[cfg(target_os = "linux")]
impl ReadableSockets {
    pub(super) fn new() -> ReadableSockets {
        ReadableSockets(epoll::create(CreateFlags::CLOEXEC).ok())
    }

    /// Watches a socket from now on. Returns whether that is possible.
    pub(super) fn watch(&self, socket: BorrowedFd<'_>, number: u64) -> bool {
        let (number, events) = (EventData::new_u64(number), EventFlags::IN | EventFlags::RDHUP);
        self.0.as_ref().is_some_and(|epoll| epoll::add(epoll, socket, number, events).is_ok())
    }

    /// Returns the numbers of the sockets in which bytes or the end of the stream wait at this moment. Some may be
    /// sockets that no member reads any more but that are not closed yet. Returns `None` if the kernel cannot report
    /// them.
    pub(super) fn waiting(&self) -> Option<HashSet<u64>> {
        let epoll = self.0.as_ref()?;
        let mut events = Vec::with_capacity(ROOM);
        loop {
            match epoll::wait(epoll, spare_capacity(&mut events), Some(&Timespec::default())) {
                Ok(_) if events.len() < events.capacity() => {
                    return Some(events.iter().map(|event| event.data.u64()).collect());
                }
                // The kernel reports a socket until it is read, so a second call with more room reports all sockets.
                Ok(_) => {
                    let more = 4 * events.capacity();
                    events.clear();
                    events.reserve(more);
                }
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }
}

/// A substitute for systems without epoll. It watches no socket, so all connections are asked in every round.
#[cfg(not(target_os = "linux"))]
#[expect(clippy::unused_self, reason = "the interface is that of Linux")]
impl ReadableSockets {
    pub(super) fn new() -> ReadableSockets {
        ReadableSockets(None)
    }

    pub(super) fn watch(&self, _socket: BorrowedFd<'_>, _number: u64) -> bool {
        false
    }

    pub(super) fn waiting(&self) -> Option<HashSet<u64>> {
        None
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_is_reported_until_it_is_read_or_closed() {
        let sockets = ReadableSockets::new();
        let waiting = || {
            let mut numbers: Vec<u64> = sockets.waiting().expect("Linux reports them").into_iter().collect();
            numbers.sort_unstable();
            numbers
        };
        let mut pairs: Vec<(UnixStream, UnixStream)> = (0..150).map(|_| UnixStream::pair().unwrap()).collect();
        for (number, (ours, _)) in (0..).zip(&pairs) {
            assert!(sockets.watch(ours.as_fd(), number));
        }
        assert_eq!(waiting(), [0_u64; 0]);

        for (_, theirs) in &mut pairs {
            theirs.write_all(b"x").unwrap();
        }
        let all: Vec<u64> = (0..150).collect();
        assert_eq!(waiting(), all, "more than there is room for at first");
        assert_eq!(waiting(), all, "and again, since none was read");
        for (ours, _) in &mut pairs[1..] {
            ours.read_exact(&mut [0]).unwrap();
        }
        assert_eq!(waiting(), [0]);

        let (ours, theirs) = pairs.swap_remove(7);
        drop(theirs);
        assert_eq!(waiting(), [0, 7], "the end of a stream must be read too");
        drop(ours);
        assert_eq!(waiting(), [0], "a closed socket is forgotten");
    }
}
