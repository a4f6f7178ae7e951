//! The cost model of one model: seconds and bytes of a batch as functions of its class and rows.
//!
//! Seconds are a running estimate per batch size. Bytes are an upper envelope: they may be over-estimated by a little, what
//! was observed is never under-estimated. A class that was never run, or at one size only, borrows from the classes nearest in
//! units: between two of them lies a straight line from the one to the other, at as many rows. (What a row needs grows with its
//! units at least in proportion, attention with their square: a chord of that lies above it.) Where there is only one, `rows`
//! rows of `units` elements count as as many of its rows as have equally many elements.

mod curve;

use super::Observation;
use crate::units::{ByteSize, ClassId, Rows};
use curve::{Curve, Origin};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Classes remembered; the one that ran longest ago is forgotten first.
const MAX_CLASSES: usize = 4096;
/// Points a curve has before others borrow from it, and before it is no longer corrected by theirs.
const RICH: usize = 2;
/// Points a curve has before it tells where the knee is (fewer if the ladder has fewer).
const KNEE_POINTS: usize = 3;
/// What is left of an estimate of seconds that has refused a request. Without it, an estimate that is wrong and refuses every
/// request would never be corrected by a run.
const DOUBT: f64 = 0.95;

/// Seconds and bytes of batches of one model.
#[derive(Clone, Debug)]
pub(super) struct CostModel {
    ladder: Vec<Rows>,
    knee_tolerance: f64,
    classes: BTreeMap<ClassId, ClassCost>,
    /// The classes that others may borrow from, by units.
    rich: BTreeSet<(u64, ClassId)>,
    runs: u64,
}

/// One batch in so many that are as large as the knee is a size larger or smaller: how sizes compare can only be learned by
/// running them, and under a steady load only one would ever run.
const TRIAL_EVERY: u64 = 32;

#[derive(Clone, Debug)]
struct ClassCost {
    units: u64,
    seconds: Curve,
    bytes: Curve,
    knee: Option<Rows>,
    last_run: u64,
    runs: u64,
}

impl CostModel {
    /// A model that knows nothing yet.
    pub(super) fn new(ladder: &[Rows], knee_tolerance: f64) -> Self {
        let ladder = ladder.to_vec();
        Self { ladder, knee_tolerance, classes: BTreeMap::new(), rich: BTreeSet::new(), runs: 0 }
    }

    /// Keeps what was learned under another ladder.
    pub(super) fn set_ladder(&mut self, ladder: &[Rows], knee_tolerance: f64) {
        self.ladder = ladder.to_vec();
        self.knee_tolerance = knee_tolerance;
        for class in self.classes.values_mut() {
            class.knee = knee(&self.ladder, knee_tolerance, &class.seconds, 1.0);
        }
    }

    /// Learns from a run.
    pub(super) fn observe(&mut self, run: Observation) {
        let (ladder, tolerance) = (std::mem::take(&mut self.ladder), self.knee_tolerance);
        let class = self.class(run.class, run.units);
        class.seconds.refine(run.rows, run.duration.as_secs_f64());
        class.bytes.raise(run.rows, run.bytes.0 as f64);
        class.knee = knee(&ladder, tolerance, &class.seconds, 1.0);
        let (units, rich) = (class.units, class.seconds.len() >= RICH);
        self.ladder = ladder;
        if rich {
            self.rich.insert((units, run.class));
        }
    }

    /// Learns that a run had `bytes` and was denied more.
    pub(super) fn denied(&mut self, run: Denied) {
        if run.bytes > self.estimate(run.class, run.units).bytes(run.rows) {
            self.class(run.class, run.units).bytes.raise(run.rows, run.bytes.0 as f64);
        }
    }

    /// Trusts the seconds of a class a little less; see [`DOUBT`].
    pub(super) fn doubt(&mut self, class: ClassId) {
        if let Some(class) = self.classes.get_mut(&class) {
            class.seconds.scale(DOUBT);
        }
    }

    /// What is known of a class with `units` elements per row.
    pub(super) fn estimate(&self, class: ClassId, units: u64) -> Estimate<'_> {
        let own = self.classes.get(&class);
        let units = units.max(1);
        let enough = RICH.max(self.knee_points());
        let knows = |own: &ClassCost| own.seconds.len() >= enough && own.bytes.len() >= RICH && own.knee.is_some();
        if own.is_some_and(knows) {
            return Estimate { model: self, units, own, below: None, above: None };
        }
        let by_units = |(_, class): &(u64, ClassId)| self.classes.get(class);
        let below = self.rich.range(..=(units, ClassId(u32::MAX))).rfind(|(_, id)| *id != class).and_then(by_units);
        let above = self.rich.range((units + 1, ClassId(0))..).find(|(_, id)| *id != class).and_then(by_units);
        if below.is_some() || above.is_some() {
            return Estimate { model: self, units, own, below, above };
        }
        let below = self.classes.iter().find(|(id, _)| **id != class).map(|(_, cost)| cost);
        Estimate { model: self, units, own, below, above: None }
    }

    /// The class measured with the fewest units per row, and its units: where to start when nothing has run yet.
    pub(super) fn first_class(&self) -> Option<(ClassId, u64)> {
        self.rich.first().map(|(units, class)| (*class, *units))
    }

    fn knee_points(&self) -> usize {
        KNEE_POINTS.min(self.ladder.len())
    }

    fn class(&mut self, id: ClassId, units: u64) -> &mut ClassCost {
        if self.classes.len() >= MAX_CLASSES && !self.classes.contains_key(&id) {
            self.forget_oldest();
        }
        self.runs += 1;
        let class = self.classes.entry(id).or_insert_with(|| ClassCost {
            units: units.max(1),
            seconds: Curve::new(Origin::Constant),
            bytes: Curve::new(Origin::Proportional),
            knee: None,
            last_run: 0,
            runs: 0,
        });
        (class.last_run, class.runs) = (self.runs, class.runs + 1);
        class
    }

    fn forget_oldest(&mut self) {
        let oldest = self.classes.iter().min_by_key(|(_, cost)| cost.last_run).map(|(id, cost)| (cost.units, *id));
        if let Some((units, id)) = oldest {
            self.classes.remove(&id);
            self.rich.remove(&(units, id));
        }
    }
}

/// A run that was denied memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Denied {
    /// The class of its rows.
    pub(super) class: ClassId,
    /// Elements per row.
    pub(super) units: u64,
    /// Rows, padding included.
    pub(super) rows: Rows,
    /// The bytes it had.
    pub(super) bytes: ByteSize,
}

/// What is known of one class: its own curves, or those of its neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimate<'a> {
    model: &'a CostModel,
    /// Elements per row.
    pub(super) units: u64,
    own: Option<&'a ClassCost>,
    below: Option<&'a ClassCost>,
    above: Option<&'a ClassCost>,
}

impl Estimate<'_> {
    /// How long a batch keeps an instance busy; `None` if nothing is known.
    pub(super) fn duration(&self, rows: Rows) -> Option<Duration> {
        self.seconds(rows).map(Duration::from_secs_f64)
    }

    /// The same in seconds.
    pub(super) fn seconds(&self, rows: Rows) -> Option<f64> {
        combine(self.own.map(|own| &own.seconds), rows, |rows| self.borrowed(rows, |other| &other.seconds))
    }

    /// Seconds that a row takes in the best batch of those up to `most` rows that were run. What lies beyond is a guess: it is not
    /// looked at.
    pub(super) fn best_per_row(&self, most: Rows) -> Option<f64> {
        let ran = |class: &ClassCost| class.seconds.last_rows();
        let own = self.own.filter(|own| own.seconds.len() >= RICH).and_then(ran);
        let ran = own.or_else(|| self.below.into_iter().chain(self.above).filter_map(ran).max()).unwrap_or(1);
        let most = most.min(ran).max(1);
        let sizes = self.model.ladder.iter().copied().filter(|size| *size < most).chain([most]);
        sizes.filter_map(|size| Some(self.seconds(size)? / f64::from(size))).min_by(f64::total_cmp)
    }

    /// Peak bytes of a batch: an upper envelope, zero if nothing is known.
    pub(super) fn bytes(&self, rows: Rows) -> ByteSize {
        let bytes = combine(self.own.map(|own| &own.bytes), rows, |rows| self.borrowed(rows, |other| &other.bytes));
        ByteSize(bytes.map_or(0, |bytes| bytes.ceil() as u64))
    }

    /// The smallest ladder size whose rows per second are about the best; `None` if too little is known. A class whose own runs do
    /// not show it borrows from the nearest one.
    pub(super) fn knee(&self) -> Option<Rows> {
        self.own.and_then(|own| own.knee).or_else(|| {
            let other = self.nearest()?;
            let ratio = self.units as f64 / other.units as f64;
            knee(&self.model.ladder, self.model.knee_tolerance, &other.seconds, ratio)
        })
    }

    /// The knee, or now and then a size beside it to learn whether it still is one; as long as it is not known, the next size to
    /// try.
    pub(super) fn knee_or_trial(&self) -> Option<Rows> {
        let Some(knee) = self.knee() else { return self.next_size() };
        let runs = self.own.map_or(0, |own| own.runs);
        if runs % TRIAL_EVERY != TRIAL_EVERY - 1 {
            return Some(knee);
        }
        let ladder = &self.model.ladder;
        let at = ladder.partition_point(|size| *size < knee);
        let beside = if (runs / TRIAL_EVERY).is_multiple_of(2) { at.checked_sub(1) } else { Some(at + 1) };
        Some(beside.and_then(|beside| ladder.get(beside)).copied().unwrap_or(knee))
    }

    /// The ladder size above the largest that has run: what is said of sizes far beyond is a guess, and if it is wrong a batch of
    /// long rows holds an instance for seconds. `None` if nothing has run.
    fn next_size(&self) -> Option<Rows> {
        let own = self.own.filter(|own| own.seconds.len() >= RICH);
        let scaled =
            |other: &ClassCost| Some(f64::from(other.seconds.last_rows()?) * other.units as f64 / self.units as f64);
        let ran = match own {
            Some(own) => f64::from(own.seconds.last_rows()?),
            None => self.nearest().and_then(scaled)?,
        };
        self.model.ladder.iter().copied().find(|size| f64::from(*size) > ran)
    }

    /// What the neighbours say of `rows` rows: the line between them, never below the smaller one.
    fn borrowed(&self, rows: f64, curve: impl Fn(&ClassCost) -> &Curve) -> Option<f64> {
        let (Some(below), Some(above)) = (self.below, self.above) else {
            let only = self.below.or(self.above)?;
            return curve(only).at(self.rows_of(only, rows));
        };
        let (low, high) = (curve(below).at(rows)?, curve(above).at(rows)?);
        let part = (self.units - below.units) as f64 / (above.units - below.units) as f64;
        Some(low + (high - low).max(0.0) * part)
    }

    fn rows_of(&self, other: &ClassCost, rows: f64) -> f64 {
        rows * self.units as f64 / other.units as f64
    }

    /// The neighbour with the smaller ratio of units.
    fn nearest(&self) -> Option<&ClassCost> {
        match (self.below, self.above) {
            (Some(below), Some(above)) => {
                let down = u128::from(self.units) * u128::from(self.units);
                let up = u128::from(above.units) * u128::from(below.units);
                Some(if down <= up { below } else { above })
            }
            (below, above) => below.or(above),
        }
    }
}

/// A class's own curve where it has points enough; the borrowed one corrected by its only point; or the borrowed one.
fn combine(own: Option<&Curve>, rows: Rows, borrowed: impl Fn(f64) -> Option<f64>) -> Option<f64> {
    let at = f64::from(rows);
    let Some((own, only)) = own.and_then(|own| own.last_rows().map(|rows| (own, rows))) else { return borrowed(at) };
    if own.len() >= RICH || only == rows {
        return own.at(at);
    }
    let known = own.at(f64::from(only));
    match (known, borrowed(f64::from(only)), borrowed(at)) {
        (Some(known), Some(reference), Some(value)) if reference > 0.0 => Some(value * known / reference),
        _ => own.at(at),
    }
}

/// The knee of a curve whose rows are `ratio` times as expensive as its own. Only sizes that were measured count; if rows
/// per second still rise at the largest of them, the knee is not known.
fn knee(ladder: &[Rows], tolerance: f64, seconds: &Curve, ratio: f64) -> Option<Rows> {
    if seconds.len() < KNEE_POINTS.min(ladder.len()) {
        return None;
    }
    let measured = f64::from(seconds.last_rows()?);
    let known = ladder.partition_point(|size| f64::from(*size) * ratio <= measured);
    let rate = |size: Rows| seconds.at(f64::from(size) * ratio).map_or(0.0, |time| f64::from(size) / time.max(1e-9));
    let best = ladder[..known].iter().map(|size| rate(*size)).fold(0.0, f64::max);
    let knee = ladder[..known].iter().position(|size| rate(*size) >= best * (1.0 - tolerance))?;
    if knee + 1 == known && known < ladder.len() { None } else { Some(ladder[knee]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LADDER: [Rows; 5] = [1, 2, 4, 8, 16];

    fn run(class: u32, units: u64, rows: Rows, millis: u64, bytes: u64) -> Observation {
        let duration = Duration::from_millis(millis);
        Observation { class: ClassId(class), units, rows, duration, bytes: ByteSize(bytes) }
    }

    fn model(runs: &[Observation]) -> CostModel {
        let mut model = CostModel::new(&LADDER, 0.03);
        for run in runs {
            model.observe(*run);
        }
        model
    }

    #[test]
    fn nothing_known_predicts_nothing() {
        let model = model(&[]);
        let estimate = model.estimate(ClassId(0), 10);
        assert_eq!((estimate.duration(4), estimate.bytes(4), estimate.knee()), (None, ByteSize(0), None));
    }

    #[test]
    fn known_sizes_are_interpolated() {
        let model = model(&[run(0, 10, 1, 10, 110), run(0, 10, 4, 40, 140), run(0, 10, 16, 100, 260)]);
        let estimate = model.estimate(ClassId(0), 10);
        for (rows, millis, bytes) in [(1, 10, 110), (2, 20, 120), (4, 40, 140), (10, 70, 200), (16, 100, 260)] {
            assert_eq!(estimate.duration(rows), Some(Duration::from_millis(millis)), "{rows} rows");
            assert_eq!(estimate.bytes(rows), ByteSize(bytes), "{rows} rows");
        }
    }

    #[test]
    fn bytes_never_under_estimate_what_was_observed() {
        let mut seed = 7_u64;
        let mut model = model(&[]);
        let mut seen: Vec<Observation> = Vec::new();
        for _ in 0..500 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (class, rows) = ((seed >> 33) as u32 % 3, (seed >> 40) as u32 % 16 + 1);
            let observation = run(class, 10 + u64::from(class), rows, 1, (seed >> 20) & 0xffff);
            model.observe(observation);
            seen.push(observation);
            for old in &seen {
                assert!(model.estimate(old.class, old.units).bytes(old.rows) >= old.bytes, "{old:?}");
            }
        }
    }

    #[test]
    fn unseen_classes_are_scaled_by_units() {
        let model = model(&[run(0, 10, 1, 10, 100), run(0, 10, 16, 85, 1600), run(1, 40, 1, 30, 600)]);
        let unseen = model.estimate(ClassId(9), 20);
        assert_eq!(unseen.duration(2), Some(Duration::from_millis(25)), "as 4 rows of class 0");
        assert_eq!(unseen.bytes(2), ByteSize(400), "as 4 rows of class 0");
        let once = model.estimate(ClassId(1), 40);
        assert_eq!(once.bytes(1), ByteSize(600), "its own point");
        assert_eq!(once.bytes(2), ByteSize(1200), "the borrowed curve, corrected by its own point");
    }

    #[test]
    fn between_two_classes_lies_a_line_which_is_above_what_grows_faster_than_units() {
        // Attention: 3 a unit, and 1 for each pair of units. Seconds: 10 ms, and 1 for each unit of each row.
        let truth = |units: u64, rows: u64| (10 + rows * units, rows * (3 * units + units * units));
        let seen = |class, units, rows: Rows| {
            let (millis, bytes) = truth(units, rows.into());
            run(class, units, rows, millis, bytes)
        };
        let model = model(&[seen(0, 10, 1), seen(0, 10, 4), seen(1, 40, 1), seen(1, 40, 4)]);
        for units in 11..40 {
            for rows in 1..=4 {
                let estimate = model.estimate(ClassId(9), units);
                let (millis, bytes) = truth(units, rows.into());
                assert!(estimate.bytes(rows) >= ByteSize(bytes), "{rows} of {units}");
                let seconds = estimate.seconds(rows).expect("known");
                assert!((seconds - millis as f64 / 1000.0).abs() < 1e-9, "{rows} of {units}: {seconds}");
            }
        }
    }

    #[test]
    fn the_knee_is_the_smallest_size_near_the_best() {
        let table = [
            (vec![(1, 10), (16, 160)], None),
            (vec![(1, 10), (8, 20), (16, 40)], Some(8)),
            (vec![(1, 10), (4, 40), (16, 160)], Some(1)),
            (vec![(1, 10), (4, 11), (16, 12)], Some(16)),
            (vec![(1, 10), (2, 11), (4, 12)], None),
        ];
        for (points, expected) in table {
            let runs: Vec<_> = points.iter().map(|(rows, millis)| run(0, 10, *rows, *millis, 1)).collect();
            assert_eq!(model(&runs).estimate(ClassId(0), 10).knee(), expected, "{points:?}");
        }
    }

    #[test]
    fn a_knee_that_a_bad_start_has_put_too_high_is_found_out() {
        // While loading something else ran, and one row looked slow; in truth batches do not pay.
        let mut model =
            model(&[run(0, 10, 1, 20, 0), run(0, 10, 2, 30, 0), run(0, 10, 4, 40, 0), run(0, 10, 8, 80, 0)]);
        assert_eq!(model.estimate(ClassId(0), 10).knee(), Some(4));
        let mut larger = 0;
        for _ in 0..2000 {
            let rows = model.estimate(ClassId(0), 10).knee_or_trial().expect("enough is known");
            larger += u32::from(rows > 1);
            model.observe(run(0, 10, rows, 10 * u64::from(rows), 0));
        }
        assert_eq!(model.estimate(ClassId(0), 10).knee(), Some(1));
        assert!(larger < 1000, "{larger} of 2000 batches were larger than pays");
    }

    #[test]
    fn the_knee_of_an_unseen_class_comes_from_the_scaled_curve() {
        let mut model = model(&[run(0, 10, 1, 10, 1), run(0, 10, 8, 20, 1), run(0, 10, 16, 40, 1)]);
        assert_eq!(model.estimate(ClassId(9), 20).knee(), Some(4));
        model.observe(run(9, 20, 1, 10, 1));
        model.observe(run(9, 20, 2, 90, 1));
        assert_eq!(model.estimate(ClassId(9), 20).knee(), Some(4), "two points are too few");
    }

    #[test]
    fn a_denied_run_raises_the_envelope_only_above_it() {
        let mut model = model(&[run(0, 10, 1, 1, 100), run(0, 10, 2, 1, 200)]);
        let denied = |bytes| Denied { class: ClassId(0), units: 10, rows: 8, bytes: ByteSize(bytes) };
        model.denied(denied(300));
        assert_eq!(model.estimate(ClassId(0), 10).bytes(8), ByteSize(800));
        model.denied(denied(900));
        assert_eq!(model.estimate(ClassId(0), 10).bytes(8), ByteSize(900));
    }

    #[test]
    fn a_wrong_estimate_that_refuses_requests_heals() {
        let mut model = model(&[run(0, 10, 1, 1000, 1)]);
        for _ in 0..100 {
            model.doubt(ClassId(0));
        }
        assert!(model.estimate(ClassId(0), 10).seconds(1).is_some_and(|seconds| seconds < 0.01));
    }

    #[test]
    fn classes_are_forgotten_when_there_are_too_many() {
        let mut model = model(&[]);
        for class in 0..=MAX_CLASSES as u32 {
            model.observe(run(class, 10, 1, 1, 1));
            model.observe(run(class, 10, 2, 1, 1));
        }
        assert_eq!((model.classes.len(), model.rich.len()), (MAX_CLASSES, MAX_CLASSES));
        assert!(!model.classes.contains_key(&ClassId(0)));
    }
}
