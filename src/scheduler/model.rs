//! One model inside the scheduler: its plan, instances, queue and costs.

use super::cost::{CostModel, Estimate};
use super::echo::Echo;
use super::policy::{Bounds, Ladder, Room, form_batch};
use super::queue::Queue;
use super::{LimitedBy, ModelPlan};
use crate::units::{ByteSize, ClassId, InstanceId, Instant, Rows};
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
    /// The class that ran last, with its units.
    recent: Option<(ClassId, u64)>,
    /// What tends to follow its answers.
    pub(super) echo: Echo,
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
        Self {
            plan,
            instances,
            queue,
            cost,
            pace: None,
            recent: None,
            echo: Echo::default(),
            rows_in_flight: 0,
            in_line: false,
        }
    }

    /// Its batch sizes.
    pub(super) fn ladder(&self) -> Ladder<'_> {
        Ladder { sizes: &self.plan.ladder, rounding: self.plan.rounding }
    }

    /// The instance that should run the next batch, if one may take it: of the idle ones that which ran last, since its memory is
    /// warm and committed (and what the others hold can be given back); of the busy ones that which is free first.
    pub(super) fn slot(&self) -> Option<Instance> {
        let may_take = |instance: &&Instance| instance.held < self.plan.pipeline.max(1);
        let wait = |instance: &Instance| {
            if instance.held == 0 { u64::MAX - instance.free_at.0 } else { instance.free_at.0 }
        };
        self.instances.iter().filter(may_take).min_by_key(|instance| (instance.held, wait(instance))).copied()
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
        self.recent = Some((class, units));
        let Some(per_row) = self.seconds_per_row(class, units, budget) else { return };
        let per_unit = per_row / units.max(1) as f64;
        let blend = |old: f64, new: f64| old + PACE_WEIGHT * (new - old);
        self.pace = Some(match self.pace {
            None => Pace { per_row, per_unit },
            Some(pace) => Pace { per_row: blend(pace.per_row, per_row), per_unit: blend(pace.per_unit, per_unit) },
        });
    }

    /// The class that ran last, with its units.
    pub(super) fn recent(&self) -> Option<(ClassId, u64)> {
        self.recent
    }

    /// The budget has changed. The pace changes with it at once: who waits for the next batches to show it learns of a squeeze
    /// by its own latency.
    pub(super) fn budget_changed(&mut self, before: ByteSize, now: ByteSize) {
        let (Some(pace), Some((class, units))) = (self.pace, self.recent) else { return };
        let cost = |budget| self.seconds_per_row(class, units, budget);
        if let (Some(old), Some(new)) = (cost(before), cost(now)) {
            let factor = new / old.max(f64::MIN_POSITIVE);
            self.pace = Some(Pace { per_row: pace.per_row * factor, per_unit: pace.per_unit * factor });
        }
    }

    /// Seconds of one instance per row, all instances at work on the largest useful batches within `budget`, which they share.
    /// Where that leaves them too little, fewer of them do more.
    fn seconds_per_row(&self, class: ClassId, units: u64, budget: ByteSize) -> Option<f64> {
        let estimate = self.cost.estimate(class, units);
        let instances = self.instances.len().max(1) as u64;
        let mut best = None;
        let mut at_work = instances;
        while at_work > 0 {
            let (rows, fit) = largest_batch(self.ladder(), estimate, ByteSize(budget.0 / at_work));
            // One row is taken to run when nothing else does: the prediction may be wrong.
            if fit != Fit::None || at_work == 1 {
                let per_row = estimate.seconds(rows)? / f64::from(rows) * instances as f64 / at_work as f64;
                best = Some(best.map_or(per_row, |best: f64| best.min(per_row)));
            }
            if fit == Fit::Useful {
                break;
            }
            at_work /= 2;
        }
        best
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

/// How well a budget serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    /// The largest useful batch fits.
    Useful,
    /// A smaller one fits.
    Short,
    /// Not even one row is predicted to fit.
    None,
}

/// The rows of the largest useful batch within `budget`.
fn largest_batch(ladder: Ladder<'_>, estimate: Estimate<'_>, budget: ByteSize) -> (Rows, Fit) {
    let bounds = Bounds { rows: u64::MAX, knee: estimate.knee(), ceiling: None, room: Room::of(budget) };
    match form_batch(ladder, estimate, bounds) {
        Ok(size) if size.limited_by == LimitedBy::Bytes => (size.padded_rows, Fit::Short),
        Ok(size) => (size.padded_rows, Fit::Useful),
        Err(_) => (ladder.smallest(), Fit::None),
    }
}
