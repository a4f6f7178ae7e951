//! Random loads, failures and squeezes against the scheduler, in virtual time.
//!
//! `CONCERTINA_SEED` repeats a run, `CONCERTINA_SIM_REQUESTS` makes it longer or shorter. A failure prints its seed.

#[path = "simulation/memory.rs"]
mod memory;
#[path = "simulation/random.rs"]
mod random;
#[path = "simulation/reference.rs"]
mod reference;
#[path = "simulation/shadow.rs"]
mod shadow;
#[path = "simulation/world.rs"]
mod world;

use concertina::scheduler::{Action, Input, ModelPlan, Outcome, Packing, RequestMeta, Rounding, Scheduler};
use concertina::units::{
    BatchId, ByteSize, ClassId, DeviceId, FamilyId, InstanceId, Instant, ModelId, RequestId, Rows,
};
use random::Random;
use reference::Reference;
use std::collections::BTreeMap;
use std::time::Duration;
use world::{Scenario, World};

const DEFAULT_SEED: u64 = 20_240_601;
const DEFAULT_REQUESTS: u64 = 200_000;
const REQUESTS_PER_SCENARIO: u64 = 1000;

#[test]
fn invariants_hold_under_random_loads_failures_and_squeezes() {
    let (seed, requests) =
        (from_env("CONCERTINA_SEED", DEFAULT_SEED), from_env("CONCERTINA_SIM_REQUESTS", DEFAULT_REQUESTS));
    let mut totals: BTreeMap<String, u64> = BTreeMap::new();
    for round in 0..requests.div_ceil(REQUESTS_PER_SCENARIO) {
        let seed = seed.wrapping_add(round);
        let mut random = Random(seed);
        let scenario = Scenario::random(&mut random, REQUESTS_PER_SCENARIO.min(requests));
        let shown = format!("{scenario:?}");
        let _shown = OnPanic(format!("repeat with CONCERTINA_SEED={seed} CONCERTINA_SIM_REQUESTS=1000: {shown}"));
        let mut world = World::new(random, scenario);
        world.run();
        *totals.entry("finished".to_owned()).or_default() += world.shadow.finished;
        let rejected = world.shadow.rejected.iter().map(|(name, count)| ((*name).to_owned(), *count));
        for (name, count) in rejected.chain(world.shadow.limits) {
            *totals.entry(name).or_default() += count;
        }
    }
    println!("{totals:?}");
    if requests >= DEFAULT_REQUESTS {
        for name in [
            "finished",
            "QueueFull",
            "TooLarge",
            "DeadlineExceeded",
            "MemoryExhausted",
            "Draining",
            "Unhealthy",
            "Failed",
            "Rows",
            "Bytes",
            "Knee",
            "Deadline",
            "Ladder",
            "Padding",
            "Retry",
        ] {
            assert!(
                totals.get(name).is_some_and(|count| *count >= 20),
                "the simulation hardly reaches {name}: {totals:?}"
            );
        }
    }
}

#[test]
fn a_naive_batcher_dispatches_the_same_batches() {
    let seed = from_env("CONCERTINA_SEED", DEFAULT_SEED);
    for round in 0..60 {
        let seed = seed.wrapping_add(round);
        let _shown = OnPanic(format!("repeat with CONCERTINA_SEED={seed}"));
        compare_with_reference(&mut Random(seed));
    }
}

#[test]
fn the_same_inputs_give_the_same_actions() {
    let run = |seed| {
        let mut random = Random(seed);
        let scenario = Scenario::random(&mut random, 300);
        let mut world = World::new(random, scenario);
        world.keeps_log = true;
        world.run();
        world.log
    };
    for seed in 0..20 {
        assert_eq!(run(seed), run(seed));
    }
}

/// One level, no costs, no deadlines, memory without limit: there the batches follow from order, size and delay alone.
fn compare_with_reference(random: &mut Random) {
    let largest = random.pick(&[1, 5, 16]);
    let delay = random.pick(&[Duration::ZERO, Duration::from_millis(2)]);
    let (instances, classes) = (random.between(1, 3) as u32, random.between(1, 4));
    let (mut scheduler, mut reference) = (Scheduler::new(), Reference::new(largest, delay));
    // One family in order of arrival is to the reference as if all were of one class.
    let family = random.percent(50).then_some(FamilyId(0));
    let packing = if family.is_some() { Packing::Fifo } else { Packing::Near };
    scheduler.handle(Instant(0), Input::Load(ModelPlan { packing, ..simple_plan(largest, delay, instances) }));
    let mut ends: BTreeMap<(Instant, BatchId), InstanceId> = BTreeMap::new();
    let (mut arrivals, mut next_arrival) = (0, Instant(1));
    while arrivals < 500 || !ends.is_empty() || scheduler.poll_timeout().is_some() {
        let arrival = (arrivals < 500).then_some(next_arrival);
        let end = ends.first_key_value().map(|((at, _), _)| *at);
        let times = [arrival, end, scheduler.poll_timeout()];
        let now = times.into_iter().flatten().min().expect("something is left to do");
        if arrival == Some(now) {
            arrivals += 1;
            let meta = simple_request(arrivals, random.below(classes), random.between(1, 9) as Rows);
            let meta = RequestMeta { family, units: u64::from(meta.class.0) + 1, ..meta };
            scheduler.handle(now, Input::Arrive(meta));
            let class = if family.is_some() { ClassId(0) } else { meta.class };
            reference.arrive(now, &RequestMeta { class, ..meta });
            let gone = RequestId(random.between(1, arrivals));
            if random.percent(20) {
                scheduler.handle(now, Input::Cancel(gone));
                reference.cancel(gone);
            }
            next_arrival = now + random.micros(1, 1000);
        } else if end == Some(now) {
            let ((_, batch), _) = ends.pop_first().expect("a batch ends");
            let outcome = Outcome::Done { duration: Duration::from_millis(1), bytes: ByteSize(1) };
            scheduler.handle(now, Input::Complete(batch, outcome));
        }
        let mut dispatched = Vec::new();
        while let Some(action) = scheduler.poll_action(now) {
            if let Action::Dispatch(dispatch) = action {
                ends.insert((now + random.micros(100, 3000), dispatch.batch), dispatch.instance);
                dispatched.push(dispatch.parts);
            }
        }
        let free = instances as usize - (ends.len() - dispatched.len());
        let expected: Vec<_> = std::iter::from_fn(|| reference.next(now)).take(free).collect();
        assert_eq!(dispatched, expected, "at {now:?}");
    }
}

fn simple_plan(largest: Rows, max_queue_delay: Duration, instances: u32) -> ModelPlan {
    ModelPlan {
        model: ModelId(0),
        device: DeviceId(0),
        instances: (0..instances).map(InstanceId).collect(),
        ladder: vec![largest],
        rounding: Rounding::Off,
        pipeline: 1,
        staged_unit: None,
        max_queue_delay,
        max_gather_delay: Duration::ZERO,
        max_queue_rows: u64::MAX,
        max_queue_bytes: ByteSize::MAX,
        priority_levels: 1,
        knee_tolerance: 0.03,
        packing: Packing::Near,
        observations: Vec::new(),
    }
}

fn simple_request(id: u64, class: u64, rows: Rows) -> RequestMeta {
    RequestMeta {
        id: RequestId(id),
        model: ModelId(0),
        class: ClassId(class as u32),
        family: None,
        units: 1,
        rows,
        bytes: ByteSize(1),
        deadline: None,
        priority: 1,
    }
}

/// A number from the environment.
fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// Says how to repeat a run that fails.
struct OnPanic(String);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}
