//! What became of requests and batches of a model since it was loaded, as the protocol's statistics extension counts it.
//!
//! The loop alone counts; whoever wants the numbers asks it for a copy.

use crate::runtime::batch::Stages;
use crate::units::Rows;
use std::collections::BTreeMap;
use std::time::Duration;

/// How often something happened, and how long it took altogether.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    /// How often.
    pub count: u64,
    /// How long, all together.
    pub time: Duration,
}

impl Total {
    fn add(&mut self, time: Duration) {
        self.count += 1;
        self.time = self.time.saturating_add(time);
    }
}

/// The stages of runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTotals {
    /// Rows copied into batches.
    pub input: Total,
    /// The model's runs.
    pub infer: Total,
    /// Rows copied out of batches.
    pub output: Total,
}

impl StageTotals {
    fn add(&mut self, stages: Stages) {
        self.input.add(stages.gather);
        self.infer.add(stages.compute);
        self.output.add(stages.scatter);
    }
}

/// The statistics of one loaded model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// When a batch last ended well, since 1970; `None`: never.
    pub last_inference: Option<Duration>,
    /// Rows of batches that ended well, padding not counted.
    pub rows: u64,
    /// Batches that ended well.
    pub batches: u64,
    /// Requests that were answered, from arrival to answer.
    pub success: Total,
    /// Requests that were refused or that failed, and those whose client went away.
    pub fail: Total,
    /// What answered requests waited: all of their time that is not in `compute`.
    pub queue: Total,
    /// What answered requests were charged: the whole of every batch that they had rows in. Where the parts of a request ran
    /// side by side, it is cut to the time that passed.
    pub compute: StageTotals,
    /// Batches that ended well by their rows, padding not counted: no more entries than the largest batch has rows.
    pub by_rows: BTreeMap<Rows, StageTotals>,
}

impl Statistics {
    /// A batch has ended well, at this time since 1970.
    pub(super) fn ran(&mut self, rows: Rows, stages: Stages, at: Duration) {
        self.last_inference = Some(at);
        self.rows += u64::from(rows);
        self.batches += 1;
        self.by_rows.entry(rows).or_default().add(stages);
    }

    /// A request was answered `whole` after its arrival. `stages` are those of all its batches.
    pub(super) fn answered(&mut self, whole: Duration, stages: Stages) {
        let stages = within(whole, stages);
        self.success.add(whole);
        self.queue.add(whole.saturating_sub(stages.total()));
        self.compute.add(stages);
    }

    /// A request had no answer but a refusal, or nobody who waited for it.
    pub(super) fn failed(&mut self, whole: Duration) {
        self.fail.add(whole);
    }
}

/// Stages that together take no longer than `whole`, in the same proportions.
fn within(whole: Duration, stages: Stages) -> Stages {
    let total = stages.gather + stages.compute + stages.scatter;
    if total <= whole {
        return stages;
    }
    let share = whole.as_secs_f64() / total.as_secs_f64();
    let (gather, scatter) = (stages.gather.mul_f64(share).min(whole), stages.scatter.mul_f64(share));
    let scatter = scatter.min(whole - gather);
    Stages { gather, scatter, compute: whole - gather - scatter, ..stages }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(gather: u64, compute: u64, scatter: u64) -> Stages {
        let [gather, compute, scatter] = [gather, compute, scatter].map(Duration::from_millis);
        Stages { gather, compute, scatter, ..Stages::default() }
    }

    #[test]
    fn queue_and_compute_are_the_whole_of_each_answered_request() {
        let mut statistics = Statistics::default();
        for (whole, stages) in [(100, stages(1, 50, 3)), (40, stages(10, 60, 10)), (7, stages(0, 0, 0))] {
            statistics.answered(Duration::from_millis(whole), stages);
        }
        let Statistics { success, queue, compute, .. } = statistics;
        assert_eq!((success.count, success.time), (3, Duration::from_millis(147)));
        assert_eq!([queue.count, compute.input.count, compute.infer.count, compute.output.count], [3; 4]);
        assert_eq!(queue.time + compute.input.time + compute.infer.time + compute.output.time, success.time);
        assert_eq!((compute.input.time, compute.infer.time), (Duration::from_millis(6), Duration::from_millis(80)));
    }

    #[test]
    fn batches_are_counted_by_their_rows() {
        let mut statistics = Statistics::default();
        for (rows, at) in [(4, 1), (1, 2), (4, 3)] {
            statistics.ran(rows, stages(1, 2, 3), Duration::from_secs(at));
        }
        assert_eq!((statistics.rows, statistics.batches), (9, 3));
        assert_eq!(statistics.last_inference, Some(Duration::from_secs(3)));
        let counts: Vec<_> = statistics.by_rows.iter().map(|(rows, totals)| (*rows, totals.infer.count)).collect();
        assert_eq!(counts, [(1, 1), (4, 2)]);
    }
}
