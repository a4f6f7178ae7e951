//! Loads over time.

use std::f64::consts::TAU;
use std::time::Duration;

/// How the load, and the memory that a neighbour leaves, go over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Workload {
    /// From 40% of the peak to 60% at once, half an hour later back.
    Step,
    /// From 10% of the peak to all of it within half an hour, and down again.
    Ramp,
    /// 30% of the peak, and twice that for a minute every ten minutes.
    Burst,
    /// A wave between 10% of the peak and all of it within two hours.
    Wave,
    /// The same within a day.
    Day,
    /// Half of the peak all the time; for 20 minutes a neighbour leaves every device an eighth of the memory that its largest
    /// batch needs.
    Squeeze,
    /// 10% of the peak, and five times as much at once, for half an hour.
    Surge,
    /// Half of the peak all the time, whose rows become twice as long within ten minutes: they take the device twice as long and the
    /// processors no longer than before. Half an hour after the first of them they are as they were.
    Lengthen,
}

impl Workload {
    /// All of them with their names.
    pub const ALL: [(&'static str, Self); 8] = [
        ("step", Self::Step),
        ("ramp", Self::Ramp),
        ("burst", Self::Burst),
        ("wave", Self::Wave),
        ("day", Self::Day),
        ("squeeze", Self::Squeeze),
        ("surge", Self::Surge),
        ("lengthen", Self::Lengthen),
    ];

    /// The loads that targets are chosen on.
    pub const TUNED: [Self; 4] = [Self::Step, Self::Ramp, Self::Burst, Self::Wave];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, other)| *other == self).map_or("", |(name, _)| name)
    }

    /// How long it is.
    #[must_use]
    pub fn length(self) -> Duration {
        let minutes = match self {
            Self::Step | Self::Burst | Self::Squeeze | Self::Surge | Self::Lengthen => 60,
            Self::Ramp => 90,
            Self::Wave => 120,
            Self::Day => 24 * 60,
        };
        Duration::from_secs(60 * minutes)
    }

    /// The part of the peak that comes at a time since the beginning.
    #[must_use]
    pub fn load(self, at: Duration) -> f64 {
        let minutes = at.as_secs_f64() / 60.0;
        let wave = |length: f64| 0.55 - 0.45 * (TAU * minutes / length).cos();
        match self {
            Self::Step => {
                if (15.0..45.0).contains(&minutes) {
                    0.6
                } else {
                    0.4
                }
            }
            Self::Ramp => 0.1 + 0.9 * (minutes / 30.0).min((90.0 - minutes) / 30.0).clamp(0.0, 1.0),
            Self::Burst => {
                if minutes % 10.0 >= 5.0 && minutes % 10.0 < 6.0 {
                    0.6
                } else {
                    0.3
                }
            }
            Self::Wave => wave(120.0),
            Self::Day => wave(24.0 * 60.0),
            Self::Surge => {
                if (15.0..45.0).contains(&minutes) {
                    0.5
                } else {
                    0.1
                }
            }
            Self::Squeeze | Self::Lengthen => 0.5,
        }
    }

    /// The part of the memory of the largest batch that a neighbour leaves at that time.
    #[must_use]
    pub fn memory(self, at: Duration) -> f64 {
        let squeezed = self == Self::Squeeze && (1200..2400).contains(&at.as_secs());
        if squeezed { 0.125 } else { 1.0 }
    }

    /// How long the rows are that come at that time: quarters beyond the usual length.
    #[must_use]
    pub fn quarters(self, at: Duration) -> u32 {
        match at.as_secs() {
            after @ 900..2700 if self == Self::Lengthen => ((after - 900) / 150 + 1).min(4) as u32,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_what_their_names_say() {
        for (workload, minute, load) in [
            (Workload::Step, 14, 0.4),
            (Workload::Step, 15, 0.6),
            (Workload::Step, 45, 0.4),
            (Workload::Ramp, 0, 0.1),
            (Workload::Ramp, 15, 0.55),
            (Workload::Ramp, 45, 1.0),
            (Workload::Ramp, 90, 0.1),
            (Workload::Burst, 4, 0.3),
            (Workload::Burst, 25, 0.6),
            (Workload::Burst, 26, 0.3),
            (Workload::Wave, 60, 1.0),
            (Workload::Day, 0, 0.1),
            (Workload::Day, 720, 1.0),
            (Workload::Squeeze, 30, 0.5),
            (Workload::Surge, 14, 0.1),
            (Workload::Surge, 44, 0.5),
            (Workload::Lengthen, 30, 0.5),
        ] {
            let found = workload.load(Duration::from_secs(60 * minute));
            assert!((found - load).abs() < 1e-9, "{workload:?} after {minute} minutes: {found}");
        }
        let quarters =
            [899, 900, 1049, 1050, 1350, 2699, 2700].map(|at| Workload::Lengthen.quarters(Duration::from_secs(at)));
        assert_eq!(quarters, [0, 1, 1, 2, 4, 4, 0]);
        for (name, workload) in Workload::ALL {
            assert_eq!(workload.name(), name);
            for second in 0..=workload.length().as_secs() {
                let at = Duration::from_secs(second);
                assert!((0.1..=1.0).contains(&workload.load(at)), "{name} at {second}");
                assert_eq!(workload.memory(at) < 1.0, name == "squeeze" && (1200..2400).contains(&second));
                assert_eq!(workload.quarters(at) > 0, name == "lengthen" && (900..2700).contains(&second));
            }
        }
    }
}
