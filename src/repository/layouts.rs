//! How a model uses the cores: which layouts there are, and which one is better. Pure.

use crate::model::Settings;
use crate::runtime::Calibration;
use crate::runtime::calibrate::Measured;

/// More instances than one must be this much faster, since each holds the weights once more.
const INSTANCES_MUST_GAIN: f64 = 1.05;

/// How a model uses the cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Sessions, each with a thread of its own.
    pub instances: usize,
    /// Threads that compute one run.
    pub threads: usize,
}

/// The layouts to choose from, the preferred one first.
pub(super) fn layouts(settings: &Settings, cores: usize) -> Vec<Layout> {
    let whole = |value: Option<std::num::NonZeroU32>| value.map(|value| value.get() as usize);
    match (whole(settings.instances), whole(settings.intra_op_threads)) {
        (Some(instances), Some(threads)) => vec![Layout { instances, threads }],
        (Some(instances), None) => vec![Layout { instances, threads: (cores / instances).max(1) }],
        (None, Some(threads)) => vec![Layout { instances: (cores / threads).max(1), threads }],
        (None, None) => {
            let mut layouts = vec![Layout { instances: 1, threads: cores }];
            let mut instances = 2;
            while instances <= cores {
                layouts.push(Layout { instances, threads: cores / instances });
                instances *= 2;
            }
            layouts
        }
    }
}

/// The measured size with the most rows per second.
pub(super) fn best(calibration: &Calibration) -> Option<&Measured> {
    let rate = |entry: &Measured| f64::from(entry.rows) / entry.duration.as_secs_f64().max(1e-9);
    calibration.measured.iter().max_by(|a, b| rate(a).total_cmp(&rate(b)))
}

/// Rows per second of all instances together at the best batch size; zero if unknown.
pub(super) fn rate(layout: Layout, calibration: &Calibration) -> f64 {
    let best = best(calibration).map_or(0.0, |best| f64::from(best.rows) / best.duration.as_secs_f64().max(1e-9));
    layout.instances as f64 * best
}

/// Whether a layout with more instances pays, by rows per second.
pub(super) fn pays(more: f64, fewer: f64) -> bool {
    more > INSTANCES_MUST_GAIN * fewer
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    #[test]
    fn what_is_configured_leaves_nothing_to_choose() {
        let settings = |instances, threads| Settings {
            instances: NonZeroU32::new(instances),
            intra_op_threads: NonZeroU32::new(threads),
            ..Settings::default()
        };
        assert_eq!(layouts(&settings(3, 2), 8), [Layout { instances: 3, threads: 2 }]);
        assert_eq!(layouts(&settings(3, 0), 8), [Layout { instances: 3, threads: 2 }]);
        assert_eq!(layouts(&settings(0, 16), 8), [Layout { instances: 1, threads: 16 }]);
        let open: Vec<(usize, usize)> = layouts(&settings(0, 0), 4).iter().map(|l| (l.instances, l.threads)).collect();
        assert_eq!(open, [(1, 4), (2, 2), (4, 1)]);
        assert_eq!(layouts(&settings(0, 0), 1), [Layout { instances: 1, threads: 1 }]);
    }
}
