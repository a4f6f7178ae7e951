//! The one place that reads the clock.

use crate::units::Instant;

/// A monotonic clock that starts at zero; cheap to copy.
///
/// It follows Tokio's clock, so a test with paused time sees virtual time; on a plain thread it is the system's.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: tokio::time::Instant,
}

impl Clock {
    /// A clock that reads zero now.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    pub fn start() -> Self {
        Self { origin: tokio::time::Instant::now() }
    }

    /// The time since the start.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "this is the one place")]
    pub fn now(&self) -> Instant {
        Instant(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The same instant on Tokio's clock, for its timers.
    #[must_use]
    pub fn to_tokio(&self, at: Instant) -> tokio::time::Instant {
        self.origin + std::time::Duration::from_nanos(at.0)
    }
}
