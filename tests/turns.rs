//! Batches of one instance that take turns in its run memory: what is handed out behind a running batch, and what is promised.

#[path = "simulation/memory.rs"]
mod memory;
#[path = "support/plan.rs"]
mod support;

use concertina::scheduler::{
    Action, Dispatch, Input, LimitedBy, MemorySample, ModelPlan, Outcome, RequestMeta, Scheduler,
};
use concertina::units::{ByteSize, DeviceId, InstanceId, Instant, ModelId, Rows};
use memory::{Held, Memory};
use proptest::prelude::*;
use std::time::Duration;
use support::{plan, request};

const DEVICE: DeviceId = DeviceId(0);
/// What a run takes for each of its rows.
const RUN: u64 = 10;
/// What the inputs of a row take.
const STAGED: u64 = 1;

/// A model whose instances copy the inputs of the next batch while one runs: up to 8 rows, so 80 bytes and 8.
fn taking_turns(instances: u32) -> ModelPlan {
    let instances = (0..instances).map(InstanceId).collect();
    ModelPlan { instances, pipeline: 2, staged_unit: Some(ByteSize(STAGED)), max_queue_rows: 10_000, ..plan(0) }
}

fn done(dispatch: &Dispatch) -> Outcome {
    let bytes = ByteSize(RUN * u64::from(dispatch.padded_rows));
    Outcome::Done { duration: Duration::from_millis(9 + u64::from(dispatch.padded_rows)), bytes }
}

fn denied(had: u64) -> Outcome {
    Outcome::OutOfMemory { bytes: ByteSize(had) }
}

/// A scheduler, the batches in flight, and what these take and were promised.
struct Rig {
    scheduler: Scheduler,
    now: Instant,
    plans: Vec<ModelPlan>,
    budget: u64,
    flights: Vec<Dispatch>,
    taken: Memory,
    promised: Memory,
    /// Rows of all batches, in order.
    rows: Vec<Rows>,
    requests: u64,
}

impl Rig {
    fn new(plans: Vec<ModelPlan>, budget: u64) -> Self {
        let mut rig = Self {
            scheduler: Scheduler::new(),
            now: Instant(1),
            plans: plans.clone(),
            budget,
            flights: Vec::new(),
            taken: Memory::default(),
            promised: Memory::default(),
            rows: Vec::new(),
            requests: 0,
        };
        for plan in plans {
            rig.tell(Input::Load(plan));
        }
        rig.memory(budget);
        rig
    }

    fn tell(&mut self, input: Input) {
        self.scheduler.handle(self.now, input);
        while let Some(action) = self.scheduler.poll_action(self.now) {
            if let Action::Dispatch(dispatch) = action {
                self.take(dispatch);
            }
        }
        let reserved: Vec<_> = self.scheduler.device_stats().map(|stats| stats.reserved.0).collect();
        assert_eq!(reserved, [self.promised.promised(DEVICE)], "{:?}", self.flights);
    }

    /// A batch begins, or waits behind others of its instance: the device must have room for all that may come of it.
    fn take(&mut self, dispatch: Dispatch) {
        let plan = self.plans.iter().find(|plan| plan.model == dispatch.model).expect("only loaded models run");
        let rows = u64::from(dispatch.padded_rows);
        let staged = plan.staged_unit.map(|unit| unit.0 * rows);
        let before = self.taken.needed(DEVICE);
        // What is not predicted to fit may be tried with all that there is, if nothing else runs.
        let peak = if before == 0 { dispatch.bytes.0.min(RUN * rows) } else { RUN * rows };
        let held = Held { batch: dispatch.batch, peak, staged };
        self.taken.hold(DEVICE, dispatch.instance, held);
        self.promised.hold(DEVICE, dispatch.instance, Held { peak: dispatch.bytes.0, ..held });
        let needed = self.taken.needed(DEVICE);
        let fits = needed <= self.budget.max(before);
        assert!(fits, "{needed} bytes of {}, {before} before {dispatch:?}", self.budget);
        self.rows.push(dispatch.rows);
        self.flights.push(dispatch);
    }

    fn memory(&mut self, budget: u64) {
        self.budget = budget;
        let sample = MemorySample { device: DEVICE, budget: ByteSize(budget), capacity: ByteSize(10_000) };
        self.tell(Input::Memory(sample));
    }

    fn arrive(&mut self, model: u32, rows: Rows) {
        self.requests += 1;
        self.tell(Input::Arrive(RequestMeta { model: ModelId(model), rows, ..request(self.requests) }));
    }

    /// Ends one of the batches in flight, counted from the oldest.
    fn end(&mut self, at: usize, outcome: impl FnOnce(&Dispatch) -> Outcome) {
        let dispatch = self.flights.remove(at);
        self.taken.release(dispatch.batch);
        self.promised.release(dispatch.batch);
        self.now = self.now + Duration::from_millis(10);
        self.tell(Input::Complete(dispatch.batch, outcome(&dispatch)));
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(wake) = self.scheduler.poll_timeout().filter(|wake| *wake <= end) {
            self.now = wake;
            self.memory(self.budget);
        }
        self.now = end;
    }
}

#[test]
fn a_batch_waits_behind_another_one_where_there_is_room_for_its_inputs() {
    // Rows that wait, the budget, and the batches that are handed out before one has ended.
    let table: [(Rows, u64, &[Rows]); 9] = [
        (64, 1000, &[8, 8]),
        (64, 88, &[8, 8]),
        // A row less leaves room for the inputs of the next batch.
        (64, 87, &[7, 7]),
        (64, 80, &[7, 7]),
        (64, 22, &[2, 2]),
        (64, 11, &[1, 1]),
        // A run of one row, and not a byte more.
        (64, 10, &[1]),
        // Nobody follows, so no room is left for anybody.
        (8, 80, &[8]),
        (8, 87, &[8]),
    ];
    for (rows, budget, batches) in table {
        let mut rig = Rig::new(vec![taking_turns(1)], budget);
        rig.arrive(0, rows);
        assert_eq!(rig.rows, batches, "{rows} rows within {budget} bytes");
    }
    let apart = |budget| {
        let mut rig = Rig::new(vec![ModelPlan { staged_unit: None, ..taking_turns(1) }], budget);
        rig.arrive(0, 64);
        rig.rows
    };
    assert_eq!((apart(159), apart(160)), (vec![8], vec![8, 8]), "where nothing is taken over there is room for both");
}

#[test]
fn an_instance_that_takes_turns_is_never_without_a_next_batch() {
    for budget in [88, 80, 45] {
        let mut rig = Rig::new(vec![taking_turns(1)], budget);
        rig.arrive(0, 800);
        let largest = rig.rows[0];
        for _ in 0..20 {
            assert_eq!(rig.flights.len(), 2, "within {budget} bytes");
            assert!(rig.flights.iter().all(|flight| flight.rows == largest), "{:?}", rig.flights);
            rig.end(0, done);
        }
    }
}

#[test]
fn instances_share_what_one_of_them_does_not_take_over() {
    for (budget, batches) in [(176, 4), (175, 3), (160, 2)] {
        let mut rig = Rig::new(vec![taking_turns(2)], budget);
        rig.arrive(0, 64);
        assert_eq!(rig.flights.len(), batches, "{:?} within {budget} bytes", rig.rows);
        let first = rig.flights.iter().filter(|flight| flight.instance == InstanceId(0)).count();
        assert!((1..batches).contains(&first), "nobody is idle");
    }
}

#[test]
fn rows_that_find_no_memory_run_in_halves_whoever_waits_behind_them() {
    for failing in [0, 1] {
        let mut rig = Rig::new(vec![taking_turns(1)], 88);
        rig.arrive(0, 8);
        rig.arrive(0, 8);
        assert_eq!(rig.rows, [8, 8]);
        if failing == 1 {
            rig.end(0, done);
        }
        rig.end(0, |_| denied(40));
        while !rig.flights.is_empty() {
            rig.end(0, done);
        }
        assert_eq!(rig.rows, [8, 8, 4, 4], "the batch {failing}");
        assert!(rig.scheduler.is_idle());
    }
}

#[test]
fn a_budget_that_shrinks_takes_nothing_from_those_in_flight() {
    let mut rig = Rig::new(vec![taking_turns(1)], 88);
    rig.arrive(0, 64);
    rig.memory(33);
    rig.end(0, done);
    assert_eq!(rig.rows, [8, 8], "the next one has more than there is already");
    rig.end(0, done);
    assert_eq!(rig.rows, [8, 8, 3, 3]);
    assert!(rig.flights.iter().all(|flight| flight.limited_by == LimitedBy::Bytes));
    rig.memory(88);
    assert_eq!(rig.rows.len(), 4, "it holds two already");
    rig.end(0, done);
    assert_eq!(rig.rows, [8, 8, 3, 3, 8], "which needs more than what it takes over, and there is more");
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Arrive { model: u32, rows: Rows },
    End { at: usize, denied: bool },
    Budget(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..2_u32, 1..30_u32).prop_map(|(model, rows)| Step::Arrive { model, rows }),
        4 => (0..9_usize, prop::bool::weighted(0.15)).prop_map(|(at, denied)| Step::End { at, denied }),
        1 => (0..300_u64).prop_map(Step::Budget),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    /// Two instances that take turns and one that does not are on one device. Each dispatch is checked against what the batches
    /// take if each instance runs them one after the other, and each end against a second set of books.
    #[test]
    fn what_is_promised_suffices_whatever_ends_when(steps in steps(), budget in 0..300_u64) {
        let apart = ModelPlan { instances: vec![InstanceId(7)], pipeline: 2, max_queue_rows: 10_000, ..plan(1) };
        let mut rig = Rig::new(vec![taking_turns(2), apart], budget);
        for step in steps {
            match step {
                Step::Arrive { model, rows } => rig.arrive(model, rows),
                Step::End { at, denied: is_denied } if at < rig.flights.len() => {
                    rig.end(at, |flight| if is_denied { denied(0) } else { done(flight) });
                }
                Step::End { .. } => rig.pass(Duration::from_millis(7)),
                Step::Budget(budget) => rig.memory(budget),
            }
        }
        rig.memory(300);
        for _ in 0..5000 {
            if rig.scheduler.is_idle() {
                break;
            }
            if rig.flights.is_empty() { rig.pass(Duration::from_millis(50)) } else { rig.end(0, done) }
        }
        prop_assert!(rig.scheduler.is_idle(), "{:?}", rig.flights);
        prop_assert_eq!(rig.scheduler.device_stats().map(|stats| stats.reserved.0).collect::<Vec<_>>(), [0]);
    }
}
