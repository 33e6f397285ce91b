//! In which sockets bytes wait to be read: the kernel is asked once for all of them.

use std::os::fd::BorrowedFd;

/// Sockets, each known by a number. One that is closed is forgotten by itself.
#[derive(Debug)]
pub(super) struct Arrivals {
    #[cfg(target_os = "linux")]
    epoll: Option<linux::Epoll>,
}

impl Arrivals {
    pub(super) fn new() -> Arrivals {
        Arrivals {
            #[cfg(target_os = "linux")]
            epoll: linux::Epoll::new().ok(),
        }
    }

    /// Watches a socket from here on; whether that can be done.
    #[cfg_attr(
        not(target_os = "linux"),
        expect(unused_variables, clippy::unused_self, reason = "nobody is there to be asked")
    )]
    pub(super) fn watch(&self, socket: BorrowedFd<'_>, number: u64) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(epoll) = &self.epoll {
            return epoll.watch(socket, number).is_ok();
        }
        false
    }

    /// The numbers of the sockets in which something waits at this moment, the end of a stream too. Numbers of sockets
    /// that nobody reads any more, but are not closed yet, may be among them.
    #[cfg_attr(not(target_os = "linux"), expect(clippy::unused_self, reason = "nobody is there to be asked"))]
    pub(super) fn waiting(&self) -> Waiting {
        #[cfg(target_os = "linux")]
        if let Some(epoll) = &self.epoll {
            return epoll.waiting().map_or(Waiting::Unknown, Waiting::In);
        }
        Waiting::Unknown
    }
}

/// In which sockets something waits.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "nobody is there to be asked"))]
    In(Vec<u64>),
    /// The kernel does not say; it may be any of them.
    Unknown,
}

#[cfg(target_os = "linux")]
mod linux {
    use std::os::fd::OwnedFd;

    use rustix::buffer::spare_capacity;
    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    use rustix::io::{Errno, Result};
    use rustix::time::Timespec;

    use super::BorrowedFd;

    /// Room for so many at first.
    const ROOM: usize = 64;

    const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

    #[derive(Debug)]
    pub(super) struct Epoll(OwnedFd);

    impl Epoll {
        pub(super) fn new() -> Result<Epoll> {
            epoll::create(CreateFlags::CLOEXEC).map(Epoll)
        }

        pub(super) fn watch(&self, socket: BorrowedFd<'_>, number: u64) -> Result<()> {
            epoll::add(&self.0, socket, EventData::new_u64(number), EventFlags::IN | EventFlags::RDHUP)
        }

        /// Whatever is ready is told each time, until it was read. So where there was no room for all, it is asked again.
        pub(super) fn waiting(&self) -> Result<Vec<u64>> {
            let mut events = Vec::with_capacity(ROOM);
            loop {
                match epoll::wait(&self.0, spare_capacity(&mut events), Some(&AT_ONCE)) {
                    Ok(_) if events.len() < events.capacity() => {
                        return Ok(events.iter().map(|event| event.data.u64()).collect());
                    }
                    Ok(_) => {
                        let more = 4 * events.capacity();
                        events.clear();
                        events.reserve(more);
                    }
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno),
                }
            }
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_waits_is_told_until_it_is_read_or_closed() {
        let arrivals = Arrivals::new();
        let told = || match arrivals.waiting() {
            Waiting::In(mut numbers) => {
                numbers.sort_unstable();
                numbers
            }
            Waiting::Unknown => panic!("Linux knows"),
        };
        let mut pairs: Vec<(UnixStream, UnixStream)> = (0..150).map(|_| UnixStream::pair().unwrap()).collect();
        for (number, (ours, _)) in (0..).zip(&pairs) {
            assert!(arrivals.watch(ours.as_fd(), number));
        }
        assert_eq!(told(), [0_u64; 0]);

        for (_, theirs) in &mut pairs {
            theirs.write_all(b"x").unwrap();
        }
        let all: Vec<u64> = (0..150).collect();
        assert_eq!(told(), all, "more than there is room for at first");
        assert_eq!(told(), all, "and again, for none was read");
        for (ours, _) in &mut pairs[1..] {
            ours.read_exact(&mut [0]).unwrap();
        }
        assert_eq!(told(), [0]);

        let (ours, theirs) = pairs.swap_remove(7);
        drop(theirs);
        assert_eq!(told(), [0, 7], "the end of a stream is to be read too");
        drop(ours);
        assert_eq!(told(), [0], "what is closed is forgotten");
    }
}
