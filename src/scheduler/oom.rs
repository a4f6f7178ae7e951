//! What happens to rows that come back: how they are cut, how long a class that ran out of memory waits, and how a squeeze
//! is forgotten.

use super::Part;
use crate::units::{Instant, RequestId, Rows};
use std::time::Duration;

/// A learned ceiling doubles each time this has passed, until it is forgotten.
pub(super) const CEILING_DOUBLING: Duration = Duration::from_millis(500);
/// The first pause after the smallest batch ran out of memory; it doubles with each failure in a row.
pub(super) const BACKOFF_FIRST: Duration = Duration::from_millis(10);
/// The longest such pause.
pub(super) const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// How long a class whose smallest batch is predicted not to fit waits before it tries all the same, alone on its device:
/// the prediction may be wrong.
pub(super) const PROBE_DELAY: Duration = Duration::from_millis(50);
/// How often a class that waits for memory is looked at.
pub(super) const STARVED_POLL: Duration = Duration::from_millis(50);
/// How long a request without a deadline waits for memory.
pub(super) const MEMORY_PATIENCE: Duration = Duration::from_secs(10);
/// What a client is told that found no memory.
pub(super) const MEMORY_RETRY_AFTER: Duration = Duration::from_secs(2);
/// How many lost instances one request may be on before it is suspected to be the cause.
pub(super) const MAX_INSTANCE_LOSSES: u32 = 2;

/// Why rows came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Returned {
    /// Memory ran out: any of these rows may run together, as many as the ceiling allows.
    Memory,
    /// One request of these makes the batch fail: they must not be mixed with others.
    Suspect,
}

/// Rows that came back together and run again before anything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The rows, in order.
    pub(super) parts: Vec<Part>,
    /// Why they came back.
    pub(super) why: Returned,
}

impl Piece {
    /// The sum over the parts.
    pub(super) fn rows(&self) -> Rows {
        count(&self.parts)
    }
}

/// The sum over `parts`.
pub(super) fn count(parts: &[Part]) -> Rows {
    parts.iter().map(|part| part.rows).sum()
}

/// Cuts `parts` after `rows` rows and returns the rest; a request may be cut.
pub(super) fn split_off(parts: &mut Vec<Part>, rows: Rows) -> Vec<Part> {
    let mut left = rows;
    let mut at = 0;
    while at < parts.len() && parts[at].rows <= left {
        left -= parts[at].rows;
        at += 1;
    }
    let mut rest = parts.split_off(at);
    if left > 0 && !rest.is_empty() {
        let first = &mut rest[0];
        parts.push(Part { request: first.request, start: first.start, rows: left });
        first.start += left;
        first.rows -= left;
    }
    rest
}

/// Adds a part, as one with the part before it where they are neighbours in one request.
pub(super) fn join(parts: &mut Vec<Part>, part: &Part) {
    match parts.last_mut() {
        Some(last) if last.request == part.request && last.start + last.rows == part.start => last.rows += part.rows,
        _ => parts.push(part.clone()),
    }
}

/// Whether all parts are of one request; then a failure is its own.
pub(super) fn is_single(parts: &[Part]) -> bool {
    let first: Option<RequestId> = parts.first().map(|part| part.request);
    parts.iter().all(|part| Some(part.request) == first)
}

/// Cuts parts of several requests in two halves at a border between parts.
pub(super) fn halves(mut parts: Vec<Part>) -> [Vec<Part>; 2] {
    let second = parts.split_off(parts.len() / 2);
    [parts, second]
}

/// The most rows of a class after its memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ceiling {
    rows: Rows,
    since: Instant,
}

impl Ceiling {
    /// Half of what failed, or the ceiling there was if that is lower.
    pub(super) fn after(failed: Rows, now: Instant, before: Option<Self>) -> Self {
        let half = failed.div_ceil(2).max(1);
        let rows = before.map_or(half, |before| before.rows_at(now).min(half));
        Self { rows, since: now }
    }

    /// The ceiling as it is now: it doubles with each [`CEILING_DOUBLING`].
    pub(super) fn rows_at(self, now: Instant) -> Rows {
        let doublings = now.since(self.since).as_nanos() / CEILING_DOUBLING.as_nanos();
        let factor = 1_u32.checked_shl(u32::try_from(doublings).unwrap_or(u32::MAX)).unwrap_or(u32::MAX);
        self.rows.saturating_mul(factor)
    }
}

/// A class whose smallest batch finds no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Starved {
    /// Since when.
    pub(super) since: Instant,
    /// Smallest batches that failed in a row.
    pub(super) failures: u32,
    /// Not tried before.
    pub(super) not_before: Instant,
    /// When to look again for requests that have waited too long.
    pub(super) review: Instant,
}

impl Starved {
    /// The smallest batch is predicted not to fit; nothing was tried yet.
    pub(super) fn predicted(now: Instant) -> Self {
        Self { since: now, failures: 0, not_before: now + PROBE_DELAY, review: now }
    }

    /// The smallest batch ran out of memory.
    pub(super) fn failed(now: Instant, before: Option<Self>) -> Self {
        let failures = before.map_or(1, |before| before.failures.saturating_add(1));
        let since = before.map_or(now, |before| before.since);
        let pause = BACKOFF_FIRST.saturating_mul(1 << (failures - 1).min(16)).min(BACKOFF_MAX);
        Self { since, failures, not_before: now + pause, review: now }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(request: u64, start: Rows, rows: Rows) -> Part {
        Part { request: RequestId(request), start, rows }
    }

    fn at(millis: u64) -> Instant {
        Instant::default() + Duration::from_millis(millis)
    }

    #[test]
    fn splitting_keeps_every_row_once_and_in_order() {
        let whole = [part(1, 0, 3), part(2, 5, 2), part(3, 0, 4)];
        let table: [(Rows, &[Part], &[Part]); 5] = [
            (0, &[], &whole),
            (2, &[part(1, 0, 2)], &[part(1, 2, 1), part(2, 5, 2), part(3, 0, 4)]),
            (3, &[part(1, 0, 3)], &[part(2, 5, 2), part(3, 0, 4)]),
            (4, &[part(1, 0, 3), part(2, 5, 1)], &[part(2, 6, 1), part(3, 0, 4)]),
            (9, &whole, &[]),
        ];
        for (rows, first, second) in table {
            let mut parts = whole.to_vec();
            let rest = split_off(&mut parts, rows);
            assert_eq!((parts.as_slice(), rest.as_slice()), (first, second), "after {rows} rows");
        }
    }

    #[test]
    fn neighbours_of_one_request_are_joined() {
        let mut parts = Vec::new();
        for next in [part(1, 0, 2), part(1, 2, 1), part(1, 4, 1), part(2, 5, 1)] {
            join(&mut parts, &next);
        }
        assert_eq!(parts, [part(1, 0, 3), part(1, 4, 1), part(2, 5, 1)]);
        assert!(is_single(&parts[..2]) && !is_single(&parts));
    }

    #[test]
    fn a_ceiling_halves_with_each_failure_and_is_forgotten_in_time() {
        let first = Ceiling::after(64, at(0), None);
        assert_eq!(first.rows_at(at(0)), 32);
        assert_eq!(first.rows_at(at(499)), 32);
        assert_eq!(first.rows_at(at(500)), 64);
        assert_eq!(first.rows_at(at(1000)), 128);
        assert_eq!(first.rows_at(at(1_000_000_000)), u32::MAX);
        assert_eq!(Ceiling::after(64, at(1), Some(Ceiling::after(8, at(0), None))).rows_at(at(1)), 4);
        assert_eq!(Ceiling::after(1, at(0), None).rows_at(at(0)), 1);
        assert_eq!(Ceiling::after(3, at(0), None).rows_at(at(0)), 2);
    }

    #[test]
    fn pauses_double_up_to_a_limit() {
        let mut starved = Starved::failed(at(0), None);
        assert_eq!((starved.not_before, starved.since), (at(10), at(0)));
        starved = Starved::failed(at(10), Some(starved));
        assert_eq!((starved.not_before, starved.since), (at(30), at(0)));
        for _ in 0..100 {
            starved = Starved::failed(at(100), Some(starved));
        }
        assert_eq!(starved.not_before, at(600));
    }
}
