//! The one place that reads the clock.

use crate::units::Instant;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A monotonic clock that starts at zero; cheap to copy.
///
/// It follows Tokio's clock, so a test with paused time sees virtual time; on a plain thread it is the system's.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: tokio::time::Instant,
    /// The time since 1970 at the origin.
    date: Duration,
}

impl Clock {
    /// A clock that reads zero now.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    pub fn start() -> Self {
        let date = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { origin: tokio::time::Instant::now(), date }
    }

    /// The time since the start.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    pub fn now(&self) -> Instant {
        Instant(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The time since 1970 at an instant, as the system's clock had it at the start: it does not follow when that is set.
    #[must_use]
    pub fn date(&self, at: Instant) -> Duration {
        self.date + Duration::from_nanos(at.0)
    }

    /// The time since 1970 at the start, as the system's clock has it now: it follows when that is set.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    pub fn origin(&self) -> Duration {
        let date = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        date.saturating_sub(self.now().since(Instant::default()))
    }

    /// The same instant on Tokio's clock, for its timers.
    #[must_use]
    pub fn to_tokio(&self, at: Instant) -> tokio::time::Instant {
        self.origin + Duration::from_nanos(at.0)
    }
}
