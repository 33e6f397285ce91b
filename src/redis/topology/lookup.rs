//! Looks up the addresses of a host, without filling the pool of threads for blocking calls.
//!
//! A lookup that hangs keeps its thread, also after its caller has given up. Files that are read again need threads of
//! the same pool. So there is one lookup at a time for each host, which all its callers share, and a limit for all.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, LazyLock};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use tokio::task::spawn_blocking;

/// The maximum number of lookups at the same time. The pool of Tokio has 512 threads.
const MAX_LOOKUPS: usize = 128;

type Addresses = Result<Vec<IpAddr>, (io::ErrorKind, String)>;

/// The lookups that have begun and not ended, by host.
#[derive(Clone, Default)]
struct Lookups(Arc<Mutex<HashMap<String, Shared<BoxFuture<'static, Addresses>>>>>);

static LOOKUPS: LazyLock<Lookups> = LazyLock::new(Lookups::default);

/// Returns the addresses of a host.
pub(super) async fn addresses(host: &str) -> io::Result<Vec<IpAddr>> {
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    LOOKUPS
        .of(host, |host| Ok((host, 0).to_socket_addrs()?.map(|address: SocketAddr| address.ip()).collect()))
        .await
}

impl Lookups {
    /// Calls `resolve` on a thread for blocking calls, unless a lookup of this host is running. Returns its result.
    async fn of(
        &self,
        host: &str,
        resolve: impl FnOnce(&str) -> io::Result<Vec<IpAddr>> + Send + 'static,
    ) -> io::Result<Vec<IpAddr>> {
        let lookup = {
            let mut running = self.0.lock();
            match running.get(host) {
                Some(lookup) => lookup.clone(),
                None if running.len() >= MAX_LOOKUPS => {
                    let text = format!(
                        "{MAX_LOOKUPS} lookups of host names have no answer yet: does the DNS server answer?"
                    );
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
                }
                None => {
                    let (host, lookups) = (host.to_owned(), self.clone());
                    let name = host.clone();
                    let task = spawn_blocking(move || {
                        let _running = Running { lookups, host: &host };
                        resolve(&host).map_err(|error| (error.kind(), error.to_string()))
                    });
                    let lookup = task
                        .map(|ended| {
                            ended.unwrap_or_else(|error| Err((io::ErrorKind::Interrupted, error.to_string())))
                        })
                        .boxed()
                        .shared();
                    running.insert(name, lookup.clone());
                    lookup
                }
            }
        };
        lookup.await.map_err(|(kind, text)| {
            if kind == io::ErrorKind::Interrupted {
                // The runtime ended before the lookup began.
                self.0.lock().remove(host);
            }
            io::Error::new(kind, text)
        })
    }
}

/// A running lookup. When it ends, the next caller begins a new one.
struct Running<'a> {
    lookups: Lookups,
    host: &'a str,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.lookups.0.lock().remove(self.host);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn a_host_has_one_lookup_at_a_time_and_all_together_have_a_limit() {
        let (lookups, begun) = (Lookups::default(), Arc::new(AtomicUsize::new(0)));
        let mut ends = Vec::new();
        for number in 0..MAX_LOOKUPS {
            let (end, ended) = channel::<()>();
            let (host, begun) = (format!("host-{number}"), Arc::clone(&begun));
            let hanging = lookups.of(&host, move |_| {
                begun.fetch_add(1, Ordering::SeqCst);
                let _ = ended.recv();
                Ok(vec![IpAddr::from([10, 0, 0, 1])])
            });
            assert!(hanging.now_or_never().is_none(), "the caller gives up, and the lookup goes on");
            ends.push(end);
        }
        let second = |host| lookups.of(host, |_| panic!("a second lookup of this host"));
        for _ in 0..1_000 {
            assert!(second("host-7").now_or_never().is_none());
        }
        let refused = second("another").await.unwrap_err();
        assert!(refused.to_string().contains("128 lookups"), "{refused}");
        let mut waiting = Box::pin(second("host-7"));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(ends);
        assert_eq!(waiting.await.unwrap(), [IpAddr::from([10, 0, 0, 1])], "callers share the result");
        let free = || async {
            while !lookups.0.lock().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        free().await;
        assert_eq!(begun.load(Ordering::SeqCst), MAX_LOOKUPS);
        let again = lookups.of("host-7", |_| Ok(Vec::new())).await.unwrap();
        assert!(again.is_empty(), "a lookup that has ended is not used again");
    }
}
