//! Clients, devices and neighbours, all of them made up, and virtual time.

use super::memory::{Held, Memory as Taken};
use super::random::Random;
use super::shadow::Shadow;
use concertina::scheduler::{
    Action, Dispatch, Input, MemorySample, ModelPlan, Observation, Outcome, Packing, RequestMeta, Rounding, Scheduler,
};
use concertina::units::{
    BatchId, ByteSize, ClassId, DeviceId, FamilyId, InstanceId, Instant, ModelId, RequestId, Rows,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// Requests that come although the server drains.
const ARRIVALS_AFTER_DRAIN: u64 = 5;

/// How memory behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// There is always enough, and nobody measures it.
    Plenty,
    /// The budget is always the truth and so are the predictions, but neighbours come and go.
    Honest,
    /// Samples come late, and runs need other bytes than predicted.
    Treacherous,
}

/// What a run of the simulation is like.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) requests: u64,
    pub(crate) memory: Memory,
    pub(crate) models: u32,
    pub(crate) classes: u64,
    /// Classes of one family differ by a multiple of this; zero: there are none.
    pub(crate) families: u64,
    pub(crate) levels: u32,
    pub(crate) gap_micros: u64,
    pub(crate) known_costs: bool,
    pub(crate) deadlines: u64,
    pub(crate) cancels: u64,
    pub(crate) guilty: u64,
    pub(crate) losses: bool,
    pub(crate) reloads: bool,
}

impl Scenario {
    pub(crate) fn random(random: &mut Random, requests: u64) -> Self {
        let memory = random.pick(&[Memory::Plenty, Memory::Honest, Memory::Treacherous]);
        Self {
            requests,
            memory,
            models: random.between(1, 3) as u32,
            classes: random.pick(&[1, 1, 2, 5, 40]),
            families: random.pick(&[0, 0, 1, 1, 2]),
            levels: random.pick(&[1, 1, 2, 4]),
            gap_micros: random.pick(&[20, 100, 500, 2000, 10_000]),
            known_costs: memory == Memory::Honest || random.percent(70),
            deadlines: random.pick(&[0, 0, 10, 80]),
            cancels: random.pick(&[0, 0, 5, 30]),
            guilty: random.pick(&[0, 0, 1, 5]),
            losses: random.percent(20),
            reloads: random.percent(20),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive,
    Cancel(RequestId),
    End(BatchId, Outcome),
    Neighbour(DeviceId),
    Sample(DeviceId),
    Lose,
    Unload,
    Reload,
    Drain,
}

#[derive(Clone, Copy, Debug, Default)]
struct RealDevice {
    total: u64,
    neighbour: u64,
}

impl RealDevice {
    fn ours(self) -> u64 {
        self.total.saturating_sub(self.neighbour)
    }
}

pub(crate) struct World {
    random: Random,
    scenario: Scenario,
    scheduler: Scheduler,
    pub(crate) shadow: Shadow,
    now: Instant,
    agenda: BTreeMap<(Instant, u64), Event>,
    events: u64,
    plans: Vec<ModelPlan>,
    devices: BTreeMap<DeviceId, RealDevice>,
    /// What batches really take.
    taken: Taken,
    busy_until: BTreeMap<InstanceId, Instant>,
    arrivals: u64,
    instances: u32,
    pub(crate) keeps_log: bool,
    pub(crate) log: Vec<Action>,
}

impl World {
    pub(crate) fn new(mut random: Random, scenario: Scenario) -> Self {
        let mut world = Self {
            random: Random(random.next()),
            scheduler: Scheduler::new(),
            shadow: Shadow::new(scenario.memory != Memory::Plenty, scenario.deadlines > 0),
            now: Instant(1),
            agenda: BTreeMap::new(),
            events: 0,
            plans: Vec::new(),
            devices: BTreeMap::new(),
            taken: Taken::default(),
            busy_until: BTreeMap::new(),
            arrivals: 0,
            instances: 0,
            keeps_log: false,
            log: Vec::new(),
            scenario,
        };
        for id in 0..world.scenario.models {
            let device = DeviceId(id / 2);
            let total = world.random.between(1_000, 60_000);
            world.devices.entry(device).or_default().total = total;
            let plan = world.plan(ModelId(id), device);
            world.load(plan);
        }
        world.begin();
        world
    }

    /// Runs until nothing is left to do.
    pub(crate) fn run(&mut self) {
        let most = self.scenario.requests * 60 + 50_000;
        for steps in 0.. {
            assert!(steps < most, "no end after {steps} steps");
            let next = self.agenda.first_key_value().map(|((at, _), _)| *at);
            let Some(at) = next.into_iter().chain(self.scheduler.poll_timeout()).min() else { break };
            assert!(at >= self.now, "time runs backwards");
            self.now = at;
            while let Some(entry) = self.agenda.first_entry().filter(|entry| entry.key().0 == at) {
                let event = entry.remove();
                self.happen(event);
                if self.random.percent(70) {
                    break;
                }
            }
            self.carry_out();
            self.shadow.check_rest(self.now, &self.scheduler);
            self.check_no_idling_with_memory();
            if steps % 64 == 0 {
                self.shadow.check_deadlines(self.now);
            }
        }
        assert!(self.scheduler.is_idle(), "requests are left: {:?}", self.shadow.live.keys());
        self.shadow.check_rest(self.now, &self.scheduler);
    }

    fn begin(&mut self) {
        self.at(Duration::ZERO, Event::Arrive);
        let span = self.scenario.gap_micros * self.scenario.requests;
        for device in self.devices.keys().copied().collect::<Vec<_>>() {
            if self.scenario.memory != Memory::Plenty {
                self.happen(Event::Sample(device));
                for _ in 0..20 {
                    let after = self.random.micros(0, span);
                    self.at(after, Event::Neighbour(device));
                    let after = self.random.micros(0, span);
                    self.at(after, Event::Sample(device));
                }
            }
        }
        for (wanted, count, event) in [
            (self.scenario.losses, 2, Event::Lose),
            (self.scenario.reloads, 2, Event::Reload),
            (self.scenario.reloads, 1, Event::Unload),
        ] {
            for _ in 0..if wanted { count } else { 0 } {
                let after = self.random.micros(0, span);
                self.at(after, event);
            }
        }
    }

    fn at(&mut self, after: Duration, event: Event) {
        self.events += 1;
        self.agenda.insert((self.now + after, self.events), event);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrive => self.arrive(),
            Event::Cancel(id) => {
                if self.shadow.live.contains_key(&id) {
                    self.shadow.left(id);
                }
                self.scheduler.handle(self.now, Input::Cancel(id));
            }
            Event::End(batch, outcome) => self.end(batch, outcome),
            Event::Neighbour(device) => {
                let total = self.devices[&device].total;
                let neighbour = if self.random.percent(50) { 0 } else { self.random.between(0, total) };
                self.devices.get_mut(&device).expect("known").neighbour = neighbour;
                if self.scenario.memory == Memory::Honest {
                    self.sample(device);
                }
            }
            Event::Sample(device) => self.sample(device),
            Event::Lose => self.lose(),
            Event::Unload => {
                let model = self.random.pick(&self.plans).model;
                self.shadow.unloaded(model);
                self.scheduler.handle(self.now, Input::Unload(model));
                self.plans.retain(|plan| plan.model != model || self.scenario.models == 1);
            }
            Event::Reload => {
                let old = self.random.pick(&self.plans);
                let plan = self.plan(old.model, old.device);
                self.load(ModelPlan { max_queue_rows: old.max_queue_rows, ..plan });
            }
            Event::Drain => {
                for device in self.devices.keys().copied().collect::<Vec<_>>() {
                    self.devices.get_mut(&device).expect("known").neighbour = 0;
                    if self.scenario.memory != Memory::Plenty {
                        self.sample(device);
                    }
                }
                self.shadow.draining = true;
                self.scheduler.handle(self.now, Input::Drain);
            }
        }
    }

    fn plan(&mut self, model: ModelId, device: DeviceId) -> ModelPlan {
        let ladder = self.random.pick(&[vec![1, 2, 4, 8, 16], vec![1, 4, 32], vec![4, 8], vec![1], vec![1, 3, 7, 20]]);
        let instances = self.random.between(1, 3) as u32;
        self.instances += instances;
        let known = if self.scenario.known_costs { self.scenario.classes } else { 0 };
        let observation = |(class, rows): (u64, Rows)| Observation {
            class: ClassId(class as u32),
            units: class + 1,
            rows,
            duration: true_duration(class, rows),
            bytes: ByteSize(true_bytes(class, rows)),
        };
        let sizes = |class| ladder.iter().map(move |rows| (class, *rows));
        let observations = (0..known).flat_map(sizes).map(observation).collect();
        ModelPlan {
            model,
            device,
            instances: (self.instances - instances..self.instances).map(InstanceId).collect(),
            rounding: self.random.pick(&[Rounding::Off, Rounding::Down, Rounding::Up, Rounding::Up]),
            pipeline: self.random.between(1, 3) as u32,
            staged_unit: self.random.pick(&[None, None, Some(0), Some(3), Some(12), Some(60)]).map(ByteSize),
            max_queue_delay: self.random.pick(&[Duration::ZERO, Duration::ZERO, Duration::from_millis(3)]),
            max_gather_delay: Duration::from_millis(2 * u64::from(self.instances % 2)),
            max_queue_rows: self.random.pick(&[8, 100, 2000]),
            max_queue_bytes: ByteSize(self.random.pick(&[500, 100_000])),
            priority_levels: self.scenario.levels,
            knee_tolerance: 0.03,
            packing: self.random.pick(&[Packing::Near, Packing::Near, Packing::Fifo]),
            observations,
            ladder,
        }
    }

    fn load(&mut self, plan: ModelPlan) {
        self.shadow.loaded(&plan);
        self.plans.retain(|old| old.model != plan.model);
        self.plans.push(plan.clone());
        self.scheduler.handle(self.now, Input::Load(plan));
    }

    fn arrive(&mut self) {
        self.arrivals += 1;
        let class = self.random.below(self.scenario.classes);
        let many = self.random.percent(5);
        let meta = RequestMeta {
            id: RequestId(self.arrivals),
            model: if self.random.percent(1) { ModelId(77) } else { self.random.pick(&self.plans).model },
            class: ClassId(class as u32),
            family: class.checked_rem(self.scenario.families).map(|family| FamilyId(family as u32)),
            units: class + 1,
            rows: if many { self.random.between(1, 60) } else { self.random.between(1, 3) } as Rows,
            bytes: ByteSize(self.random.between(1, 20)),
            deadline: self.random.percent(self.scenario.deadlines).then(|| self.now + self.random.micros(500, 200_000)),
            priority: self.random.between(1, u64::from(self.scenario.levels)) as u32,
        };
        if self.random.percent(self.scenario.guilty) {
            self.shadow.guilty.insert(meta.id);
        }
        if self.random.percent(self.scenario.cancels) {
            let after = self.random.micros(0, 20_000);
            self.at(after, Event::Cancel(meta.id));
        }
        self.shadow.arrived(self.now, meta);
        self.scheduler.handle(self.now, Input::Arrive(meta));
        let burst = self.random.percent(30);
        let gap = if burst { Duration::ZERO } else { self.random.micros(0, 2 * self.scenario.gap_micros) };
        if self.arrivals == self.scenario.requests {
            self.at(gap, Event::Drain);
        }
        if self.arrivals < self.scenario.requests + ARRIVALS_AFTER_DRAIN {
            self.at(gap, Event::Arrive);
        }
    }

    fn sample(&mut self, device: DeviceId) {
        let real = &self.devices[&device];
        let sample = MemorySample { device, budget: ByteSize(real.ours()), capacity: ByteSize(real.total) };
        self.shadow.sampled(sample);
        self.scheduler.handle(self.now, Input::Memory(sample));
    }

    fn lose(&mut self) {
        let Some((lost, ..)) = self.shadow.flights.values().next().cloned() else { return };
        let ends = |(_, event): &(&(Instant, u64), &Event)| matches!(event, Event::End(batch, _) if self.shadow.flights[batch].0.instance == lost.instance);
        let keys: Vec<_> = self.agenda.iter().filter(ends).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(Event::End(batch, _)) = self.agenda.remove(&key) {
                self.end(batch, Outcome::InstanceLost);
            }
        }
    }

    fn end(&mut self, batch: BatchId, outcome: Outcome) {
        self.taken.release(batch);
        self.shadow.completed(self.now, batch, outcome);
        self.scheduler.handle(self.now, Input::Complete(batch, outcome));
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.scheduler.poll_action(self.now) {
            self.shadow.acted(self.now, &action);
            if self.keeps_log {
                self.log.push(action.clone());
            }
            if let Action::Dispatch(dispatch) = action {
                self.dispatch(&dispatch);
            }
        }
    }

    /// Decides how a batch will end, and when.
    fn dispatch(&mut self, dispatch: &Dispatch) {
        let (_, class, device) = self.shadow.flights[&dispatch.batch];
        let class = u64::from(class.0);
        let ours = self.devices[&device].ours();
        let exact = true_bytes(class, dispatch.padded_rows);
        let is_honest = self.scenario.memory == Memory::Honest;
        let before = self.taken.needed(device);
        let peak = match self.scenario.memory {
            Memory::Treacherous => exact * self.random.between(80, 140) / 100,
            // What is not predicted to fit may be tried with all that there is: it takes no more than that.
            Memory::Honest if before == 0 => exact.min(dispatch.bytes.0),
            Memory::Plenty | Memory::Honest => exact,
        };
        let unit = self.plans.iter().find(|plan| plan.model == dispatch.model).and_then(|plan| plan.staged_unit);
        let staged = unit.map(|unit| unit.0 * (class + 1) * u64::from(dispatch.padded_rows));
        let mut taken = self.taken.clone();
        taken.hold(device, dispatch.instance, Held { batch: dispatch.batch, peak, staged });
        let needed = taken.needed(device);
        let denied = self.scenario.memory == Memory::Treacherous && needed > ours;
        // What is held already may be too much since a neighbour has come.
        let fits = needed <= ours.max(before) || !is_honest;
        assert!(fits, "{needed} bytes are needed of {ours}, {before} before {dispatch:?}");
        let fails = dispatch.parts.iter().any(|part| self.shadow.guilty.contains(&part.request));
        let mut duration = true_duration(class, dispatch.padded_rows) * self.random.between(80, 130) as u32 / 100;
        if self.random.percent(1) {
            duration *= 10;
        }
        let outcome = match (denied, fails) {
            (true, _) => Outcome::OutOfMemory { bytes: ByteSize(ours.saturating_sub(before)) },
            (false, true) => Outcome::Failed,
            (false, false) => Outcome::Done { duration, bytes: ByteSize(if is_honest { exact } else { peak }) },
        };
        if !denied {
            self.taken = taken;
        }
        let begin = self.busy_until.get(&dispatch.instance).copied().unwrap_or_default().max(self.now);
        self.busy_until.insert(dispatch.instance, begin + duration);
        self.at((begin + duration).since(self.now), Event::End(dispatch.batch, outcome));
    }

    /// Where predictions are true, nobody waits (but for company) on a device where nothing runs and where one row fits.
    fn check_no_idling_with_memory(&self) {
        if self.scenario.memory != Memory::Honest || self.scenario.guilty > 0 {
            return;
        }
        for plan in &self.plans {
            if self.shadow.flights.values().any(|(.., device)| *device == plan.device) {
                continue;
            }
            let budget = self.devices[&plan.device].ours();
            let waiting = self.shadow.live.values().filter(|request| request.meta.model == plan.model);
            let smallest = if plan.rounding == Rounding::Up { plan.ladder[0] } else { 1 };
            let fitting = |class: ClassId| true_bytes(u64::from(class.0), smallest) <= budget;
            for request in waiting.filter(|request| fitting(request.meta.class)) {
                let patient =
                    request.arrived + plan.max_queue_delay > self.now || self.shadow.gathers(plan.model, self.now);
                let patient = patient && !self.shadow.draining;
                assert!(patient, "{request:?} waits although it fits an idle device");
            }
        }
    }
}

fn true_bytes(class: u64, rows: Rows) -> u64 {
    50 + 40 * (class + 1) * u64::from(rows)
}

fn true_duration(class: u64, rows: Rows) -> Duration {
    Duration::from_micros(1000 + 30 * (class + 1) * u64::from(rows))
}
