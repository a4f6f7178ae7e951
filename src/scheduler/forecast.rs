//! What the scheduler predicts from given runs: for whoever shows it to a person. The same cost model, asked from outside.

use super::cost::CostModel;
use super::policy::{Ladder, Room, largest_that_fits};
use super::{Observation, Rounding};
use crate::units::{ByteSize, ClassId, Rows};

/// The cost model of one class of rows, seeded with runs.
#[derive(Clone, Debug)]
pub struct Forecast {
    cost: CostModel,
    class: ClassId,
    units: u64,
}

impl Forecast {
    /// What is predicted for the class of `runs`, which all are of one, on this ladder. See
    /// [`ModelPlan::knee_tolerance`](super::ModelPlan::knee_tolerance).
    #[must_use]
    pub fn new(ladder: &[Rows], knee_tolerance: f64, runs: &[Observation]) -> Self {
        let mut cost = CostModel::new(ladder, knee_tolerance);
        runs.iter().for_each(|run| cost.observe(*run));
        let (class, units) = runs.first().map_or((ClassId::default(), 1), |run| (run.class, run.units));
        Self { cost, class, units }
    }

    /// Peak bytes of a batch; zero if nothing is known.
    #[must_use]
    pub fn bytes(&self, rows: Rows) -> ByteSize {
        self.cost.estimate(self.class, self.units).bytes(rows)
    }

    /// The smallest ladder size whose rows per second are about the best; `None` if too little is known, or if rows per
    /// second still rise at the largest size that was run.
    #[must_use]
    pub fn knee(&self) -> Option<Rows> {
        self.cost.estimate(self.class, self.units).knee()
    }

    /// The most rows, up to `most`, whose bytes fit into so many; zero if not even one row fits.
    #[must_use]
    pub fn largest_within(&self, bytes: ByteSize, most: Rows) -> Rows {
        let sizes = [most.max(1)];
        let ladder = Ladder { sizes: &sizes, rounding: Rounding::Off };
        largest_that_fits(ladder, self.cost.estimate(self.class, self.units), ladder.largest(), Room::of(bytes))
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn forecast(points: &[(Rows, u64)]) -> Forecast {
        let run = |&(rows, bytes)| Observation {
            class: ClassId(0),
            units: 10,
            rows,
            duration: Duration::from_millis(10),
            bytes: ByteSize(bytes),
        };
        Forecast::new(&[1, 2, 4, 8], 0.03, &points.iter().map(run).collect::<Vec<_>>())
    }

    #[test]
    fn two_sizes_make_a_line_and_memory_bounds_rows_on_it() {
        let line = forecast(&[(1, 110), (4, 140)]);
        assert_eq!([1, 2, 4, 8, 100].map(|rows| line.bytes(rows).0), [110, 120, 140, 180, 1100]);
        for (bytes, most, rows) in
            [(109, 64, 0), (110, 64, 1), (125, 64, 2), (180, 64, 8), (199, 64, 9), (9999, 64, 64)]
        {
            assert_eq!(line.largest_within(ByteSize(bytes), most), rows, "{bytes} bytes");
        }
    }

    #[test]
    fn nothing_known_bounds_nothing_and_has_no_knee() {
        let nothing = forecast(&[]);
        assert_eq!((nothing.bytes(4), nothing.knee(), nothing.largest_within(ByteSize(1), 8)), (ByteSize(0), None, 8));
    }

    #[test]
    fn the_knee_is_where_the_scheduler_has_it() {
        assert_eq!(forecast(&[(1, 1), (2, 2), (4, 4), (8, 8)]).knee(), Some(8));
        assert_eq!(forecast(&[(1, 1), (8, 8)]).knee(), None, "too little is known");
    }
}
