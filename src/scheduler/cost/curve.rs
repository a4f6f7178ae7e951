//! A piecewise-linear function of rows through measured points.

use crate::units::Rows;

/// The weight of a new sample against what was known.
const SAMPLE_WEIGHT: f64 = 0.2;
/// A sample counts at most as this many times what was known. From there on it is held to be a hiccup of the machine, such as a
/// process that was stopped for a while, which says nothing of what runs cost.
const OUTLIER: f64 = 4.0;
/// So many such samples in a row are none: all runs that were in flight may have had the same hiccup.
const HICCUPS: u32 = 4;

/// The least part of what a sample says that is held to be of its size alone, and not of the machine.
const LEAST_OWN: f64 = 0.05;

/// What is assumed below the only point that is known.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    /// The same as at the point: right for seconds, where fixed costs rule small batches.
    Constant,
    /// In proportion to rows: right for bytes.
    Proportional,
}

#[derive(Clone, Copy, Debug)]
struct Knot {
    rows: Rows,
    value: f64,
    samples: u32,
}

/// Known points, at most one per batch size, and straight lines between and beyond them.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    origin: Origin,
    knots: Vec<Knot>,
    /// Samples at once that were far beyond what was known.
    hiccups: u32,
}

impl Curve {
    /// A curve that knows nothing.
    pub(super) fn new(origin: Origin) -> Self {
        Self { origin, knots: Vec::new(), hiccups: 0 }
    }

    /// The number of points known.
    pub(super) fn len(&self) -> usize {
        self.knots.len()
    }

    /// The largest batch size known.
    pub(super) fn last_rows(&self) -> Option<Rows> {
        self.knots.last().map(|knot| knot.rows)
    }

    /// Takes a sample into a running estimate.
    ///
    /// A machine is slower at times, for all sizes alike: neighbours, clocks, other instances that are busy too. So what a sample of
    /// a well-known size says moves the whole curve; that of a little-known one says more of how sizes compare, and moves its own
    /// point. Otherwise the size that runs under load would look bad beside sizes that ran when there was none, and each of them
    /// would be tried in turn. (Each sample moves its own point the most, so sizes that never run cannot drift away: the moves of
    /// the others cancel out as soon as those are right.)
    ///
    /// The second sample of a size replaces a slower first one, because a new size is slow once.
    pub(super) fn refine(&mut self, rows: Rows, sample: f64) {
        let (at, known) = self.position(rows);
        if !known {
            self.knots.insert(at, Knot { rows, value: sample, samples: 1 });
            return;
        }
        let knot = &mut self.knots[at];
        knot.samples = knot.samples.saturating_add(1);
        if knot.samples == 2 {
            knot.value = knot.value.min(sample);
            return;
        }
        let ratio = (sample / knot.value.max(f64::MIN_POSITIVE)).min(OUTLIER);
        self.hiccups = if ratio < OUTLIER { 0 } else { self.hiccups.saturating_add(1) };
        if (1..=HICCUPS).contains(&self.hiccups) {
            return;
        }
        let own = (1.0 / (1.0 + f64::from(knot.samples))).max(LEAST_OWN);
        let factor = 1.0 + SAMPLE_WEIGHT * (ratio - 1.0);
        knot.value *= factor.powf(own);
        self.scale(factor.powf(1.0 - own));
    }

    /// Takes a sample into an upper envelope that never falls as rows grow.
    pub(super) fn raise(&mut self, rows: Rows, sample: f64) {
        let (at, known) = self.position(rows);
        if !known {
            let before = at.checked_sub(1).map_or(0.0, |before| self.knots[before].value);
            self.knots.insert(at, Knot { rows, value: before, samples: 0 });
        }
        for knot in &mut self.knots[at..] {
            knot.value = knot.value.max(sample);
        }
    }

    /// Multiplies all points by `factor`.
    pub(super) fn scale(&mut self, factor: f64) {
        for knot in &mut self.knots {
            knot.value *= factor;
        }
    }

    /// The value at `rows`, which need not be whole; `None` if nothing is known.
    pub(super) fn at(&self, rows: f64) -> Option<f64> {
        let above = self.knots.partition_point(|knot| f64::from(knot.rows) < rows);
        if above == 0 {
            return self.knots.first().map(|first| self.below(*first, rows));
        }
        let lower = self.knots[above - 1];
        match self.knots.get(above) {
            Some(upper) => Some(lower.value + slope(lower, *upper) * (rows - f64::from(lower.rows))),
            None => Some(self.beyond(lower, rows)),
        }
    }

    fn position(&self, rows: Rows) -> (usize, bool) {
        match self.knots.binary_search_by_key(&rows, |knot| knot.rows) {
            Ok(at) => (at, true),
            Err(at) => (at, false),
        }
    }

    fn below(&self, first: Knot, rows: f64) -> f64 {
        let in_proportion = first.value * rows / f64::from(first.rows);
        match (self.knots.get(1), self.origin) {
            (Some(second), _) => {
                let line = first.value - slope(first, *second) * (f64::from(first.rows) - rows);
                line.max(in_proportion).min(first.value)
            }
            (None, Origin::Constant) => first.value,
            (None, Origin::Proportional) => in_proportion,
        }
    }

    fn beyond(&self, last: Knot, rows: f64) -> f64 {
        let [first, .., before, _] = self.knots.as_slice() else {
            return match self.knots.as_slice() {
                [first, last] => last.value + slope(*first, *last).max(0.0) * (rows - f64::from(last.rows)),
                _ => last.value * rows / f64::from(last.rows),
            };
        };
        let steepest = slope(*before, last).max(slope(*first, last)).max(0.0);
        last.value + steepest * (rows - f64::from(last.rows))
    }
}

fn slope(from: Knot, to: Knot) -> f64 {
    (to.value - from.value) / f64::from(to.rows - from.rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(origin: Origin, points: &[(Rows, f64)]) -> Curve {
        let mut curve = Curve::new(origin);
        for (rows, value) in points {
            curve.raise(*rows, *value);
        }
        curve
    }

    #[test]
    fn values_lie_on_straight_lines() {
        let table = [
            (vec![], 1.0, None),
            (vec![(4, 8.0)], 1.0, Some(2.0)),
            (vec![(4, 8.0)], 8.0, Some(16.0)),
            (vec![(2, 4.0), (4, 8.0)], 3.0, Some(6.0)),
            (vec![(2, 4.0), (4, 8.0)], 1.0, Some(2.0)),
            (vec![(2, 4.0), (4, 5.0)], 1.0, Some(3.5)),
            (vec![(2, 4.0), (4, 12.0)], 1.0, Some(2.0)),
            (vec![(2, 4.0), (4, 8.0)], 6.0, Some(12.0)),
            (vec![(1, 1.0), (2, 8.0), (4, 8.0)], 5.0, Some(8.0 + 7.0 / 3.0)),
            (vec![(1, 1.0), (2, 1.0), (4, 8.0)], 4.0, Some(8.0)),
        ];
        for (points, rows, expected) in table {
            assert_eq!(through(Origin::Proportional, &points).at(rows), expected, "{points:?} at {rows}");
        }
        assert_eq!(through(Origin::Constant, &[(4, 8.0)]).at(1.0), Some(8.0));
    }

    #[test]
    fn an_envelope_never_falls_as_rows_grow() {
        let curve = through(Origin::Proportional, &[(4, 8.0), (8, 10.0), (2, 9.0)]);
        assert_eq!(curve.at(2.0), Some(9.0));
        assert_eq!(curve.at(4.0), Some(9.0));
        assert_eq!(curve.at(8.0), Some(10.0));
    }

    #[test]
    fn a_machine_that_slows_down_does_not_change_how_sizes_compare() {
        let mut curve = Curve::new(Origin::Constant);
        let ratio = |curve: &Curve| curve.at(8.0).expect("known") / curve.at(1.0).expect("known");
        (0..20).for_each(|_| [(1, 1.0), (8, 9.0)].into_iter().for_each(|(rows, time)| curve.refine(rows, time)));
        (0..100).for_each(|_| curve.refine(8, 18.0));
        assert!((curve.at(8.0).expect("known") - 18.0).abs() < 0.1, "it learns how slow the machine is now: {curve:?}");
        assert!((ratio(&curve) - 9.0).abs() < 0.5, "{curve:?}");
        // Sizes that take turns are compared under the same conditions.
        (0..300).for_each(|_| [(1, 4.0), (8, 18.0)].into_iter().for_each(|(rows, time)| curve.refine(rows, time)));
        assert!((ratio(&curve) - 4.5).abs() < 0.2, "{curve:?}");
    }

    #[test]
    fn a_size_that_never_runs_does_not_drift_away() {
        let mut curve = Curve::new(Origin::Constant);
        for (rows, time) in [(1, 1.0), (2, 2.0), (8, 8.0)] {
            (0..3).for_each(|_| curve.refine(rows, time));
        }
        // One is slower whenever another size ran before it.
        for _ in 0..10_000 {
            [(2, 2.0), (1, 1.5), (1, 1.0), (1, 1.0)].into_iter().for_each(|(rows, time)| curve.refine(rows, time));
        }
        let untouched = curve.at(8.0).expect("known");
        assert!((4.0..16.0).contains(&untouched), "{curve:?}");
    }

    #[test]
    fn a_slow_first_run_and_a_hiccup_do_not_spoil_an_estimate() {
        let mut curve = Curve::new(Origin::Constant);
        curve.refine(4, 100.0);
        curve.refine(4, 1.0);
        assert_eq!(curve.at(4.0), Some(1.0));
        (0..HICCUPS).for_each(|_| curve.refine(4, 1000.0));
        assert_eq!(curve.at(4.0), Some(1.0));
        curve.refine(4, 1000.0);
        assert_eq!(curve.at(4.0), Some(1.6), "a machine that stays slow is believed");
    }

    /// The process is stopped now and then, always while the same size runs twice at once.
    #[test]
    fn hiccups_of_the_machine_change_no_comparison_of_sizes() {
        let mut curve = Curve::new(Origin::Constant);
        for rows in [1, 2] {
            (0..20).for_each(|_| curve.refine(rows, f64::from(rows)));
        }
        for _ in 0..1000 {
            (0..2).for_each(|_| curve.refine(1, 500.0));
            curve.refine(1, 1.0);
        }
        assert_eq!([1.0, 2.0].map(|rows| curve.at(rows)), [Some(1.0), Some(2.0)]);
    }
}
