//! How large a batch is: the largest useful size that fits.

use super::cost::Estimate;
use super::turns::staged;
use super::{LimitedBy, Rounding};
use crate::units::{ByteSize, Rows};
use std::time::Duration;

/// The batch sizes of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ladder<'a> {
    /// Ascending, never empty.
    pub(super) sizes: &'a [Rows],
    /// What batches have to do with them.
    pub(super) rounding: Rounding,
}

impl Ladder<'_> {
    /// The most rows of a batch.
    pub(super) fn largest(&self) -> Rows {
        *self.sizes.last().expect("a ladder is never empty")
    }

    /// The rows that run for a batch of one row.
    pub(super) fn smallest(&self) -> Rows {
        if self.rounding == Rounding::Up { self.sizes[0] } else { 1 }
    }

    /// The rows that run for a batch of `rows`.
    pub(super) fn padded(&self, rows: Rows) -> Rows {
        if self.rounding == Rounding::Up { self.sizes[self.sizes.partition_point(|size| *size < rows)] } else { rows }
    }

    /// The largest size not above `cap`, or the smallest one.
    fn floor(&self, cap: Rows) -> Rows {
        let not_above = self.sizes.partition_point(|size| *size <= cap);
        match self.rounding {
            Rounding::Off => cap.clamp(1, self.largest()),
            Rounding::Down if not_above == 0 => cap.max(1),
            Rounding::Down | Rounding::Up => self.sizes[not_above.saturating_sub(1)],
        }
    }

    /// The next size to try when `padded` does not do; `None` below the smallest.
    fn below(&self, padded: Rows) -> Option<Rows> {
        (padded > self.smallest()).then(|| self.floor(padded - 1))
    }
}

/// What bounds the size of a batch, apart from deadlines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Rows that are there, at least one.
    pub(super) rows: u64,
    /// Beyond this, throughput does not rise.
    pub(super) knee: Option<Rows>,
    /// Beyond this, memory ran out not long ago.
    pub(super) ceiling: Option<Rows>,
    /// The memory that it may have.
    pub(super) room: Room,
}

/// The memory that a batch may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// Bytes that are left.
    pub(super) bytes: ByteSize,
    /// Run memory of the batches before it on its instance, which it takes over.
    pub(super) taken_over: ByteSize,
    /// Bytes for each element of its inputs that must be there beside its peak: for its own inputs while it waits behind
    /// another batch, or for those of as large a batch that is to wait behind it.
    pub(super) staged_unit: ByteSize,
}

impl Room {
    /// So many bytes, which nobody is to share.
    pub(super) fn of(bytes: ByteSize) -> Self {
        Self { bytes, taken_over: ByteSize::ZERO, staged_unit: ByteSize::ZERO }
    }

    /// Whether it takes a batch of so many rows. If it does, it takes any smaller one.
    fn takes(self, estimate: Estimate<'_>, rows: Rows) -> bool {
        let run = estimate.bytes(rows).saturating_sub(self.taken_over);
        run + staged(self.staged_unit, estimate.units, rows) <= self.bytes
    }
}

/// The size of a batch and what it costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Size {
    /// Rows.
    pub(super) rows: Rows,
    /// Rows, padding included.
    pub(super) padded_rows: Rows,
    /// Predicted bytes.
    pub(super) bytes: ByteSize,
    /// Predicted duration.
    pub(super) duration: Option<Duration>,
    /// Why it is not larger.
    pub(super) limited_by: LimitedBy,
}

/// Not even the smallest batch fits the bytes that are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom {
    /// What the run of the smallest batch needs.
    pub(super) needed: ByteSize,
}

/// The largest useful batch that fits. O(log rows), or O(ladder) when sizes are rounded up.
pub(super) fn form_batch(ladder: Ladder<'_>, estimate: Estimate<'_>, bounds: Bounds) -> Result<Size, NoRoom> {
    let (mut cap, mut limited_by) = (ladder.largest(), LimitedBy::Ladder);
    for (bound, limit) in [(bounds.knee, LimitedBy::Knee), (bounds.ceiling, LimitedBy::Bytes)] {
        if let Some(bound) = bound.map(|bound| ladder.floor(bound)).filter(|bound| *bound < cap) {
            (cap, limited_by) = (bound, limit);
        }
    }
    let wanted = u64::from(cap).min(bounds.rows) as Rows;
    let fits = largest_that_fits(ladder, estimate, ladder.padded(wanted), bounds.room)?;
    let rows = if fits < ladder.padded(wanted) {
        limited_by = LimitedBy::Bytes;
        fits
    } else if wanted < cap {
        limited_by = LimitedBy::Rows;
        worth_running_now(ladder, estimate, wanted)
    } else {
        wanted
    };
    Ok(sized(ladder, estimate, rows, limited_by))
}

/// Shrinks a batch until its predicted duration is at most what its rows allow: `slack` tells for the first so many rows.
/// `None` if even the first row cannot meet its deadline.
pub(super) fn meet_deadlines(
    ladder: Ladder<'_>,
    estimate: Estimate<'_>,
    mut size: Size,
    slack: impl Fn(Rows) -> Option<Duration>,
) -> Option<Size> {
    while let (Some(duration), Some(slack)) = (size.duration, slack(size.rows)) {
        if duration <= slack {
            break;
        }
        let rows = match ladder.below(size.padded_rows) {
            Some(smaller) => smaller.min(size.rows),
            None if size.rows > 1 => size.rows - 1,
            None => return None,
        };
        size = sized(ladder, estimate, rows, LimitedBy::Deadline);
    }
    Some(size)
}

fn sized(ladder: Ladder<'_>, estimate: Estimate<'_>, rows: Rows, limited_by: LimitedBy) -> Size {
    let padded_rows = ladder.padded(rows);
    let (bytes, duration) = (estimate.bytes(padded_rows), estimate.duration(padded_rows));
    Size { rows, padded_rows, bytes, duration, limited_by }
}

/// The largest size up to `cap` whose bytes fit; bytes never fall as rows grow.
pub(super) fn largest_that_fits(
    ladder: Ladder<'_>,
    estimate: Estimate<'_>,
    cap: Rows,
    room: Room,
) -> Result<Rows, NoRoom> {
    if room.takes(estimate, cap) {
        return Ok(cap);
    }
    if !room.takes(estimate, ladder.smallest()) {
        return Err(NoRoom { needed: estimate.bytes(ladder.smallest()) });
    }
    if ladder.rounding != Rounding::Off {
        let fitting = ladder.sizes.partition_point(|size| *size < cap && room.takes(estimate, *size));
        if let Some(last) = fitting.checked_sub(1) {
            return Ok(ladder.sizes[last]);
        }
    }
    let (mut fits, mut too_large) = (1, cap);
    while too_large - fits > 1 {
        let middle = fits + (too_large - fits) / 2;
        if room.takes(estimate, middle) { fits = middle } else { too_large = middle }
    }
    Ok(fits)
}

/// Between two ladder sizes: all rows now, padded up, or the ladder size below now and the rest later, whichever keeps the
/// instance busy for less time altogether.
fn worth_running_now(ladder: Ladder<'_>, estimate: Estimate<'_>, rows: Rows) -> Rows {
    let (up, down) = (ladder.padded(rows), ladder.floor(rows));
    if up == rows || down >= rows {
        return rows;
    }
    let rest = ladder.padded(rows - down);
    match (estimate.seconds(up), estimate.seconds(down), estimate.seconds(rest)) {
        (Some(up), Some(down_now), Some(rest)) if down_now + rest < up => down,
        _ => rows,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Observation;
    use super::super::cost::CostModel;
    use super::*;
    use crate::units::ClassId;

    const SIZES: [Rows; 4] = [1, 4, 8, 16];

    /// One byte a row; seconds as given.
    fn cost(points: &[(Rows, u64)]) -> CostModel {
        let mut cost = CostModel::new(&SIZES, 0.03);
        for (rows, millis) in points {
            let duration = Duration::from_millis(*millis);
            let bytes = ByteSize(u64::from(*rows));
            cost.observe(Observation { class: ClassId(0), units: 1, rows: *rows, duration, bytes });
        }
        cost
    }

    fn bounds(rows: u64, bytes: u64) -> Bounds {
        Bounds { rows, knee: None, ceiling: None, room: Room::of(ByteSize(bytes)) }
    }

    #[test]
    fn the_largest_useful_size_that_fits() {
        let cost = cost(&[(1, 10), (4, 13), (8, 17), (16, 25)]);
        let ladder = |rounding| Ladder { sizes: &SIZES, rounding };
        let (any, down, rungs) = (ladder(Rounding::Off), ladder(Rounding::Down), ladder(Rounding::Up));
        let knee = |rows, knee| Bounds { knee: Some(knee), ..bounds(rows, 99) };
        let ceiling = |rows, ceiling| Bounds { ceiling: Some(ceiling), ..bounds(rows, 99) };
        let table = [
            (any, bounds(1, 99), (1, 1, LimitedBy::Rows)),
            (any, bounds(5, 99), (5, 5, LimitedBy::Rows)),
            (any, bounds(16, 99), (16, 16, LimitedBy::Ladder)),
            (any, bounds(99, 99), (16, 16, LimitedBy::Ladder)),
            (any, bounds(99, 11), (11, 11, LimitedBy::Bytes)),
            (any, bounds(5, 11), (5, 5, LimitedBy::Rows)),
            (any, bounds(99, 1), (1, 1, LimitedBy::Bytes)),
            (any, knee(99, 8), (8, 8, LimitedBy::Knee)),
            (any, ceiling(99, 6), (6, 6, LimitedBy::Bytes)),
            (any, ceiling(4, 6), (4, 4, LimitedBy::Rows)),
            (rungs, bounds(3, 99), (3, 4, LimitedBy::Rows)),
            (rungs, bounds(4, 99), (4, 4, LimitedBy::Rows)),
            (rungs, bounds(99, 11), (8, 8, LimitedBy::Bytes)),
            (rungs, bounds(5, 7), (4, 4, LimitedBy::Bytes)),
            (rungs, bounds(3, 3), (1, 1, LimitedBy::Bytes)),
            (rungs, ceiling(99, 6), (4, 4, LimitedBy::Bytes)),
            (rungs, knee(99, 8), (8, 8, LimitedBy::Knee)),
            (down, bounds(5, 99), (5, 5, LimitedBy::Rows)),
            (down, bounds(99, 11), (8, 8, LimitedBy::Bytes)),
            (down, bounds(5, 4), (4, 4, LimitedBy::Bytes)),
            (down, bounds(3, 3), (3, 3, LimitedBy::Rows)),
            (down, bounds(3, 2), (1, 1, LimitedBy::Bytes)),
            (down, ceiling(99, 6), (4, 4, LimitedBy::Bytes)),
            (down, knee(99, 8), (8, 8, LimitedBy::Knee)),
        ];
        for (ladder, bounds, expected) in table {
            let size = form_batch(ladder, cost.estimate(ClassId(0), 1), bounds).expect("fits");
            assert_eq!((size.rows, size.padded_rows, size.limited_by), expected, "{ladder:?} {bounds:?}");
            assert_eq!(size.bytes, ByteSize(u64::from(size.padded_rows)));
        }
    }

    #[test]
    fn a_batch_takes_run_memory_over_and_needs_room_for_what_is_staged() {
        let cost = cost(&[(1, 10), (4, 13), (8, 17), (16, 25)]);
        let estimate = cost.estimate(ClassId(0), 3);
        for (bytes, taken_over, staged_unit, expected) in [
            // A row takes one byte to run, and three for the inputs where an element takes one.
            (8, 0, 0, Ok(8)),
            (0, 8, 0, Ok(8)),
            (4, 8, 0, Ok(12)),
            (31, 0, 1, Ok(7)),
            (32, 0, 1, Ok(8)),
            (23, 8, 1, Ok(7)),
            (24, 8, 1, Ok(8)),
            (28, 8, 1, Ok(9)),
            (24, 99, 1, Ok(8)),
            (2, 99, 1, Err(NoRoom { needed: ByteSize(1) })),
            (3, 0, 1, Err(NoRoom { needed: ByteSize(1) })),
        ] {
            let room =
                Room { bytes: ByteSize(bytes), taken_over: ByteSize(taken_over), staged_unit: ByteSize(staged_unit) };
            let ladder = Ladder { sizes: &SIZES, rounding: Rounding::Off };
            let size = form_batch(ladder, estimate, Bounds { room, ..bounds(99, 0) });
            assert_eq!(size.map(|size| size.rows), expected, "{room:?}");
        }
    }

    #[test]
    fn no_room_tells_what_the_smallest_batch_needs() {
        let cost = cost(&[(1, 10), (4, 13)]);
        for (rounding, sizes, needed) in [
            (Rounding::Off, &SIZES[..], 1),
            (Rounding::Down, &SIZES[1..], 1),
            (Rounding::Up, &SIZES[..], 1),
            (Rounding::Up, &SIZES[1..], 4),
        ] {
            let refused = form_batch(Ladder { sizes, rounding }, cost.estimate(ClassId(0), 1), bounds(9, 0));
            assert_eq!(refused, Err(NoRoom { needed: ByteSize(needed) }));
        }
    }

    #[test]
    fn padding_is_run_only_where_it_is_cheaper_than_waiting() {
        let ladder = Ladder { sizes: &SIZES, rounding: Rounding::Up };
        let steep = cost(&[(1, 1), (4, 4), (8, 8), (16, 16)]);
        let flat = cost(&[(1, 10), (4, 10), (8, 11), (16, 12)]);
        let unknown = cost(&[]);
        for (cost, rows, expected) in [(&steep, 5, 4), (&steep, 7, 7), (&flat, 5, 5), (&unknown, 9, 9)] {
            let size = form_batch(ladder, cost.estimate(ClassId(0), 1), bounds(rows, 99)).expect("fits");
            assert_eq!((size.rows, size.limited_by), (expected, LimitedBy::Rows), "{rows} rows");
        }
    }

    #[test]
    fn deadlines_shrink_a_batch_down_to_one_row_and_no_further() {
        let cost = cost(&[(1, 10), (16, 25)]);
        let estimate = cost.estimate(ClassId(0), 1);
        let millis = Duration::from_millis;
        for (rounding, slack, expected) in [
            (Rounding::Off, 25, Some((16, LimitedBy::Ladder))),
            (Rounding::Off, 20, Some((11, LimitedBy::Deadline))),
            (Rounding::Off, 10, Some((1, LimitedBy::Deadline))),
            (Rounding::Off, 9, None),
            (Rounding::Down, 20, Some((8, LimitedBy::Deadline))),
            (Rounding::Down, 9, None),
            (Rounding::Up, 20, Some((8, LimitedBy::Deadline))),
            (Rounding::Up, 10, Some((1, LimitedBy::Deadline))),
            (Rounding::Up, 9, None),
        ] {
            let ladder = Ladder { sizes: &SIZES, rounding };
            let size = form_batch(ladder, estimate, bounds(99, 99)).expect("fits");
            let met = meet_deadlines(ladder, estimate, size, |_| Some(millis(slack)));
            assert_eq!(met.map(|size| (size.rows, size.limited_by)), expected, "{slack} ms, {rounding:?}");
        }
    }

    #[test]
    fn a_row_that_is_in_a_hurry_does_not_shrink_the_batch_before_it() {
        let cost = cost(&[(1, 10), (16, 25)]);
        let (estimate, ladder) = (cost.estimate(ClassId(0), 1), Ladder { sizes: &SIZES, rounding: Rounding::Off });
        let size = form_batch(ladder, estimate, bounds(3, 99)).expect("fits");
        let slack = |rows| (rows > 2).then_some(Duration::from_millis(1));
        assert_eq!(meet_deadlines(ladder, estimate, size, slack).map(|size| size.rows), Some(2));
    }
}
