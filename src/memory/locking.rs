//! Locks that are held for some microseconds, between threads that have a processor each.

use std::hint::spin_loop;

use parking_lot::{Mutex, MutexGuard};

/// Looks at a lock before the thread gives up its processor for it: about thirty microseconds on the processors that it
/// was measured on, longer than a usual burst holds a shard, or a step of the ticker where few messages are of its tick.
/// Where there is one processor only, they are lost.
const LOOKS: usize = 128;

/// Pauses of the processor between two looks.
const PAUSES: usize = 8;

/// Locks, and waits for it without the system's help first. A thread that sleeps is woken much later than the lock is
/// free, and one that yields has its turn again only when others have had theirs.
pub(super) fn lock_soon<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    for _ in 0..LOOKS {
        if let Some(guard) = mutex.try_lock() {
            return guard;
        }
        pause();
    }
    mutex.lock()
}

/// Leaves a moment between two locks, in which another thread that looks at it can have it.
pub(super) fn give_way() {
    pause();
    pause();
}

fn pause() {
    for _ in 0..PAUSES {
        spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_lock_is_waited_for_when_it_is_held_for_longer_than_all_looks_take() {
        let mutex = Mutex::new(0);
        let guard = mutex.lock();
        thread::scope(|scope| {
            let (sender, asked) = mpsc::channel();
            let mutex = &mutex;
            let waiting = scope.spawn(move || {
                sender.send(()).unwrap();
                *lock_soon(mutex)
            });
            asked.recv().unwrap();
            // As long as all looks take, and more.
            (0..2 * LOOKS).for_each(|_| pause());
            let mut guard = guard;
            *guard = 7;
            drop(guard);
            assert_eq!(waiting.join().unwrap(), 7);
        });
    }
}
