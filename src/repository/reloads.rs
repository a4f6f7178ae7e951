//! When a model that has lost instances is loaded again. Pure: the time comes in.

use crate::units::Instant;
use std::time::Duration;

/// The first loss is made good at once, the next one after this time, and each further one after twice the time before.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// But never later than this: what took a device away may pass, and nobody else would load the model again.
const LONGEST_WAIT: Duration = Duration::from_secs(300);
/// A loss after so long without one has nothing to do with those before it.
const CALM: Duration = Duration::from_secs(600);

/// The reloads of one version.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Reloads {
    /// Those since the last calm.
    count: u32,
    /// When the last one ended.
    last: Option<Instant>,
    due: Option<Instant>,
}

impl Reloads {
    /// Instances were lost. Answers when to load the version again.
    pub(super) fn lost(&mut self, now: Instant) -> Instant {
        if self.last.is_some_and(|last| now.since(last) >= CALM) {
            self.count = 0;
        }
        *self.due.get_or_insert(now + wait(self.count))
    }

    /// When the version is to be loaded again, if it is.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// It is being loaded.
    pub(super) fn begin(&mut self) {
        (self.count, self.due) = (self.count.saturating_add(1), None);
    }

    /// It has been loaded. If it was not to be had, it is due again later.
    pub(super) fn end(&mut self, now: Instant, loaded: bool) {
        self.last = Some(now);
        if !loaded {
            self.lost(now);
        }
    }
}

fn wait(count: u32) -> Duration {
    let doubled = |times: u32| FIRST_WAIT.saturating_mul(2_u32.saturating_pow(times));
    count.checked_sub(1).map_or(Duration::ZERO, |times| doubled(times).min(LONGEST_WAIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds from a loss at this time to the reload.
    fn wait_from(reloads: &mut Reloads, now: Instant) -> u64 {
        reloads.lost(now).since(now).as_secs()
    }

    #[test]
    fn each_reload_waits_twice_as_long_as_the_one_before_until_there_is_a_calm() {
        let (mut reloads, mut now, mut waits) = (Reloads::default(), Instant(0), Vec::new());
        for _ in 0..12 {
            waits.push(wait_from(&mut reloads, now));
            assert_eq!(reloads.lost(now + FIRST_WAIT), reloads.due().unwrap(), "another loss puts nothing off");
            now = reloads.due().unwrap();
            reloads.begin();
            assert_eq!(reloads.due(), None);
            reloads.end(now, true);
        }
        assert_eq!(waits, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(wait_from(&mut reloads.clone(), now + (CALM - FIRST_WAIT)), 300);
        assert_eq!(wait_from(&mut reloads, now + CALM), 0);
    }

    #[test]
    fn what_could_not_be_loaded_is_due_again_however_long_it_took() {
        let (mut reloads, mut now) = (Reloads::default(), Instant(0));
        reloads.lost(now);
        let waits = [(); 4].map(|()| {
            reloads.begin();
            now = now + CALM * 2;
            reloads.end(now, false);
            reloads.due().unwrap().since(now).as_secs()
        });
        assert_eq!(waits, [1, 2, 4, 8]);
    }
}
