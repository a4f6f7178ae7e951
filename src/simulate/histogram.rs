//! Latencies, counted in classes about 1.5% wide.

use std::time::Duration;

/// Classes per doubling.
const PARTS: u64 = 64;
/// Doublings above the first `PARTS` microseconds: up to 19 hours.
const DOUBLINGS: usize = 30;

/// Latencies in microseconds, and requests that never had an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Histogram {
    classes: Vec<u64>,
    answered: u64,
    refused: u64,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self { classes: vec![0; PARTS as usize * (DOUBLINGS + 1)], answered: 0, refused: 0 }
    }

    /// One answer after so many nanoseconds.
    pub(super) fn add(&mut self, nanoseconds: u64) {
        let class = class(nanoseconds / 1000).min(self.classes.len() - 1);
        self.classes[class] += 1;
        self.answered += 1;
    }

    /// Requests that were refused: later than any.
    pub(super) fn refuse(&mut self, requests: u64) {
        self.refused += requests;
    }

    pub(super) fn answered(&self) -> u64 {
        self.answered
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// Adds what another one has counted.
    pub(super) fn absorb(&mut self, other: &Self) {
        self.classes.iter_mut().zip(&other.classes).for_each(|(mine, theirs)| *mine += theirs);
        self.answered += other.answered;
        self.refused += other.refused;
    }

    pub(super) fn clear(&mut self) {
        self.classes.fill(0);
        (self.answered, self.refused) = (0, 0);
    }

    /// What this share of all requests is answered within; `None` if so many never are.
    pub(super) fn quantile(&self, share: f64) -> Option<Duration> {
        let wanted = (share * (self.answered + self.refused) as f64).ceil() as u64;
        let mut seen = 0;
        for (class, count) in self.classes.iter().enumerate() {
            seen += count;
            if seen >= wanted.max(1) {
                return Some(Duration::from_micros(upper(class as u64)));
            }
        }
        (wanted == 0).then_some(Duration::ZERO)
    }

    /// The share of all requests that is not answered within a time: at most one class more is counted as in time.
    pub(super) fn late(&self, limit: Duration) -> f64 {
        let last = class(limit.as_micros() as u64).min(self.classes.len() - 1);
        let late = self.classes[last + 1..].iter().sum::<u64>() + self.refused;
        late as f64 / (self.answered + self.refused).max(1) as f64
    }
}

fn class(micros: u64) -> usize {
    if micros < PARTS {
        return micros as usize;
    }
    let doubling = u64::from(micros.ilog2() - PARTS.ilog2());
    ((doubling + 1) * PARTS + (micros >> doubling) - PARTS) as usize
}

/// The largest number of microseconds of a class.
fn upper(class: u64) -> u64 {
    if class < PARTS {
        return class;
    }
    let doubling = class / PARTS - 1;
    (((class % PARTS + PARTS + 1) << doubling) - 1).max(class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_in_the_class_that_ends_at_or_shortly_after_it() {
        for micros in (0..5000).chain((0..40).map(|power| (1 << power) - 1)).chain([123_456, 7_654_321]) {
            let end = upper(class(micros) as u64);
            assert!(end >= micros && end as f64 <= micros as f64 * 1.02 + 1.0, "{micros}: {end}");
            let before = class(micros).checked_sub(1).map(|class| upper(class as u64));
            assert!(before.is_none_or(|before| before < micros), "{micros}: {before:?}");
        }
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_list() {
        let mut histogram = Histogram::new();
        let mut all: Vec<u64> = (0..10_000_u64).map(|index| index * index % 700_001).collect();
        all.iter().for_each(|micros| histogram.add(micros * 1000));
        all.sort_unstable();
        for share in [0.01, 0.5, 0.9, 0.99, 1.0] {
            let truth = all[(share * all.len() as f64).ceil() as usize - 1] as f64;
            let told = histogram.quantile(share).expect("all were answered").as_micros() as f64;
            assert!(told >= truth && told <= truth * 1.02 + 1.0, "{share}: {told} for {truth}");
        }
        let late = all.iter().filter(|micros| **micros > 200_000).count() as f64 / all.len() as f64;
        assert!((histogram.late(Duration::from_millis(200)) - late).abs() < 0.01);
    }

    #[test]
    fn refused_requests_are_later_than_any() {
        let mut histogram = Histogram::new();
        (0..98).for_each(|_| histogram.add(1_000_000));
        histogram.refuse(2);
        assert_eq!(histogram.quantile(0.99), None);
        assert!(histogram.quantile(0.98).is_some());
        assert!((histogram.late(Duration::from_secs(1)) - 0.02).abs() < 1e-9);
        histogram.clear();
        assert_eq!(histogram, Histogram::new());
    }
}
