//! What must always hold, kept as a second set of books that only knows inputs and actions.

use super::memory::{Held, Memory};
use concertina::scheduler::{
    Action, Dispatch, LimitedBy, MemorySample, ModelPlan, Outcome, Packing, Part, Rejection, RequestMeta, Rounding,
    Scheduler,
};
use concertina::units::{BatchId, ByteSize, ClassId, DeviceId, InstanceId, Instant, ModelId, RequestId, Rows};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// As in `scheduler::queue`.
const MAX_OVERTAKES: u32 = 16;
/// As in `scheduler::pack`.
const MAX_PASSED_OVER: u32 = 4;
/// As in `scheduler::oom`.
const MEMORY_PATIENCE: Duration = Duration::from_secs(10);
const MAX_INSTANCE_LOSSES: u32 = 2;
const BACKOFF_FIRST: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    Waiting,
    InFlight,
    Returned,
    Done,
}

#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub(crate) meta: RequestMeta,
    pub(crate) arrived: Instant,
    rows: Vec<Row>,
    /// How many rows are in each state.
    counts: [u64; 4],
    losses: u32,
}

impl Live {
    fn count(&self, state: Row) -> u64 {
        self.counts[state as usize]
    }

    /// Moves the rows of a part from one state to another.
    fn turn(&mut self, part: &Part, from: Row, to: Row) {
        for row in &mut self.rows[part.start as usize..(part.start + part.rows) as usize] {
            assert_eq!(*row, from, "a row of {} is not in the state it should be in", part.request);
            *row = to;
        }
        self.counts[from as usize] -= u64::from(part.rows);
        self.counts[to as usize] += u64::from(part.rows);
    }
}

#[derive(Clone, Debug)]
struct Model {
    plan: ModelPlan,
    loaded: bool,
    held: BTreeMap<InstanceId, u32>,
    /// Requests in order of arrival, by class and level; those that have left are skipped.
    queues: BTreeMap<(ClassId, u32), VecDeque<RequestId>>,
    queued_rows: u64,
    queued_bytes: u64,
    returned: BTreeMap<ClassId, u64>,
    rows_in_flight: u64,
    passed_over: BTreeMap<u32, u32>,
    /// Until when instances may wait for those who were answered last.
    gathers_until: Instant,
    /// Until when a class rests whose smallest batch ran out of memory.
    rests: BTreeMap<ClassId, Instant>,
}

impl Model {
    fn skip_those_that_left(&mut self, live: &BTreeMap<RequestId, Live>) {
        self.queues.retain(|_, queue| {
            while queue.front().is_some_and(|id| !waits(live, id)) {
                queue.pop_front();
            }
            !queue.is_empty()
        });
    }
}

/// Whether some rows of a request were never dispatched.
fn waits(live: &BTreeMap<RequestId, Live>, id: &RequestId) -> bool {
    live.get(id).is_some_and(|request| request.count(Row::Waiting) > 0)
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Shadow {
    models: BTreeMap<ModelId, Model>,
    pub(crate) live: BTreeMap<RequestId, Live>,
    pub(crate) flights: BTreeMap<BatchId, (Dispatch, ClassId, DeviceId)>,
    /// What they were promised.
    promised: Memory,
    samples: BTreeMap<DeviceId, MemorySample>,
    pub(crate) draining: bool,
    /// Requests that make their batch fail.
    pub(crate) guilty: BTreeSet<RequestId>,
    /// Whether memory may run out: then a class may rest for a while, and rows may wait although an instance is idle.
    memory_is_short: bool,
    has_deadlines: bool,
    pub(crate) finished: u64,
    pub(crate) rejected: BTreeMap<&'static str, u64>,
    pub(crate) limits: BTreeMap<String, u64>,
}

impl Shadow {
    pub(crate) fn new(memory_is_short: bool, has_deadlines: bool) -> Self {
        Self { memory_is_short, has_deadlines, ..Self::default() }
    }

    pub(crate) fn loaded(&mut self, plan: &ModelPlan) {
        let held = |id: &InstanceId| {
            (*id, self.flights.values().filter(|(dispatch, ..)| dispatch.instance == *id).count() as u32)
        };
        let held = plan.instances.iter().map(held).collect();
        let own = self.flights.values().filter(|(dispatch, ..)| dispatch.model == plan.model);
        let rows_in_flight = own.map(|(dispatch, ..)| u64::from(dispatch.rows)).sum();
        let model = self.models.entry(plan.model).or_insert_with(|| Model {
            plan: plan.clone(),
            loaded: true,
            held: BTreeMap::new(),
            queues: BTreeMap::new(),
            queued_rows: 0,
            queued_bytes: 0,
            returned: BTreeMap::new(),
            rows_in_flight: 0,
            passed_over: BTreeMap::new(),
            gathers_until: Instant::default(),
            rests: BTreeMap::new(),
        });
        model.rests.clear();
        model.passed_over.clear();
        (model.plan, model.loaded, model.held, model.rows_in_flight) = (plan.clone(), true, held, rows_in_flight);
    }

    pub(crate) fn unloaded(&mut self, model: ModelId) {
        if let Some(model) = self.models.get_mut(&model) {
            model.loaded = false;
            model.passed_over.clear();
        }
    }

    pub(crate) fn sampled(&mut self, sample: MemorySample) {
        self.samples.insert(sample.device, sample);
    }

    pub(crate) fn arrived(&mut self, now: Instant, meta: RequestMeta) {
        let rows = vec![Row::Waiting; meta.rows as usize];
        let counts = [u64::from(meta.rows), 0, 0, 0];
        assert!(self.live.insert(meta.id, Live { meta, arrived: now, rows, counts, losses: 0 }).is_none());
        let Some(model) = self.models.get_mut(&meta.model) else { return };
        model.queues.entry((meta.class, meta.priority)).or_default().push_back(meta.id);
        model.queued_rows += u64::from(meta.rows);
        model.queued_bytes += meta.bytes.0;
    }

    /// A request leaves: all its books are closed. Fails if it has left before.
    pub(crate) fn left(&mut self, id: RequestId) -> Live {
        let request = self.live.remove(&id).unwrap_or_else(|| panic!("request {id} left twice"));
        if let Some(model) = self.models.get_mut(&request.meta.model) {
            let waiting = request.count(Row::Waiting);
            model.queued_rows -= waiting;
            model.queued_bytes -= if waiting > 0 { request.meta.bytes.0 } else { 0 };
            *model.returned.entry(request.meta.class).or_default() -= request.count(Row::Returned);
        }
        request
    }

    pub(crate) fn completed(&mut self, now: Instant, batch: BatchId, outcome: Outcome) {
        let (dispatch, ..) = self.flights.remove(&batch).expect("only batches in flight end");
        self.promised.release(batch);
        let model = self.models.get_mut(&dispatch.model).expect("known");
        if model.loaded {
            model.rows_in_flight -= u64::from(dispatch.rows);
        }
        if let Some(held) = model.held.get_mut(&dispatch.instance) {
            *held -= 1;
        }
        let done = matches!(outcome, Outcome::Done { .. });
        let smallest = if model.plan.rounding == Rounding::Up { model.plan.ladder[0] } else { 1 };
        match outcome {
            Outcome::Done { .. } => {
                model.rests.remove(&dispatch.class);
                model.gathers_until = now + model.plan.max_gather_delay;
            }
            Outcome::InstanceLost => drop(model.held.remove(&dispatch.instance)),
            Outcome::OutOfMemory { .. } if dispatch.padded_rows <= smallest => {
                model.rests.insert(dispatch.class, now + BACKOFF_FIRST);
            }
            Outcome::OutOfMemory { .. } | Outcome::Failed => (),
        }
        for part in &dispatch.parts {
            let Some(request) = self.live.get_mut(&part.request) else { continue };
            request.losses += u32::from(outcome == Outcome::InstanceLost);
            request.turn(part, Row::InFlight, if done { Row::Done } else { Row::Returned });
            if !done {
                *model.returned.entry(request.meta.class).or_default() += u64::from(part.rows);
            }
        }
    }

    /// Checks an action and books it.
    pub(crate) fn acted(&mut self, now: Instant, action: &Action) {
        match action {
            Action::Dispatch(dispatch) => self.dispatched(now, dispatch),
            Action::Finish(id) => {
                let request = self.left(*id);
                assert!(
                    request.count(Row::Done) == u64::from(request.meta.rows),
                    "request {id} finished without all its rows"
                );
                assert!(!self.guilty.contains(id), "request {id} finished although it always fails");
                self.finished += 1;
            }
            Action::Reject(id, rejection) => {
                let request = self.left(*id);
                self.may_reject(now, &request, *rejection);
            }
            Action::Trim(device) => {
                assert!(self.samples.contains_key(device) || self.memory_is_short, "trim of {device}");
            }
        }
    }

    fn dispatched(&mut self, now: Instant, dispatch: &Dispatch) {
        let model = self.models.get_mut(&dispatch.model).expect("only loaded models run");
        // Units grow with the number of the class: rows run as the largest of theirs.
        let metas = dispatch.parts.iter().map(|part| self.live[&part.request].meta);
        let largest = metas.max_by_key(|meta| meta.units).expect("a batch has rows");
        let class = largest.class;
        let retried = dispatch.limited_by == LimitedBy::Retry;
        assert!(dispatch.class == class || retried && dispatch.class > class, "{dispatch:?} runs as {class}");
        check_shape(&model.plan, dispatch);
        assert!(
            model.rests.get(&dispatch.class).is_none_or(|until| *until <= now),
            "a class without memory is not tried at once"
        );
        let held = model.held.get_mut(&dispatch.instance).expect("only live instances of the model run");
        assert!(*held < model.plan.pipeline, "instance {} holds too much", dispatch.instance);
        let full = matches!(dispatch.limited_by, LimitedBy::Knee | LimitedBy::Ladder | LimitedBy::Bytes);
        assert!(*held == 0 || full, "a busy instance was given a batch that might have grown: {dispatch:?}");
        *held += 1;
        let retry = dispatch.limited_by == LimitedBy::Retry;
        // Padded rows came back as what they ran as, which may have to wait for memory when their own class has not.
        let mixed = largest.family.is_some() && self.memory_is_short;
        assert!(
            retry || mixed || model.returned.get(&class).is_none_or(|rows| *rows == 0),
            "rows that came back were overtaken"
        );
        self.check_overtaking(dispatch, largest);
        self.check_arrival_order(dispatch, largest);
        for part in &dispatch.parts {
            self.part_dispatched(part, dispatch, largest);
        }
        let model = self.models.get_mut(&dispatch.model).expect("known");
        model.rows_in_flight += u64::from(dispatch.rows);
        let device = model.plan.device;
        let units = u64::from(dispatch.class.0) + 1;
        let staged = model.plan.staged_unit.map(|unit| unit.0 * units * u64::from(dispatch.padded_rows));
        let before = self.reserved(device);
        let held = Held { batch: dispatch.batch, peak: dispatch.bytes.0, staged };
        self.promised.hold(device, dispatch.instance, held);
        let reserved = self.reserved(device);
        let budget = self.samples.get(&device).map_or(ByteSize::MAX, |sample| sample.budget);
        // A batch that needs nothing more is fine, also when a neighbour has just taken what others had reserved.
        assert!(reserved <= budget.max(before), "{reserved} reserved of {budget}, {before} before");
        *self.limits.entry(format!("{:?}", dispatch.limited_by)).or_default() += 1;
        assert!(self.flights.insert(dispatch.batch, (dispatch.clone(), class, device)).is_none());
    }

    /// The rows of a part were waiting, come in order, and are the next of their class and level.
    fn part_dispatched(&mut self, part: &Part, dispatch: &Dispatch, largest: RequestMeta) {
        let retry = dispatch.limited_by == LimitedBy::Retry;
        let live = &self.live;
        let model = self.models.get_mut(&dispatch.model).expect("known");
        let meta = live[&part.request].meta;
        assert_eq!(meta.model, dispatch.model, "one model per batch");
        let is_kin = meta.class == largest.class || meta.family.is_some() && meta.family == largest.family;
        assert!(is_kin, "{meta:?} shares a batch with {largest:?}");
        if !retry {
            let queue = model.queues.get_mut(&(meta.class, meta.priority)).expect("it has arrived");
            while queue.front().is_some_and(|id| !waits(live, id)) {
                queue.pop_front();
            }
            assert_eq!(queue.front(), Some(&part.request), "not first in, first out");
            let first = live[&part.request].rows.iter().position(|row| *row == Row::Waiting);
            assert_eq!(first, Some(part.start as usize), "rows of {} out of order", part.request);
        }
        let expected = if retry { Row::Returned } else { Row::Waiting };
        let request = self.live.get_mut(&part.request).expect("live");
        request.turn(part, expected, Row::InFlight);
        if retry {
            *model.returned.get_mut(&meta.class).expect("rows came back") -= u64::from(part.rows);
        } else {
            model.queued_rows -= u64::from(part.rows);
            model.queued_bytes -= if request.count(Row::Waiting) == 0 { meta.bytes.0 } else { 0 };
        }
    }

    /// Where rows are padded in order of arrival, none of those that are left out came before one that is taken.
    fn check_arrival_order(&self, dispatch: &Dispatch, largest: RequestMeta) {
        let plan = &self.models[&dispatch.model].plan;
        let (true, Some(family)) = (plan.packing == Packing::Fifo, largest.family) else { return };
        let is_plain = dispatch.limited_by != LimitedBy::Retry && plan.priority_levels == 1 && !self.memory_is_short;
        if !is_plain || self.has_deadlines {
            return;
        }
        let newest = dispatch.parts.iter().map(|part| part.request).max().expect("a batch has rows");
        let taken: BTreeSet<RequestId> = dispatch.parts.iter().map(|part| part.request).collect();
        for (id, request) in self.live.range(..newest) {
            let meta = &request.meta;
            let left_out = meta.model == dispatch.model
                && meta.family == Some(family)
                && request.count(Row::Waiting) > 0
                && !taken.contains(id);
            assert!(!left_out, "request {id} was left out for {newest}");
        }
    }

    /// The oldest head of each level is passed over by a bounded number of batches.
    fn check_overtaking(&mut self, dispatch: &Dispatch, largest: RequestMeta) {
        let live = &self.live;
        let model = self.models.get_mut(&dispatch.model).expect("known");
        if self.memory_is_short
            || model.plan.max_queue_delay.max(model.plan.max_gather_delay) > Duration::ZERO
            || dispatch.limited_by == LimitedBy::Retry
        {
            return;
        }
        let mut heads: BTreeMap<u32, RequestId> = BTreeMap::new();
        for ((_, level), queue) in &model.queues {
            if let Some(head) = queue.iter().find(|id| waits(live, id)) {
                let oldest = heads.entry(*level).or_insert(*head);
                *oldest = (*oldest).min(*head);
            }
        }
        let most = match (model.plan.priority_levels, largest.family) {
            (1, None) => 0,
            (1, Some(_)) => MAX_PASSED_OVER,
            (levels, _) => MAX_OVERTAKES + levels,
        };
        model.passed_over.retain(|level, _| heads.contains_key(level));
        for (level, head) in heads {
            let count = model.passed_over.entry(level).or_default();
            *count = if dispatch.parts.iter().any(|part| part.request == head) { 0 } else { *count + 1 };
            assert!(*count <= most, "level {level} was passed over {count} times, the last by {largest:?}");
        }
    }

    fn may_reject(&mut self, now: Instant, request: &Live, rejection: Rejection) {
        let meta = &request.meta;
        let model = self.models.get(&meta.model).filter(|model| model.loaded);
        let (name, allowed) = match rejection {
            Rejection::QueueFull { retry_after } => {
                let model = model.expect("a queue that is full is there");
                let rows = model.queued_rows + u64::from(meta.rows) > model.plan.max_queue_rows;
                let bytes = model.queued_bytes + meta.bytes.0 > model.plan.max_queue_bytes.0;
                let bounded = retry_after > Duration::ZERO && retry_after <= Duration::from_secs(60);
                ("QueueFull", bounded && model.queued_rows > 0 && (rows || bytes))
            }
            Rejection::TooLarge { needed, capacity } => ("TooLarge", needed > capacity && self.memory_is_short),
            Rejection::DeadlineExceeded => ("DeadlineExceeded", meta.deadline.is_some()),
            Rejection::MemoryExhausted { .. } => {
                let waited = now >= request.arrived + MEMORY_PATIENCE;
                let over = meta.deadline.map_or(waited, |deadline| deadline <= now);
                ("MemoryExhausted", self.memory_is_short && over)
            }
            Rejection::Draining => ("Draining", self.draining),
            Rejection::Unhealthy => {
                let none = model.is_none_or(|model| model.held.is_empty());
                ("Unhealthy", none || request.losses > MAX_INSTANCE_LOSSES)
            }
            Rejection::Failed => ("Failed", self.guilty.contains(&meta.id)),
        };
        assert!(allowed, "{rejection:?} of {request:?}");
        *self.rejected.entry(name).or_default() += 1;
    }

    fn reserved(&self, device: DeviceId) -> ByteSize {
        ByteSize(self.promised.promised(device))
    }

    /// What holds whenever the scheduler has nothing more to do.
    pub(crate) fn check_rest(&mut self, now: Instant, scheduler: &Scheduler) {
        for model in self.models.values_mut() {
            model.skip_those_that_left(&self.live);
        }
        assert!(scheduler.poll_timeout().is_none_or(|at| at > now), "the next wake-up is not in the future");
        for stats in scheduler.device_stats() {
            assert_eq!(stats.reserved, self.reserved(stats.device), "reserved bytes differ from those in flight");
        }
        let loaded: Vec<_> = self.models.iter().filter(|(_, model)| model.loaded).collect();
        assert_eq!(loaded.len(), scheduler.model_stats().count());
        for (stats, (id, model)) in scheduler.model_stats().zip(loaded) {
            let returned: u64 = model.returned.values().sum();
            let found =
                (stats.model, stats.queued_rows, stats.queued_bytes.0, stats.retrying_rows, stats.rows_in_flight);
            assert_eq!(found, (*id, model.queued_rows, model.queued_bytes, returned, model.rows_in_flight));
            assert!(
                stats.queued_rows <= model.plan.max_queue_rows || stats.queued_requests == 1,
                "the queue is too long"
            );
            self.check_no_idling(now, model);
        }
        if scheduler.is_idle() {
            assert!(self.live.is_empty() && self.flights.is_empty(), "requests were lost: {:?}", self.live.keys());
        }
    }

    /// No row waits while an instance is idle, but for company. Where memory may be short, see `world`.
    fn check_no_idling(&self, now: Instant, model: &Model) {
        if self.memory_is_short || model.held.values().all(|held| *held > 0) {
            return;
        }
        assert!(model.returned.values().all(|rows| *rows == 0), "rows that came back wait while an instance is idle");
        for queue in model.queues.values() {
            if let Some(head) = queue.iter().find(|id| waits(&self.live, id)).map(|id| &self.live[id]) {
                let patient =
                    (head.arrived + model.plan.max_queue_delay).max(model.gathers_until) > now && !self.draining;
                assert!(patient, "request {} waits while an instance is idle", head.meta.id);
            }
        }
    }

    /// Whether instances of a model may still wait for those who were answered last.
    pub(crate) fn gathers(&self, model: ModelId, now: Instant) -> bool {
        self.models.get(&model).is_some_and(|model| model.gathers_until > now)
    }

    /// Deadlines that have come while rows wait.
    pub(crate) fn check_deadlines(&self, now: Instant) {
        for request in self.live.values() {
            let waits = request.count(Row::Waiting) + request.count(Row::Returned) > 0;
            assert!(!waits || request.meta.deadline.is_none_or(|at| at > now), "an expired request waits: {request:?}");
        }
    }
}

fn check_shape(plan: &ModelPlan, dispatch: &Dispatch) {
    let rows: Rows = dispatch.parts.iter().map(|part| part.rows).sum();
    assert!(rows > 0 && rows == dispatch.rows, "{dispatch:?}");
    let size = plan.ladder.iter().find(|size| **size >= rows).copied().expect("a batch is not above the ladder");
    let padded = if plan.rounding == Rounding::Up { size } else { rows };
    let rounds = plan.rounding == Rounding::Down && dispatch.limited_by == LimitedBy::Bytes && rows >= plan.ladder[0];
    assert!(!rounds || size == rows, "memory made it a size that is not on the ladder: {dispatch:?}");
    assert!(padded == dispatch.padded_rows && padded <= plan.ladder[plan.ladder.len() - 1], "{dispatch:?}");
}
