//! How a model uses the cores: which layouts there are, and which one is better. Pure.

use crate::model::Settings;
use crate::model::settings::{MOST_INSTANCES, MOST_THREADS};
use crate::runtime::Calibration;
use crate::runtime::calibrate::Measured;
use crate::units::Rows;
use serde::{Deserialize, Serialize};

/// More instances than one must be this much faster, since each holds the weights once more.
const INSTANCES_MUST_GAIN: f64 = 1.05;

/// Layouts are compared with so many rows in flight, however many instances share them: about what a busy model has. With
/// more, a layout could win by batches that its clients never fill.
const ROWS_IN_FLIGHT: Rows = 32;

/// Rounds of a contest.
const ROUNDS: usize = 9;
/// If one layout is so many times as fast as the other when they are first measured, there is no contest.
const CLEAR: f64 = 2.0;

/// How a model uses the cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Sessions, each with a thread of its own.
    pub instances: usize,
    /// Threads that compute one run.
    pub threads: usize,
}

/// The layouts to choose from, the preferred one first.
pub(super) fn layouts(settings: &Settings, cores: usize) -> Vec<Layout> {
    let whole = |value: Option<std::num::NonZeroU32>| value.map(|value| value.get() as usize);
    let (most_instances, most_threads) = (MOST_INSTANCES as usize, MOST_THREADS as usize);
    match (whole(settings.instances), whole(settings.intra_op_threads)) {
        (Some(instances), Some(threads)) => vec![Layout { instances, threads }],
        (Some(instances), None) => vec![Layout { instances, threads: (cores / instances).clamp(1, most_threads) }],
        (None, Some(threads)) => vec![Layout { instances: (cores / threads).clamp(1, most_instances), threads }],
        (None, None) => {
            let mut layouts = vec![Layout { instances: 1, threads: cores.min(most_threads) }];
            let mut instances = 2;
            while instances <= cores.min(most_instances) {
                layouts.push(Layout { instances, threads: (cores / instances).min(most_threads) });
                instances *= 2;
            }
            layouts
        }
    }
}

/// The measured size with the most rows per second, among those that each of these instances may have while layouts are compared.
pub(super) fn best(layout: Layout, calibration: &Calibration) -> Option<&Measured> {
    let most = (ROWS_IN_FLIGHT / Rows::try_from(layout.instances).unwrap_or(Rows::MAX)).max(1);
    let rate = |entry: &Measured| f64::from(entry.rows) / entry.duration.as_secs_f64().max(1e-9);
    calibration.measured.iter().filter(|entry| entry.rows <= most).max_by(|a, b| rate(a).total_cmp(&rate(b)))
}

/// Rows per second of all instances together at that size; zero if unknown.
pub(super) fn rate(layout: Layout, calibration: &Calibration) -> f64 {
    let best =
        best(layout, calibration).map_or(0.0, |best| f64::from(best.rows) / best.duration.as_secs_f64().max(1e-9));
    layout.instances as f64 * best
}

/// Whether a layout with more instances pays. One measurement of each does not tell on a machine that has other things to
/// do; both run in turn, a few rounds, and the median of the rounds' ratios decides: what slows a whole round down
/// slows both, and what slows one of them down is an outlier.
#[derive(Clone, Debug)]
pub(super) struct Contest {
    /// More over fewer instances, by what was measured first.
    first: f64,
    /// The same for each round.
    rounds: Vec<f64>,
}

impl Contest {
    /// The rows per second of both when they were first measured.
    pub(super) fn new(more: f64, fewer: f64) -> Self {
        Self { first: ratio(more, fewer), rounds: Vec::new() }
    }

    /// Whether another round is needed.
    pub(super) fn is_open(&self) -> bool {
        self.rounds.len() < ROUNDS && self.first < CLEAR && self.first > 1.0 / CLEAR
    }

    /// Whether the layout with more instances runs first in the next round: in turn, so that neither always runs on what
    /// the other has left in the caches.
    pub(super) fn more_goes_first(&self) -> bool {
        self.rounds.len() % 2 == 1
    }

    /// The rows per second of both in one more round.
    pub(super) fn add(&mut self, more: f64, fewer: f64) {
        self.rounds.push(ratio(more, fewer));
    }

    /// Whether more instances pay.
    pub(super) fn more_pays(&self) -> bool {
        let mut rounds = self.rounds.clone();
        rounds.sort_by(f64::total_cmp);
        // Of an even number the lower of the middle two: the weights once more must be worth it.
        let median = rounds.get(rounds.len().saturating_sub(1) / 2).copied();
        median.unwrap_or(self.first) > INSTANCES_MUST_GAIN
    }
}

fn ratio(more: f64, fewer: f64) -> f64 {
    more / fewer.max(1e-9)
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

    #[test]
    fn no_layout_is_beyond_what_settings_may_say_however_many_cores_there_are() {
        let settings = |instances: usize, threads: usize| {
            let text = format!("instances = {instances}\nintra_op_threads = {threads}");
            Settings::from_toml(&text, "model.toml", &Settings::default_keys())
        };
        for cores in [1, 64, 65, 128, 192, 2048, 100_000] {
            let fixed = |instances, threads| Settings {
                instances: NonZeroU32::new(instances),
                intra_op_threads: NonZeroU32::new(threads),
                ..Settings::default()
            };
            for given in [fixed(0, 0), fixed(0, 1), fixed(1, 0)] {
                for Layout { instances, threads } in layouts(&given, cores) {
                    assert!(settings(instances, threads).is_ok(), "{cores}: {instances} with {threads}");
                }
            }
        }
    }

    #[test]
    fn the_median_of_the_rounds_decides_and_a_clear_case_needs_none() {
        let table = [
            (2.0, &[][..], true, false),
            (0.5, &[][..], false, false),
            (1.5, &[][..], true, true),
            (1.0, &[][..], false, true),
            (1.9, &[1.0, 1.0, 1.9][..], false, true),
            (0.6, &[1.3, 0.2, 1.3, 1.2, 9.0][..], true, true),
            (0.6, &[1.0, 0.2, 1.3, 1.2, 9.0, 1.1, 1.1, 1.1, 1.0][..], true, false),
            (1.5, &[1.04, 1.06][..], false, true),
            (1.5, &[1.06, 1.07][..], true, true),
        ];
        for (first, rounds, pays, open) in table {
            let mut contest = Contest::new(first * 100.0, 100.0);
            rounds.iter().for_each(|ratio| contest.add(ratio * 50.0, 50.0));
            assert_eq!((contest.more_pays(), contest.is_open()), (pays, open), "{first} {rounds:?}");
        }
        assert!(Contest::new(5.0, 0.0).more_pays(), "the other does not run");
        let order = Contest::new(1.0, 1.0);
        assert!(!order.more_goes_first() && Contest { rounds: vec![1.0], ..order }.more_goes_first());
    }
}
