//! The state machine: inputs come in, actions go out.

use super::budget::Device;
use super::model::{Instance, Model};
use super::oom::MEMORY_RETRY_AFTER;
use super::queue::{Kind, Parked, Requests};
use super::{Action, Dispatch, Input, MemorySample, ModelPlan, Rejection};
use crate::units::{BatchId, ClassId, DeviceId, Instant, ModelId, RequestId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The scheduler; see the module documentation.
#[derive(Clone, Debug, Default)]
pub struct Scheduler {
    pub(super) models: BTreeMap<ModelId, Model>,
    pub(super) devices: BTreeMap<DeviceId, Device>,
    pub(super) requests: Requests,
    pub(super) in_flight: BTreeMap<BatchId, InFlight>,
    /// Deadlines of the requests that have waiting rows.
    pub(super) deadlines: BTreeSet<(Instant, RequestId)>,
    /// When parked classes are considered again.
    pub(super) wakes: BTreeSet<(Instant, ModelId, ClassId)>,
    /// Models that may be able to run something.
    pub(super) line: VecDeque<ModelId>,
    pub(super) outbox: VecDeque<Action>,
    pub(super) tickets: u64,
    pub(super) batches: u64,
    pub(super) draining: bool,
}

/// A batch in flight.
#[derive(Clone, Debug)]
pub(super) struct InFlight {
    pub(super) dispatch: Dispatch,
    /// What the queue knows it by; see [`Dispatch::class`].
    pub(super) kind: Kind,
    /// The largest class of its rows.
    pub(super) ran_as: Kind,
    pub(super) device: DeviceId,
}

impl Scheduler {
    /// A scheduler without models.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in what has happened. Call [`Scheduler::poll_action`] afterwards, until it says nothing more; several inputs
    /// of the same instant may come first.
    ///
    /// # Panics
    /// If an input contradicts what was said before (a batch that was never dispatched, a request id used twice, a plan
    /// without batch sizes), or if an invariant is broken. Both are bugs that must not be survived.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Load(plan) => self.load(plan),
            Input::Unload(model) => self.unload(model),
            Input::Arrive(meta) => self.arrive(now, meta),
            Input::Cancel(request) => self.cancel(request),
            Input::Complete(batch, outcome) => self.complete(now, batch, outcome),
            Input::Memory(sample) => self.measure(sample),
            Input::Drain => self.drain(),
        }
    }

    /// The next thing to do, if there is one. Call it again after each input and at [`Scheduler::poll_timeout`].
    pub fn poll_action(&mut self, now: Instant) -> Option<Action> {
        if self.outbox.is_empty() {
            self.expire(now);
            self.wake(now);
            // What is rejected on the way to a batch is said before the batch.
            if let Some(dispatch) = self.next_dispatch(now) {
                self.outbox.push_back(Action::Dispatch(dispatch));
            }
        }
        self.outbox.pop_front()
    }

    /// When [`Scheduler::poll_action`] must be called again even if nothing happens. Valid once it has said nothing more;
    /// then it lies in the future.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let wake = self.wakes.first().map(|(at, ..)| *at);
        deadline.into_iter().chain(wake).min()
    }

    /// A model is loaded, or its instances are replaced: then its queue and what was learned stay.
    fn load(&mut self, plan: ModelPlan) {
        assert!(
            plan.ladder.first().is_some_and(|size| *size > 0),
            "a ladder has at least one size, of at least one row"
        );
        assert!(plan.ladder.is_sorted_by(|a, b| a < b), "the sizes of a ladder ascend");
        let (id, device) = (plan.model, plan.device);
        self.unpark_all(id);
        self.devices.entry(device).or_default();
        let held = |id| self.in_flight.values().filter(|flight| flight.dispatch.instance == id).count() as u32;
        let instance = |id: &_| Instance { id: *id, held: held(*id), free_at: Instant::default() };
        let instances: Vec<_> = plan.instances.iter().map(instance).collect();
        let budget = self.devices[&device].budget();
        let own = self.in_flight.values().filter(|flight| flight.dispatch.model == id);
        let rows_in_flight = own.map(|flight| u64::from(flight.dispatch.rows)).sum();
        let model = self.models.entry(id).or_insert_with(|| Model::new(plan.clone()));
        model.cost.set_ladder(&plan.ladder, plan.knee_tolerance);
        for run in &plan.observations {
            model.cost.observe(*run);
        }
        (model.instances, model.plan, model.rows_in_flight) = (instances, plan, rows_in_flight);
        if let Some((class, units)) = model.cost.first_class().filter(|_| model.pace.is_none()) {
            model.note_pace(class, units, budget);
        }
        if model.instances.is_empty() {
            self.reject_queue(id);
        }
        self.line_up(id);
    }

    fn unload(&mut self, id: ModelId) {
        self.reject_queue(id);
        self.unpark_all(id);
        self.models.remove(&id);
        self.line.retain(|other| *other != id);
    }

    fn measure(&mut self, sample: MemorySample) {
        let device = self.devices.entry(sample.device).or_default();
        let before = device.budget();
        device.measure(sample);
        let now = device.budget();
        if before != now {
            let models = self.models.values_mut().filter(|model| model.plan.device == sample.device);
            models.for_each(|model| model.budget_changed(before, now));
        }
        self.unblock(sample.device);
    }

    /// Nothing more comes, so nothing waits for company any more.
    fn drain(&mut self) {
        self.draining = true;
        let models: Vec<_> = self.models.keys().copied().collect();
        for model in models {
            let classes: Vec<_> = self.models[&model].queue.classes().map(|(class, _)| class).collect();
            for class in classes {
                self.end_company(model, class);
            }
        }
    }

    /// A client has gone.
    fn cancel(&mut self, id: RequestId) {
        if !self.remove(id) {
            // It may have been decided in the same breath and not been said yet: a client that has gone hears nothing.
            let about =
                |action: &Action| matches!(action, Action::Finish(other) | Action::Reject(other, _) if *other == id);
            self.outbox.retain(|action| !about(action));
        }
    }

    /// Refuses a request that is inside.
    pub(super) fn reject(&mut self, id: RequestId, rejection: Rejection) {
        if self.remove(id) {
            self.outbox.push_back(Action::Reject(id, rejection));
        }
    }

    /// Refuses everything of a model that is not in flight.
    pub(super) fn reject_queue(&mut self, id: ModelId) {
        let Some(model) = self.models.get(&id) else { return };
        let mut waiting: Vec<_> =
            model.queue.classes().flat_map(|(_, class)| class.returned().chain(class.waiting())).collect();
        waiting.sort_unstable();
        for request in waiting {
            self.reject(request, Rejection::Unhealthy);
        }
    }

    /// Takes a request out, whatever its rows are doing; those in flight end unheard. False if it is not there.
    fn remove(&mut self, id: RequestId) -> bool {
        let Some(request) = self.requests.remove(&id) else { return false };
        if let Some(deadline) = request.meta.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        let model = request.meta.model;
        if request.waiting > 0 {
            let queue = &mut self.models.get_mut(&model).expect("a model with rows waiting is loaded").queue;
            let touched = queue.remove(&self.requests, &request);
            touched.into_iter().for_each(|class| self.settle(model, class));
        }
        true
    }

    /// Requests whose deadline has come while rows of them wait.
    fn expire(&mut self, now: Instant) {
        while let Some(&(at, id)) = self.deadlines.first() {
            if at > now {
                return;
            }
            let meta = self.requests[&id].meta;
            let starved = self.models[&meta.model].queue.is_starved(&meta);
            let exhausted = Rejection::MemoryExhausted { retry_after: MEMORY_RETRY_AFTER };
            self.reject(id, if starved { exhausted } else { Rejection::DeadlineExceeded });
        }
    }

    /// Classes that have been parked long enough.
    fn wake(&mut self, now: Instant) {
        while let Some(&(at, model, class)) = self.wakes.first() {
            if at > now {
                return;
            }
            self.wakes.pop_first();
            self.unpark(model, class);
        }
    }

    /// Puts a model in line to be looked at.
    pub(super) fn line_up(&mut self, id: ModelId) {
        if let Some(model) = self.models.get_mut(&id).filter(|model| !model.in_line) {
            model.in_line = true;
            self.line.push_back(id);
        }
    }

    /// Keeps a class out of consideration for a while. Unless it waits for bytes, it has no claim on them meanwhile.
    pub(super) fn park(&mut self, model_id: ModelId, class: ClassId, parked: Parked) {
        let model = self.models.get_mut(&model_id).expect("a class is parked while its model is considered");
        let device = model.plan.device;
        model.queue.park(class, parked);
        self.wakes.extend(parked.wake().map(|wake| (wake, model_id, class)));
        match parked {
            Parked::Memory(_) => {
                self.device(device).blocked.insert((model_id, class));
            }
            Parked::Company(_) | Parked::Backoff(_) => self.disclaim(device, model_id, class),
        }
    }

    /// Considers a class again.
    pub(super) fn unpark(&mut self, model_id: ModelId, class: ClassId) {
        let Some(model) = self.models.get_mut(&model_id) else { return };
        let Some(parked) = model.queue.unpark(class) else { return };
        if let Some(wake) = parked.wake() {
            self.wakes.remove(&(wake, model_id, class));
        }
        let device = model.plan.device;
        self.device(device).blocked.remove(&(model_id, class));
        self.line_up(model_id);
    }

    /// Considers a class again that has waited for the rows that have come now.
    pub(super) fn end_company(&mut self, model: ModelId, class: ClassId) {
        let parked = self.models.get(&model).and_then(|model| model.queue.class(class)).and_then(|class| class.parked);
        if matches!(parked, Some(Parked::Company(_))) {
            self.unpark(model, class);
        }
    }

    /// Considers all classes of a model again; none has a claim on bytes any more.
    fn unpark_all(&mut self, id: ModelId) {
        let Some(model) = self.models.get(&id) else { return };
        let device = model.plan.device;
        let classes: Vec<_> = model.queue.classes().map(|(class, _)| class).collect();
        for class in classes {
            self.unpark(id, class);
            self.disclaim(device, id, class);
        }
    }

    /// Bytes of a device may have become free: whoever waits for some is considered again.
    pub(super) fn unblock(&mut self, device: DeviceId) {
        let blocked = std::mem::take(&mut self.device(device).blocked);
        for (model, class) in blocked {
            self.unpark(model, class);
        }
    }

    /// A class that has no rows any more neither waits nor claims; but if it has just run out of memory, those who come next
    /// wait like those who were there.
    pub(super) fn settle(&mut self, model: ModelId, class: ClassId) {
        let device = self.models[&model].plan.device;
        let (empty, parked) = match self.models[&model].queue.class(class) {
            Some(class) => (class.is_empty(), class.parked),
            None => (true, None),
        };
        if empty {
            self.disclaim(device, model, class);
        }
        if empty && !matches!(parked, Some(Parked::Backoff(_))) {
            self.unpark(model, class);
        }
    }

    /// Gives up a class's claim on bytes, if it has one; others may go on then.
    pub(super) fn disclaim(&mut self, device: DeviceId, model: ModelId, class: ClassId) {
        if self.device(device).disclaim(model, class) {
            self.unblock(device);
        }
    }

    pub(super) fn device(&mut self, id: DeviceId) -> &mut Device {
        self.devices.get_mut(&id).expect("the devices of loaded models are known")
    }
}
