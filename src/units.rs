//! Small value types with one meaning each: bytes, instants, identifiers.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A number of rows (batch elements).
pub type Rows = u32;

/// A size in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// No bytes.
    pub const ZERO: Self = Self(0);
    /// More than any device has.
    pub const MAX: Self = Self(u64::MAX);

    /// The difference, never below zero.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Add for ByteSize {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for ByteSize {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.1} {}", UNITS[unit])
    }
}

/// A point in time: nanoseconds since the process (or the simulation) began.
///
/// Pure code receives it as an argument; one place reads the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// The time that has passed since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;
    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(/// One request inside the server; never reused.
    RequestId(u64));
id!(/// One dispatched batch; never reused.
    BatchId(u64));
id!(/// One loaded version of a model; never reused.
    ModelId(u32));
id!(/// One instance (worker thread with its session) of a model.
    InstanceId(u32));
id!(/// One combination of non-batch dimensions of a model's inputs; only rows of one class share a batch.
    ClassId(u32));
id!(/// Classes of a model that differ only in a dimension that may be padded: their rows may share a batch.
    FamilyId(u32));
id!(/// One device: the host, or a GPU.
    DeviceId(u32));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_print_with_binary_units() {
        assert_eq!(ByteSize(0).to_string(), "0 B");
        assert_eq!(ByteSize(1023).to_string(), "1023 B");
        assert_eq!(ByteSize(1536).to_string(), "1.5 KiB");
        assert_eq!(ByteSize(3 << 30).to_string(), "3.0 GiB");
    }

    #[test]
    fn instants_saturate() {
        assert_eq!(Instant(5).since(Instant(9)), Duration::ZERO);
        assert_eq!(Instant(u64::MAX) + Duration::from_secs(1), Instant(u64::MAX));
        assert_eq!(Instant(5) - Duration::from_secs(1), Instant(0));
    }
}
