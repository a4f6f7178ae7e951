//! Texts of mixed lengths at saturation, in virtual time: what packing gives against padding in order of arrival.

#[path = "simulation/random.rs"]
#[allow(dead_code, reason = "each test program uses a part")]
mod random;
mod support {
    #[allow(dead_code, reason = "each test program uses a part")]
    pub(crate) mod plan;
}

use concertina::scheduler::{
    Action, Dispatch, Input, ModelPlan, Observation, Outcome, Packing, RequestMeta, Scheduler,
};
use concertina::units::{BatchId, ByteSize, ClassId, FamilyId, InstanceId, Instant, RequestId, Rows};
use random::Random;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use support::plan::{plan, request};

/// Milliseconds of a run of minilm on one of two busy cores (EPYC, ONNX Runtime 1.31.1): for each length those of 1, 2, 4, 8 and
/// 16 rows.
const MEASURED: [(u64, [f64; 5]); 6] = [
    (8, [2.64, 3.91, 5.84, 9.48, 17.16]),
    (16, [3.99, 5.83, 9.57, 17.09, 31.64]),
    (32, [5.73, 9.46, 17.25, 31.99, 62.02]),
    (64, [9.36, 17.1, 32.61, 67.04, 134.24]),
    (128, [17.61, 33.06, 70.24, 143.39, 298.55]),
    (256, [35.94, 73.59, 154.52, 320.67, 664.76]),
];
const SIZES: [Rows; 5] = [1, 2, 4, 8, 16];
const CLIENTS: u64 = 128;
/// What is left out at the beginning: which lengths wait is something else then.
const BEGINNING: Duration = Duration::from_secs(5);
const END: Duration = Duration::from_secs(65);

/// The value at `at` of lines through points.
fn line(points: impl Iterator<Item = (f64, f64)>, at: f64) -> f64 {
    let points: Vec<(f64, f64)> = points.collect();
    let upper = points.partition_point(|(x, _)| *x < at).clamp(1, points.len() - 1);
    let ((x0, y0), (x1, y1)) = (points[upper - 1], points[upper]);
    y0 + (y1 - y0) * (at - x0) / (x1 - x0)
}

fn seconds(length: u64, rows: Rows) -> f64 {
    let of_length = |(length, millis): &(u64, [f64; 5])| {
        let points = SIZES.iter().zip(millis).map(|(rows, millis)| (f64::from(*rows), *millis));
        (*length as f64, line(points, f64::from(rows)))
    };
    line(MEASURED.iter().map(of_length), length as f64) / 1000.0
}

/// The lengths that rows are padded to: as for encoders of text.
fn padded(length: u64) -> u64 {
    let step = |length: &u64| {
        Some(length + (length.next_power_of_two() / if length.is_power_of_two() { 8 } else { 16 }).max(4))
    };
    std::iter::successors(Some(8), step).find(|padded| *padded >= length).expect("there is no end")
}

fn model(packing: Packing) -> ModelPlan {
    let run = |(length, rows): (u64, Rows)| Observation {
        class: ClassId(length as u32),
        units: 3 * length,
        rows,
        duration: Duration::from_secs_f64(seconds(length, rows)),
        bytes: ByteSize(length * u64::from(rows)),
    };
    let runs = MEASURED.iter().flat_map(|(length, _)| SIZES.map(|rows| run((*length, rows))));
    ModelPlan {
        instances: vec![InstanceId(0), InstanceId(1)],
        ladder: vec![1, 2, 4, 8, 16, 32, 64, 128],
        pipeline: 2,
        max_queue_rows: 1000,
        max_queue_bytes: ByteSize(1 << 30),
        knee_tolerance: 0.02,
        packing,
        observations: runs.collect(),
        ..plan(0)
    }
}

/// A model with two instances, and clients that each send their next text when they have their answer.
struct World {
    scheduler: Scheduler,
    now: Instant,
    random: Random,
    /// Lengths of texts, and when they were sent.
    waiting: BTreeMap<RequestId, (u64, Instant)>,
    /// What each instance has been given, the running batch first, with the time when that one ends.
    given: [VecDeque<Dispatch>; 2],
    ends: [Option<(Instant, Duration)>; 2],
    next: u64,
    latencies: Vec<Duration>,
}

impl World {
    fn new(packing: Packing, seed: u64) -> Self {
        let mut scheduler = Scheduler::new();
        scheduler.handle(Instant(1), Input::Load(model(packing)));
        Self {
            scheduler,
            now: Instant(1),
            random: Random(seed),
            waiting: BTreeMap::new(),
            given: [VecDeque::new(), VecDeque::new()],
            ends: [None, None],
            next: 0,
            latencies: Vec::new(),
        }
    }

    /// Log-normal: the sum of twelve uniform numbers is about normal.
    fn length(&mut self) -> u64 {
        let normal = (0..12).map(|_| self.random.below(1 << 32) as f64 / (1u64 << 32) as f64).sum::<f64>() - 6.0;
        ((32.0 * (0.8 * normal).exp()) as u64).clamp(8, 256)
    }

    fn arrive(&mut self) {
        let length = self.length();
        let (id, class) = (RequestId(self.next), padded(length));
        self.next += 1;
        self.waiting.insert(id, (length, self.now));
        let meta =
            RequestMeta { class: ClassId(class as u32), family: Some(FamilyId(0)), units: 3 * class, ..request(id.0) };
        self.scheduler.handle(self.now, Input::Arrive(meta));
    }

    fn poll(&mut self) {
        while let Some(action) = self.scheduler.poll_action(self.now) {
            match action {
                Action::Dispatch(dispatch) => {
                    let at = dispatch.instance.0 as usize;
                    self.given[at].push_back(dispatch);
                    self.begin(at);
                }
                Action::Finish(id) => {
                    let (_, sent) = self.waiting.remove(&id).expect("it waits");
                    self.latencies.push(self.now.since(sent));
                    self.arrive();
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Begins the next batch of an idle instance. No run takes as long as the one before, and some are held up.
    fn begin(&mut self, at: usize) {
        if let (None, Some(dispatch)) = (self.ends[at], self.given[at].front()) {
            let longest = dispatch.parts.iter().map(|part| padded(self.waiting[&part.request].0)).max();
            let held_up = if self.random.percent(2) { 2.0 } else { 1.0 };
            let noise = held_up * (0.95 + self.random.below(1000) as f64 / 1e4);
            let duration = Duration::from_secs_f64(noise * seconds(longest.expect("rows"), dispatch.rows));
            self.ends[at] = Some((self.now + duration, duration));
        }
    }

    fn run(mut self) -> Report {
        (0..CLIENTS).for_each(|_| self.arrive());
        self.poll();
        let (mut skipped, end) = (None, self.now + END);
        loop {
            let ended = (0..2).filter_map(|at| Some((self.ends[at]?.0, at))).min();
            let wake = self.scheduler.poll_timeout();
            let (until, at) = match (ended, wake) {
                (Some((end, at)), wake) if wake.is_none_or(|wake| end <= wake) => (end, Some(at)),
                (_, Some(wake)) => (wake, None),
                (_, None) => panic!("nothing will happen"),
            };
            if until > end {
                break;
            }
            self.now = until;
            if self.now.since(Instant(1)) > BEGINNING {
                skipped.get_or_insert(self.latencies.len());
            }
            if let Some(at) = at {
                let batch: Dispatch = self.given[at].pop_front().expect("it runs");
                let (_, duration) = self.ends[at].take().expect("it runs");
                let outcome = Outcome::Done { duration, bytes: ByteSize(1) };
                self.scheduler.handle(self.now, Input::Complete(BatchId(batch.batch.0), outcome));
                self.begin(at);
            }
            self.poll();
        }
        let mut latencies = self.latencies.split_off(skipped.expect("it lasts longer"));
        latencies.sort_unstable();
        let part = |part: f64| latencies[(part * latencies.len() as f64) as usize];
        Report {
            rows_per_second: latencies.len() as f64 / (END - BEGINNING).as_secs_f64(),
            median: part(0.5),
            p99: part(0.99),
            longest: *latencies.last().expect("answers"),
        }
    }
}

#[derive(Debug)]
struct Report {
    rows_per_second: f64,
    median: Duration,
    p99: Duration,
    longest: Duration,
}

#[test]
fn packing_gives_more_rows_than_order_of_arrival_and_keeps_nobody_waiting_longer() {
    for seed in 0..4 {
        let near = World::new(Packing::Near, seed).run();
        let fifo = World::new(Packing::Fifo, seed).run();
        assert!(near.rows_per_second > 1.3 * fifo.rows_per_second, "{near:?} {fifo:?}");
        assert!(near.median < fifo.median && near.p99 < fifo.p99, "{near:?} {fifo:?}");
        assert!(near.longest < 2 * fifo.longest, "{near:?} {fifo:?}");
    }
}
