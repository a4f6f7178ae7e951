//! What tends to follow an answer: clients that ask again.
//!
//! A client that waits for each answer before it sends its next request makes rows come in bursts, right behind the batch
//! that answered it. An instance that takes the first of a burst at once runs one row and leaves the others to the next batch.
//! So the share of answered rows that come again within a moment is learned, and the dispatch may give them that moment.

use super::queue::Kin;
use crate::units::{Instant, Rows};
use std::time::Duration;

/// The weight of the latest moment in the share that is learned.
const WEIGHT: f64 = 0.2;

/// The part of a batch's own duration that its echo is waited for, at most: an error costs no more than this.
const PART: u32 = 4;

/// Whoever calls the scheduler may come back so much later than asked for: shorter moments are none.
const TICK: Duration = Duration::from_millis(1);

/// The echo of one model's answers.
#[derive(Clone, Debug, Default)]
pub(super) struct Echo {
    /// The share of answered rows that come again in time.
    share: f64,
    /// Seconds from the answers to the last of those rows.
    spread: f64,
    moment: Option<Moment>,
}

/// The time right behind one or several batches of one kin.
#[derive(Clone, Copy, Debug)]
struct Moment {
    kin: Kin,
    begin: Instant,
    end: Instant,
    answered: u64,
    came: u64,
    last: Instant,
}

/// Rows that are to be expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Expected {
    /// How many more; at least one.
    pub(super) rows: Rows,
    /// When the last of them should be there.
    pub(super) soon: Instant,
    /// Until when they are waited for at most.
    pub(super) until: Instant,
}

impl Echo {
    /// A batch that took `duration` has been answered; `most` is the longest moment that is given.
    pub(super) fn answered(&mut self, now: Instant, kin: Kin, rows: Rows, duration: Duration, most: Duration) {
        let moment = most.min(duration / PART);
        let end = if moment < TICK { now } else { now + moment };
        match &mut self.moment {
            Some(open) if open.end > now && open.kin == kin => {
                open.end = open.end.max(end);
                open.answered += u64::from(rows);
            }
            _ => {
                self.close(now);
                self.moment = Some(Moment { kin, begin: now, end, answered: u64::from(rows), came: 0, last: now });
            }
        }
    }

    /// Rows have come.
    pub(super) fn arrived(&mut self, now: Instant, kin: Kin, rows: Rows) {
        self.close(now);
        if let Some(open) = self.moment.as_mut().filter(|open| open.kin == kin) {
            open.came += u64::from(rows);
            open.last = now;
        }
    }

    /// How many more rows of a kin are to be expected, and when; `None` if it is not even one.
    pub(super) fn expected(&self, now: Instant, kin: Kin) -> Option<Expected> {
        let open = self.moment.filter(|open| open.end > now && open.kin == kin)?;
        let rows = (self.share * open.answered as f64).round() - open.came as f64;
        let soon = (open.begin + Duration::from_secs_f64(self.spread)).clamp(now, open.end);
        (rows >= 1.0).then_some(Expected { rows: rows as Rows, soon, until: open.end })
    }

    /// Learns from a moment that is over. One that was cut short by another kin teaches nothing.
    fn close(&mut self, now: Instant) {
        if let Some(over) = self.moment.take_if(|open| open.end <= now) {
            let share = (over.came as f64 / over.answered.max(1) as f64).min(1.0);
            self.share += WEIGHT * (share - self.share);
            if over.came > 0 {
                self.spread += WEIGHT * (over.last.since(over.begin).as_secs_f64() - self.spread);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::ClassId;

    const CLASS: Kin = Kin::Class(ClassId(0));

    fn at(micros: u64) -> Instant {
        Instant(1) + Duration::from_micros(micros)
    }

    /// How many rows are expected, and until when.
    fn rows(echo: &Echo, now: Instant, kin: Kin) -> Option<(Rows, Instant)> {
        echo.expected(now, kin).map(|expected| (expected.rows, expected.until))
    }

    /// Rounds of 8 ms: a batch of 4 rows is answered, and of its rows so many come again 100 µs later.
    fn rounds(count: u64, again: Rows) -> Echo {
        let mut echo = Echo::default();
        for round in 0..count {
            let begin = round * 8000;
            echo.answered(at(begin), CLASS, 4, Duration::from_millis(8), Duration::from_millis(5));
            echo.arrived(at(begin + 100), CLASS, again);
        }
        echo
    }

    #[test]
    fn clients_that_ask_again_are_expected_for_a_quarter_of_their_batch() {
        let mut echo = rounds(20, 4);
        let begin = 20 * 8000;
        echo.answered(at(begin), CLASS, 4, Duration::from_millis(8), Duration::from_millis(5));
        assert_eq!(rows(&echo, at(begin), CLASS), Some((4, at(begin + 2000))));
        echo.arrived(at(begin + 50), CLASS, 3);
        assert_eq!(rows(&echo, at(begin + 50), CLASS), Some((1, at(begin + 2000))));
        assert_eq!(rows(&echo, at(begin + 50), Kin::Class(ClassId(1))), None, "another class is not expected");
        echo.arrived(at(begin + 60), CLASS, 1);
        assert_eq!(rows(&echo, at(begin + 60), CLASS), None, "all are there");
        assert_eq!(rows(&echo, at(begin + 2000), CLASS), None, "the moment is over");
    }

    #[test]
    fn the_longest_moment_bounds_the_wait() {
        let mut echo = rounds(20, 4);
        echo.answered(at(200_000), CLASS, 4, Duration::from_secs(8), Duration::from_millis(5));
        assert_eq!(rows(&echo, at(200_000), CLASS), Some((4, at(205_000))));
        let mut echo = rounds(20, 4);
        echo.answered(at(200_000), CLASS, 4, Duration::from_secs(8), Duration::ZERO);
        assert_eq!(rows(&echo, at(200_000), CLASS), None);
    }

    #[test]
    fn clients_that_do_not_come_again_are_not_expected_for_long() {
        let mut echo = rounds(20, 4);
        for round in 0..20 {
            echo.answered(at(300_000 + round * 8000), CLASS, 4, Duration::from_millis(8), Duration::from_millis(5));
        }
        assert_eq!(rows(&echo, at(300_000 + 19 * 8000), CLASS), None);
        assert_eq!(rows(&rounds(100, 0), at(99 * 8000), CLASS), None);
    }
}
