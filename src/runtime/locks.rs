//! The locks over what one thread of the process does at a time: loading sessions, and recording runs.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Whether to wait for a lock that somebody else has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Locks {
    /// A model is being loaded: it has time.
    Wait,
    /// A model is being served: another time will do.
    Try,
}

impl Locks {
    /// The lock, or `None` if it is taken and nobody waits for it.
    pub(super) fn take(self, lock: &Mutex<()>) -> Option<MutexGuard<'_, ()>> {
        match self {
            Self::Wait => Some(lock.lock().unwrap_or_else(PoisonError::into_inner)),
            Self::Try => match lock.try_lock() {
                Ok(guard) => Some(guard),
                // There is nothing behind it that a panic could have left half done.
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_serves_does_not_wait_for_a_lock() {
        let lock = Mutex::new(());
        let held = Locks::Wait.take(&lock);
        assert!(held.is_some() && Locks::Try.take(&lock).is_none());
        drop(held);
        assert!(Locks::Try.take(&lock).is_some());
    }

    #[test]
    fn a_panic_of_its_holder_does_not_close_a_lock() {
        let lock = Mutex::new(());
        let panicked = std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = Locks::Wait.take(&lock);
                panic!("on purpose");
            });
            holder.join().is_err()
        });
        assert!(panicked && lock.is_poisoned());
        assert!(Locks::Try.take(&lock).is_some());
        assert!(Locks::Wait.take(&lock).is_some());
    }
}
