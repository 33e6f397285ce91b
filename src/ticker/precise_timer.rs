//! A timer that is exact to a tenth of a millisecond. Timers of the Tokio runtime are exact only to a millisecond.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::time::Sleep;

/// A timer that wakes one task at a time. Setting the timer again replaces the earlier time.
#[derive(Debug)]
pub struct PreciseTimer(Kind);

#[derive(Debug)]
enum Kind {
    #[cfg(target_os = "linux")]
    Kernel(linux::KernelTimer),
    /// A timer of the runtime, and its period.
    Runtime(Pin<Box<Sleep>>, Duration),
}

impl PreciseTimer {
    /// Creates a timer of the kernel, or a timer of the runtime if the system has no such kernel timer.
    ///
    /// # Panics
    ///
    /// Panics outside of a runtime with I/O and time.
    pub fn precise() -> PreciseTimer {
        #[cfg(target_os = "linux")]
        if let Ok(timer) = linux::KernelTimer::new() {
            return PreciseTimer(Kind::Kernel(timer));
        }
        PreciseTimer::from_runtime()
    }

    /// Creates a timer of the runtime. It follows the clock of the runtime, even if that clock is paused.
    ///
    /// # Panics
    ///
    /// Panics outside of a runtime with time.
    pub fn from_runtime() -> PreciseTimer {
        PreciseTimer(Kind::Runtime(Box::pin(tokio::time::sleep(Duration::ZERO)), Duration::ZERO))
    }

    /// Sets the first time at which [`PreciseTimer::poll`] is ready, and the period after which it is ready again. A
    /// period of zero is for a single wait.
    pub fn set_every(&mut self, now: Instant, first: Instant, period: Duration) {
        let wait = first.saturating_duration_since(now);
        match &mut self.0 {
            #[cfg(target_os = "linux")]
            Kind::Kernel(timer) => timer.set(wait, period),
            Kind::Runtime(sleep, every) => {
                sleep.set(tokio::time::sleep(wait));
                *every = period;
            }
        }
    }

    /// Waits until the time `at`. Cancel-safe.
    pub async fn until(&mut self, now: Instant, at: Instant) {
        self.set_every(now, at, Duration::ZERO);
        std::future::poll_fn(|context| self.poll(context)).await;
    }

    /// Returns `Ready` when the set time has come.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.0 {
            #[cfg(target_os = "linux")]
            Kind::Kernel(timer) => timer.poll(context),
            Kind::Runtime(sleep, period) => {
                ready!(sleep.as_mut().poll(context));
                let next = sleep.deadline() + *period;
                sleep.as_mut().reset(next);
                Poll::Ready(())
            }
        }
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::os::fd::OwnedFd;
    use std::task::{Context, Poll, ready};
    use std::time::Duration;

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
    };
    use tokio::io::unix::AsyncFd;

    #[derive(Debug)]
    pub(super) struct KernelTimer(AsyncFd<OwnedFd>);

    impl KernelTimer {
        #[expect(
            deprecated,
            reason = "the deprecation is about descriptors that change or are closed while they are watched; this one \
                      is owned here"
        )]
        pub(super) fn new() -> io::Result<KernelTimer> {
            let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
            Ok(KernelTimer(AsyncFd::new(timerfd_create(TimerfdClockId::Monotonic, flags)?)?))
        }

        pub(super) fn set(&mut self, wait: Duration, period: Duration) {
            // A wait of zero would disarm the timer.
            let wait = wait.max(Duration::from_nanos(1));
            let timespec = |time: Duration| Timespec {
                tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: time.subsec_nanos().into(),
            };
            let (it_value, it_interval) = (timespec(wait), timespec(period));
            timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &Itimerspec { it_interval, it_value })
                .expect("the kernel accepts every time in the future");
        }

        pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
            loop {
                // This fails only if the I/O driver of the runtime has ended. No event will come any more.
                let Ok(mut ready) = ready!(self.0.poll_read_ready(context)) else { return Poll::Ready(()) };
                // The read would block if the timer was set to another time after it fired.
                if ready.try_io(|timer| Ok(rustix::io::read(timer, &mut [0; 8])?)).is_ok() {
                    // The read took all expirations so far. A later expiration is a new event, which this call does
                    // not clear.
                    ready.clear_ready();
                    return Poll::Ready(());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_never_fires_early_and_can_be_set_again() {
        let mut timer = PreciseTimer::precise();
        for _ in 0..5 {
            let wanted = Instant::now() + Duration::from_micros(2_300);
            timer.set_every(wanted, wanted, Duration::ZERO);
            timer.until(Instant::now(), wanted).await;
            assert!(Instant::now() >= wanted);
        }
        let past = Instant::now();
        timer.until(Instant::now(), past).await;
    }

    #[tokio::test]
    async fn it_fires_every_period() {
        for mut timer in [PreciseTimer::precise(), PreciseTimer::from_runtime()] {
            let (start, period) = (Instant::now(), Duration::from_micros(700));
            timer.set_every(start, start + period, period);
            for _ in 0..3 {
                std::future::poll_fn(|context| timer.poll(context)).await;
            }
            // On a busy machine the timer may miss some periods, but it never fires early.
            assert!(start.elapsed() >= period * 3);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_timer_of_the_runtime_follows_its_clock() {
        let start = tokio::time::Instant::now();
        let at = start + Duration::from_secs(3_600);
        PreciseTimer::from_runtime().until(start.into_std(), at.into_std()).await;
        assert!(start.elapsed() >= Duration::from_secs(3_600));
    }
}
