//! Packing: which rows of different lengths share a batch, against a search through all batches that there are.

#[path = "simulation/random.rs"]
#[allow(dead_code, reason = "each test program uses a part")]
mod random;
mod support {
    pub(crate) mod plan;
}

use concertina::scheduler::{
    Action, Dispatch, Input, LimitedBy, ModelPlan, Observation, Outcome, Packing, RequestMeta, Scheduler,
};
use concertina::units::{BatchId, ByteSize, ClassId, FamilyId, Instant, RequestId, Rows};
use random::Random;
use std::collections::BTreeMap;
use std::time::Duration;
use support::plan::{plan, request};

const LARGEST: Rows = 32;
/// As in `scheduler::pack`.
const MAX_PASSED_OVER: usize = 4;
const ABOUT_EQUAL: f64 = 0.25;

/// 1 ms, and 20 µs for each unit of each row.
fn seconds(units: u64, rows: Rows) -> f64 {
    1e-3 + 20e-6 * units as f64 * f64::from(rows)
}

/// A model that knows the costs of classes of 1 to 12 units, which are one family.
fn lengths(packing: Packing) -> ModelPlan {
    let run = |units: u64, rows: Rows| Observation {
        class: ClassId(units as u32),
        units,
        rows,
        duration: Duration::from_secs_f64(seconds(units, rows)),
        bytes: ByteSize(units * u64::from(rows)),
    };
    let runs = (1..=12).flat_map(|units| [1, 8, LARGEST].map(|rows| run(units, rows)));
    let ladder = vec![1, 2, 4, 8, 16, LARGEST];
    ModelPlan { ladder, packing, knee_tolerance: 0.0, max_queue_rows: 1000, observations: runs.collect(), ..plan(0) }
}

fn row(id: u64, units: u64) -> RequestMeta {
    let family = Some(FamilyId(0));
    RequestMeta { class: ClassId(units as u32), family, units, priority: 1, ..request(id) }
}

/// One instance that is told when to end.
struct Rig {
    scheduler: Scheduler,
    now: Instant,
    units: BTreeMap<RequestId, u64>,
    running: Option<BatchId>,
}

impl Rig {
    fn new(plan: ModelPlan) -> Self {
        let mut scheduler = Scheduler::new();
        scheduler.handle(Instant(1), Input::Load(plan));
        Self { scheduler, now: Instant(1), units: BTreeMap::new(), running: None }
    }

    fn arrive(&mut self, meta: RequestMeta) -> Option<Dispatch> {
        self.units.insert(meta.id, meta.units);
        self.scheduler.handle(self.now, Input::Arrive(meta));
        self.next()
    }

    /// Ends the batch as predicted and says which one is next.
    fn end(&mut self) -> Option<Dispatch> {
        let batch = self.running.take().expect("something runs");
        let outcome = Outcome::Failed;
        // It is of no interest whether the first one fails; what was learned must stay as it was.
        self.now = self.now + Duration::from_millis(1);
        self.scheduler.handle(self.now, Input::Complete(batch, outcome));
        self.next()
    }

    fn done(&mut self, dispatch: &Dispatch) -> Option<Dispatch> {
        let units = self.units_of(dispatch).into_iter().max().expect("a batch has rows");
        let duration = Duration::from_secs_f64(seconds(units, dispatch.rows));
        self.now = self.now + duration;
        let outcome = Outcome::Done { duration, bytes: ByteSize(units * u64::from(dispatch.rows)) };
        self.running = None;
        self.scheduler.handle(self.now, Input::Complete(dispatch.batch, outcome));
        self.next()
    }

    fn next(&mut self) -> Option<Dispatch> {
        let mut found = None;
        while let Some(action) = self.scheduler.poll_action(self.now) {
            if let Action::Dispatch(dispatch) = action {
                assert!(self.running.replace(dispatch.batch).is_none() && found.replace(dispatch).is_none());
            }
        }
        found
    }

    fn units_of(&self, dispatch: &Dispatch) -> Vec<u64> {
        dispatch.parts.iter().flat_map(|part| (0..part.rows).map(|_| self.units[&part.request])).collect()
    }
}

/// What the rows of a batch cost among their like, for each second that it takes padded to the longest of them.
fn rate(units: &[u64]) -> f64 {
    let worth: f64 = units.iter().map(|units| seconds(*units, LARGEST) / f64::from(LARGEST)).sum();
    worth / seconds(*units.iter().max().expect("rows"), units.len() as Rows)
}

/// The best batch whose longest row has so many units: the next shorter ones go with it, however many pay.
fn padded_to(waiting: &[u64], longest: u64) -> f64 {
    let mut sorted: Vec<u64> = waiting.iter().copied().filter(|units| *units <= longest).collect();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let most = sorted.len().min(LARGEST as usize);
    (1..=most).map(|rows| rate(&sorted[..rows])).fold(0.0, f64::max)
}

/// The best of all batches.
fn best(waiting: &[u64]) -> f64 {
    waiting.iter().map(|longest| padded_to(waiting, *longest)).fold(0.0, f64::max)
}

#[test]
fn a_batch_that_is_worth_about_the_most_runs_and_of_those_the_one_with_the_oldest() {
    let mut random = Random(7);
    let (mut padded, mut oldest) = (0, 0);
    for round in 0..300 {
        let mut rig = Rig::new(lengths(Packing::Near));
        rig.arrive(row(0, 1)).expect("an idle instance takes what comes");
        let waiting: Vec<u64> = (0..random.between(1, 80)).map(|_| random.between(1, 12)).collect();
        for (id, units) in waiting.iter().enumerate() {
            assert_eq!(rig.arrive(row(id as u64 + 1, *units)), None);
        }
        let dispatch = rig.end().expect("rows wait");
        let units = rig.units_of(&dispatch);
        let (found, most) = (rate(&units), best(&waiting));
        assert!(
            found > 0.999 * (1.0 - ABOUT_EQUAL) * most,
            "round {round}: {found} of {most} with {units:?} of {waiting:?}"
        );
        // The first one came before all others: it runs where a batch that is as long as it is worth about as much.
        if padded_to(&waiting, waiting[0]) > 1.001 * (1.0 - ABOUT_EQUAL) * most {
            assert!(
                dispatch.parts.iter().any(|part| part.request == RequestId(1)),
                "round {round}: {units:?} of {waiting:?}"
            );
            oldest += 1;
        }
        padded += usize::from(units.iter().any(|other| *other != units[0]));
        let longest = *units.iter().max().expect("rows");
        let predicted = dispatch.duration.expect("known").as_secs_f64();
        assert!(
            (predicted - seconds(longest, dispatch.rows)).abs() < 1e-6,
            "round {round}: it is predicted as it runs"
        );
    }
    assert!(padded > 100, "rows of different lengths share {padded} of 300 batches");
    assert!(oldest > 100, "the oldest one is in {oldest} of 300 batches");
}

#[test]
fn a_head_that_packs_badly_is_left_out_four_times_and_no_oftener() {
    let mut rig = Rig::new(lengths(Packing::Near));
    let mut dispatch = rig.arrive(row(0, 1)).expect("idle");
    assert_eq!(rig.arrive(row(1, 12)), None);
    let mut next = 2;
    let mut left_out = 0;
    loop {
        // Full batches of short rows: none of them is as good with the long one in it.
        for _ in 0..LARGEST {
            rig.arrive(row(next, 1));
            next += 1;
        }
        dispatch = rig.done(&dispatch).expect("rows wait");
        if dispatch.parts.iter().any(|part| part.request == RequestId(1)) {
            break;
        }
        left_out += 1;
        assert!(left_out <= MAX_PASSED_OVER, "it was left out of {left_out} batches");
    }
    assert_eq!(left_out, MAX_PASSED_OVER, "it does pay to leave it out");
}

#[test]
fn a_head_in_a_hurry_is_not_left_out() {
    for (slack, expected) in [(Duration::from_millis(16), true), (Duration::from_secs(10), false)] {
        let mut rig = Rig::new(lengths(Packing::Near));
        let first = rig.arrive(row(0, 1)).expect("idle");
        // A full batch of rows as long as it takes 8.7 ms.
        let deadline = Some(rig.now + slack);
        rig.arrive(RequestMeta { deadline, ..row(1, 12) });
        (2..40).for_each(|id| drop(rig.arrive(row(id, 1))));
        let second = rig.done(&first).expect("rows wait");
        let taken = second.parts.iter().any(|part| part.request == RequestId(1));
        assert_eq!(taken, expected, "{slack:?}");
    }
}

#[test]
fn rows_are_padded_in_order_of_arrival_where_that_is_asked_for() {
    let mut rig = Rig::new(lengths(Packing::Fifo));
    let first = rig.arrive(row(0, 1)).expect("idle");
    for id in 1..=40 {
        rig.arrive(row(id, if id == 20 { 12 } else { 1 + id % 3 }));
    }
    let second = rig.done(&first).expect("rows wait");
    let ids: Vec<u64> = second.parts.iter().map(|part| part.request.0).collect();
    assert_eq!((ids, second.limited_by), ((1..=32).collect(), LimitedBy::Ladder));
    assert_eq!(second.bytes, ByteSize(12 * 32), "as long as the longest");
}

#[test]
fn rows_of_no_family_or_of_unknown_cost_share_batches_with_their_like_only() {
    for (family, known) in [(None, true), (Some(FamilyId(0)), false)] {
        let mut model = lengths(Packing::Near);
        if !known {
            model.observations.clear();
        }
        let mut rig = Rig::new(model);
        rig.arrive(RequestMeta { family, ..row(0, 1) }).expect("idle");
        (1..=20).for_each(|id| drop(rig.arrive(RequestMeta { family, ..row(id, 2 + id % 4) })));
        let dispatch = rig.end().expect("rows wait");
        let units = rig.units_of(&dispatch);
        assert_eq!(units, [3; 5], "those of the oldest");
    }
}
