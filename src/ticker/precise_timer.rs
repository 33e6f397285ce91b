//! A sleep that ends on time: to a tenth of a millisecond, where the runtime's own timers count in whole ones.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::time::Sleep;

/// Wakes one task at a time. Setting it again replaces the time that was set before.
#[derive(Debug)]
pub struct PreciseTimer(Kind);

#[derive(Debug)]
enum Kind {
    #[cfg(target_os = "linux")]
    Kernel(linux::Timer),
    Runtime(Pin<Box<Sleep>>),
}

impl PreciseTimer {
    /// An alarm of the kernel's, where it has one.
    ///
    /// # Panics
    ///
    /// Outside of a runtime with I/O and time.
    #[must_use]
    pub fn precise() -> PreciseTimer {
        #[cfg(target_os = "linux")]
        if let Ok(timer) = linux::Timer::new() {
            return PreciseTimer(Kind::Kernel(timer));
        }
        PreciseTimer::of_the_runtime()
    }

    /// An alarm that follows the runtime's clock, a paused one too.
    ///
    /// # Panics
    ///
    /// Outside of a runtime with time.
    #[must_use]
    pub fn of_the_runtime() -> PreciseTimer {
        PreciseTimer(Kind::Runtime(Box::pin(tokio::time::sleep(Duration::ZERO))))
    }

    /// Sets the time at which [`PreciseTimer::poll`] is ready.
    pub fn set(&mut self, now: Instant, at: Instant) {
        let wait = at.saturating_duration_since(now);
        match &mut self.0 {
            #[cfg(target_os = "linux")]
            Kind::Kernel(timer) => timer.set(wait, Duration::ZERO),
            Kind::Runtime(sleep) => sleep.set(tokio::time::sleep(wait)),
        }
    }

    /// Sets the first of many times at which [`PreciseTimer::poll`] is ready, each a `period` after the last. An alarm of the
    /// runtime knows only the first: whoever is woken sets it again.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "the runtime's alarm rings once"))]
    pub fn set_every(&mut self, now: Instant, first: Instant, period: Duration) {
        let wait = first.saturating_duration_since(now);
        match &mut self.0 {
            #[cfg(target_os = "linux")]
            Kind::Kernel(timer) => timer.set(wait, period),
            Kind::Runtime(sleep) => sleep.set(tokio::time::sleep(wait)),
        }
    }

    /// Whether [`PreciseTimer::set_every`] need not be repeated.
    #[must_use]
    pub const fn repeats(&self) -> bool {
        !matches!(self.0, Kind::Runtime(_))
    }

    /// Waits until then. Cancel-safe.
    pub async fn until(&mut self, now: Instant, at: Instant) {
        self.set(now, at);
        std::future::poll_fn(|context| self.poll(context)).await;
    }

    /// Ready once the time that was set has come.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.0 {
            #[cfg(target_os = "linux")]
            Kind::Kernel(timer) => timer.poll(context),
            Kind::Runtime(sleep) => sleep.as_mut().poll(context),
        }
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::os::fd::OwnedFd;
    use std::task::ready;

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
    };
    use tokio::io::unix::AsyncFd;

    use super::{Context, Duration, Poll};

    #[derive(Debug)]
    pub(super) struct Timer(AsyncFd<OwnedFd>);

    impl Timer {
        #[expect(
            deprecated,
            reason = "what is wrong with it are descriptors that change or are closed while it watches them: this one \
                      is owned here, and nobody else has it"
        )]
        pub(super) fn new() -> io::Result<Timer> {
            let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
            Ok(Timer(AsyncFd::new(timerfd_create(TimerfdClockId::Monotonic, flags)?)?))
        }

        pub(super) fn set(&mut self, wait: Duration, period: Duration) {
            // A time of nothing would disarm it.
            let wait = wait.max(Duration::from_nanos(1));
            let timespec = |time: Duration| Timespec {
                tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: time.subsec_nanos().into(),
            };
            let (it_value, it_interval) = (timespec(wait), timespec(period));
            timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &Itimerspec { it_interval, it_value })
                .expect("a timer of ours takes every time to come");
        }

        pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
            loop {
                // The runtime's I/O ends with it: then nothing is waited for any more.
                let Ok(mut ready) = ready!(self.0.poll_read_ready(context)) else { return Poll::Ready(()) };
                let mut expirations = [0; 8];
                match ready.try_io(|timer| Ok(rustix::io::read(timer, &mut expirations)?)) {
                    Ok(_) => {
                        // A read takes all that it rang, so the next would block. What rings from here on is a new
                        // event, and that is not cleared.
                        ready.clear_ready();
                        return Poll::Ready(());
                    }
                    // It was set again since it rang.
                    Err(_would_block) => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_never_rings_early_and_can_be_set_again() {
        let mut timer = PreciseTimer::precise();
        for _ in 0..5 {
            let wanted = Instant::now() + Duration::from_micros(2_300);
            timer.set(wanted, wanted);
            timer.until(Instant::now(), wanted).await;
            assert!(Instant::now() >= wanted);
        }
        let long_gone = Instant::now();
        timer.until(Instant::now(), long_gone).await;
    }

    #[tokio::test]
    async fn it_rings_every_period() {
        let (mut timer, start, period) = (PreciseTimer::precise(), Instant::now(), Duration::from_micros(700));
        timer.set_every(start, start + period, period);
        if timer.repeats() {
            for _ in 0..3 {
                std::future::poll_fn(|context| timer.poll(context)).await;
            }
            // A machine that was busy may have missed some, but none comes early.
            assert!(start.elapsed() >= period * 3);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn that_of_the_runtime_follows_its_clock() {
        let start = tokio::time::Instant::now();
        let at = start + Duration::from_secs(3_600);
        PreciseTimer::of_the_runtime().until(start.into_std(), at.into_std()).await;
        assert!(start.elapsed() >= Duration::from_secs(3_600));
    }
}
