//! One model inside the scheduler: its plan, instances, queue and costs.

use super::ModelPlan;
use super::cost::{CostModel, Estimate};
use super::policy::{Bounds, Ladder, form_batch};
use super::queue::Queue;
use crate::units::{ByteSize, ClassId, InstanceId, Instant};
use std::time::Duration;

/// The weight of the latest batch in the pace of a model.
const PACE_WEIGHT: f64 = 0.1;

/// One instance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instance {
    /// Its id.
    pub(super) id: InstanceId,
    /// Batches it holds.
    pub(super) held: u32,
    /// When it is predicted to have run them.
    pub(super) free_at: Instant,
}

/// What serving costs at the knee, as a mean over the latest batches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Seconds of one instance per row.
    pub(super) per_row: f64,
    /// Seconds of one instance per element.
    pub(super) per_unit: f64,
}

/// One model.
#[derive(Clone, Debug)]
pub(super) struct Model {
    /// How it is to be run.
    pub(super) plan: ModelPlan,
    /// The instances that work.
    pub(super) instances: Vec<Instance>,
    /// Its queue.
    pub(super) queue: Queue,
    /// Its costs.
    pub(super) cost: CostModel,
    /// What serving costs; `None` as long as nothing is known.
    pub(super) pace: Option<Pace>,
    /// Rows in flight.
    pub(super) rows_in_flight: u64,
    /// Whether it is already in line to be looked at.
    pub(super) in_line: bool,
}

impl Model {
    /// A model without instances and costs.
    pub(super) fn new(plan: ModelPlan) -> Self {
        let cost = CostModel::new(&plan.ladder, plan.knee_tolerance);
        let (instances, queue) = (Vec::new(), Queue::default());
        Self { plan, instances, queue, cost, pace: None, rows_in_flight: 0, in_line: false }
    }

    /// Its batch sizes.
    pub(super) fn ladder(&self) -> Ladder<'_> {
        Ladder { sizes: &self.plan.ladder, round_up: self.plan.round_up }
    }

    /// The instance that should run the next batch, if one may take it.
    pub(super) fn slot(&self) -> Option<Instance> {
        let may_take = |instance: &&Instance| instance.held < self.plan.pipeline.max(1);
        self.instances.iter().filter(may_take).min_by_key(|instance| (instance.held, instance.free_at)).copied()
    }

    /// Instances that have nothing to do.
    pub(super) fn idle_instances(&self) -> u64 {
        self.instances.iter().filter(|instance| instance.held == 0).count() as u64
    }

    /// An instance has taken a batch.
    pub(super) fn occupy(&mut self, id: InstanceId, now: Instant, duration: Option<Duration>) {
        if let Some(instance) = self.instances.iter_mut().find(|instance| instance.id == id) {
            instance.held += 1;
            instance.free_at = instance.free_at.max(now) + duration.unwrap_or_default();
        }
    }

    /// An instance has ended a batch; `next` is the predicted duration of what it still holds.
    pub(super) fn vacate(&mut self, id: InstanceId, now: Instant, next: Duration) {
        if let Some(instance) = self.instances.iter_mut().find(|instance| instance.id == id) {
            instance.held -= 1;
            instance.free_at = now + next;
        }
    }

    /// Learns what serving a class costs within `budget`, from its predictions.
    pub(super) fn note_pace(&mut self, class: ClassId, units: u64, budget: ByteSize) {
        let estimate = self.cost.estimate(class, units);
        let Some(per_row) = seconds_per_row(self.ladder(), estimate, budget) else { return };
        let per_unit = per_row / units.max(1) as f64;
        let blend = |old: f64, new: f64| old + PACE_WEIGHT * (new - old);
        self.pace = Some(match self.pace {
            None => Pace { per_row, per_unit },
            Some(pace) => Pace { per_row: blend(pace.per_row, per_row), per_unit: blend(pace.per_unit, per_unit) },
        });
    }

    /// How long the instances need for so many elements; `None` as long as nothing is known.
    pub(super) fn drain_time(&self, units: u128) -> Option<Duration> {
        let seconds = units as f64 * self.pace?.per_unit / self.instances.len().max(1) as f64;
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// The bytes that one row needs.
    pub(super) fn least_bytes(&self, class: ClassId, units: u64) -> ByteSize {
        self.cost.estimate(class, units).bytes(self.ladder().smallest())
    }
}

/// Seconds per row of the largest useful batch within `budget`.
fn seconds_per_row(ladder: Ladder<'_>, estimate: Estimate<'_>, budget: ByteSize) -> Option<f64> {
    let bounds = Bounds { rows: u64::MAX, knee: estimate.knee(), ceiling: None, bytes: budget };
    let rows = form_batch(ladder, estimate, bounds).map_or_else(|_| ladder.smallest(), |size| size.padded_rows);
    estimate.seconds(rows).map(|seconds| seconds / f64::from(rows))
}
