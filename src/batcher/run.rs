//! The loop: events in, scheduler asked, actions out.

use super::classes::Classes;
use super::handle::{Arrival, Batcher, InferError, Message};
use super::load::ModelLoad;
use super::pending::PendingTable;
use super::statistics::Statistics;
use crate::clock::Clock;
use crate::metrics::{Metrics, ModelMetrics, Stage};
use crate::model::ModelSpec;
use crate::runtime::{Batch, BatchPart, Completion, RunError, WorkerHandle};
use crate::scheduler::{Action, Dispatch, Input, MemorySample, Outcome, Rejection, RequestMeta, Scheduler};
use crate::signal::{Scaling, Signals};
use crate::trace::Tracer;
use crate::units::{BatchId, InstanceId, Instant, ModelId};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::{Notify, mpsc, oneshot};

/// Completions that may wait for the loop: more than all workers together can have in flight.
const MAX_COMPLETIONS: usize = 1024;
/// Load, unload and memory messages that may wait for the loop.
const MAX_CONTROLS: usize = 64;
/// Events that may wait for whoever listens.
const MAX_EVENTS: usize = 64;
/// Messages taken in before the scheduler is asked: a burst forms one batch, and no completion waits longer than this.
const BURST: usize = 256;

/// What the rest of the server tells the loop.
#[derive(Debug)]
pub enum Control {
    /// A model is ready.
    Load {
        /// It.
        model: Box<ModelLoad>,
        /// Told as soon as requests for it find it here. They come by a channel of their own, so whoever shows the model to clients
        /// waits for this: they would be refused otherwise.
        taken: oneshot::Sender<()>,
    },
    /// A model goes away.
    Unload(ModelId),
    /// Memory was measured.
    Memory(MemorySample),
    /// No new work; answered when the last request has left.
    Drain(oneshot::Sender<()>),
    /// No new work, and everything inside is refused as [`Rejection::Draining`] now, whatever is in flight.
    Abandon,
}

/// What the loop tells the rest of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An instance cannot run anything any more.
    InstanceLost {
        /// Its model.
        model: ModelId,
        /// The instance.
        instance: InstanceId,
        /// What happened.
        reason: String,
        /// Instances that the model has left.
        remaining: usize,
    },
}

/// The channel ends of a loop.
#[derive(Debug)]
pub struct Ends {
    /// For HTTP.
    pub batcher: Batcher,
    /// For the repository.
    pub control: mpsc::Sender<Control>,
    /// For workers.
    pub completions: mpsc::Sender<Completion>,
    /// What happened.
    pub events: mpsc::Receiver<Event>,
    /// Notified when idle memory should be given back at once.
    pub trim: Arc<Notify>,
}

pub(super) struct LoadedModel {
    pub(super) instances: Vec<InstanceId>,
    /// What it is to the scheduler: one for each device.
    pub(super) plans: Vec<ModelId>,
    pub(super) classes: Classes,
    pub(super) spec: Arc<ModelSpec>,
    pub(super) metrics: Arc<ModelMetrics>,
    pub(super) statistics: Statistics,
}

pub(super) struct Flight {
    pub(super) model: ModelId,
    pub(super) dispatch: Dispatch,
    pub(super) begun: Instant,
}

/// The batcher's task.
pub struct Loop {
    pub(super) clock: Clock,
    pub(super) metrics: Arc<Metrics>,
    /// Records batches and the ways of requests; `None`: nobody does.
    pub(super) tracer: Option<Tracer>,
    pub(super) signals: Signals,
    pub(super) scheduler: Scheduler,
    pub(super) pending: PendingTable,
    pub(super) models: HashMap<ModelId, LoadedModel>,
    /// Whose the scheduler's models are.
    pub(super) owners: HashMap<ModelId, ModelId>,
    pub(super) workers: HashMap<InstanceId, WorkerHandle>,
    pub(super) flights: HashMap<BatchId, Flight>,
    pub(super) messages: mpsc::Receiver<Message>,
    pub(super) controls: mpsc::Receiver<Control>,
    pub(super) completions: mpsc::Receiver<Completion>,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) trim: Arc<Notify>,
    pub(super) drained: Option<oneshot::Sender<()>>,
    /// Whether something has happened since the last publication, whether what was published changes all the same, and when
    /// the next one is due.
    pub(super) changed: bool,
    pub(super) settling: bool,
    pub(super) next_publication: Instant,
}

impl Loop {
    /// A loop for at most `max_in_flight` requests at a time, and the ends to speak to it.
    #[must_use]
    pub fn new(max_in_flight: usize, scaling: Scaling, clock: Clock, metrics: Arc<Metrics>) -> (Self, Ends) {
        let (batcher, messages) = Batcher::new(max_in_flight);
        let (control, controls) = mpsc::channel(MAX_CONTROLS);
        let (completion_sender, completions) = mpsc::channel(MAX_COMPLETIONS);
        let (events, event_receiver) = mpsc::channel(MAX_EVENTS);
        let trim = Arc::new(Notify::new());
        let this = Self {
            trim: Arc::clone(&trim),
            clock,
            metrics,
            tracer: None,
            signals: Signals::new(scaling),
            scheduler: Scheduler::new(),
            pending: PendingTable::default(),
            models: HashMap::new(),
            owners: HashMap::new(),
            workers: HashMap::new(),
            flights: HashMap::new(),
            messages,
            controls,
            completions,
            events,
            drained: None,
            changed: false,
            settling: false,
            next_publication: Instant::default(),
        };
        (this, Ends { batcher, control, completions: completion_sender, events: event_receiver, trim })
    }

    /// The same, recording what becomes of requests that are in a trace.
    #[must_use]
    pub fn traced(self, tracer: Option<Tracer>) -> Self {
        Self { tracer, ..self }
    }

    /// Runs until a drain is complete, or until whoever controls it is gone.
    pub async fn run(mut self) {
        self.run_until_drained().await;
        let workers = std::mem::take(&mut self.workers);
        // Letting the channels go ends the threads; joining them blocks, so it is done where that hurts nobody.
        let joined = tokio::task::spawn_blocking(|| {
            for worker in workers.into_values() {
                drop(worker.batches);
                worker.thread.map(std::thread::JoinHandle::join);
            }
        });
        let _ = joined.await;
        if let Some(drained) = self.drained.take() {
            let _ = drained.send(());
        }
    }

    async fn run_until_drained(&mut self) {
        loop {
            // While something is inside, what is published follows; the last publication says that nothing is.
            let publication = (self.changed || self.settling).then_some(self.next_publication);
            let wake = self.scheduler.poll_timeout().into_iter().chain(publication).min();
            let wake = wake.map(|at| self.clock.to_tokio(at));
            let timer = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                Some(completion) = self.completions.recv() => self.complete(completion),
                control = self.controls.recv() => match control {
                    Some(control) => self.control(control),
                    None => return,
                },
                // HTTP may let its last handle go before it tells us to drain: that is not the end.
                Some(message) = self.messages.recv() => self.message(message),
                () = timer => {}
            }
            self.take_burst();
            self.act();
            self.publish();
            if self.is_drained() {
                return;
            }
        }
    }

    /// Takes in what is already there, so that a burst becomes one batch and not one batch and a rest.
    fn take_burst(&mut self) {
        for _ in 0..BURST {
            let mut idle = true;
            if let Ok(completion) = self.completions.try_recv() {
                self.complete(completion);
                idle = false;
            }
            // What it was told before a message holds for that message.
            if let Ok(control) = self.controls.try_recv() {
                self.control(control);
                continue;
            }
            if let Ok(message) = self.messages.try_recv() {
                self.message(message);
                idle = false;
            }
            if idle {
                return;
            }
        }
    }

    fn message(&mut self, message: Message) {
        match message {
            Message::Arrive(arrival) => self.arrive(arrival),
            Message::Cancel(id) => {
                let gone = self.pending.remove(id);
                if let Some(mut pending) = gone {
                    self.count_failure(&mut pending);
                    if let Some(model) = self.models.get(&pending.request.model.id) {
                        model.metrics.triton.cancelled();
                    }
                }
                self.handle(Input::Cancel(id));
            }
            Message::Statistics(reply) => {
                let all = self.models.iter().map(|(id, model)| (*id, model.statistics.clone()));
                // Whoever asked may have gone.
                let _ = reply.send(all.collect());
            }
        }
    }

    fn arrive(&mut self, arrival: Arrival) {
        let now = self.clock.now();
        let model_id = arrival.request.model.id;
        let Some(model) = self.models.get_mut(&model_id) else {
            let _ = arrival.reply.send(Err(InferError::Rejected(Rejection::Unhealthy)));
            return;
        };
        let request = &arrival.request;
        let (class, family) = model.classes.of(request);
        let mut meta = RequestMeta {
            id: arrival.id,
            model: model_id,
            class,
            family,
            units: request.units,
            rows: request.rows,
            bytes: request.bytes,
            deadline: Some(now + request.timeout.unwrap_or(request.model.settings.default_timeout)),
            priority: request.priority,
        };
        if let [_, _, ..] = model.plans.as_slice() {
            meta.model = self.scheduler.least_loaded(now, &model.plans, &meta).unwrap_or(model_id);
        }
        self.pending.insert(arrival, now);
        self.handle(Input::Arrive(meta));
    }

    fn control(&mut self, control: Control) {
        match control {
            Control::Load { model, taken } => {
                self.load(*model);
                // Whoever waits may have gone.
                let _ = taken.send(());
            }
            Control::Unload(model) => {
                let plans = self.models.get(&model).map(|loaded| loaded.plans.clone()).unwrap_or_default();
                for plan in plans {
                    self.handle(Input::Unload(plan));
                    self.owners.remove(&plan);
                }
                // Letting a worker's channel go ends its thread after the batches that it has.
                let Some(gone) = self.models.remove(&model) else { return };
                for instance in &gone.instances {
                    self.workers.remove(instance);
                }
                let (name, version) = (&gone.spec.name, gone.spec.version);
                // The same version may have been loaded anew: it goes on counting where the one before ends.
                if !self.models.values().any(|other| other.spec.name == *name && other.spec.version == version) {
                    self.metrics.forget(name, version);
                }
            }
            Control::Memory(sample) => self.handle(Input::Memory(sample)),
            Control::Drain(done) => {
                self.drained = Some(done);
                self.handle(Input::Drain);
            }
            Control::Abandon => {
                self.handle(Input::Drain);
                for (id, mut pending) in self.pending.take() {
                    self.count_failure(&mut pending);
                    self.handle(Input::Cancel(id));
                    pending.fail(InferError::Rejected(Rejection::Draining));
                }
            }
        }
    }

    pub(super) fn handle(&mut self, input: Input) {
        let now = self.clock.now();
        self.note_change(now);
        self.scheduler.handle(now, input);
    }

    fn act(&mut self) {
        let now = self.clock.now();
        while let Some(action) = self.scheduler.poll_action(now) {
            match action {
                Action::Dispatch(dispatch) => self.dispatch(dispatch),
                Action::Finish(id) => self.finish(id),
                Action::Reject(id, rejection) => self.reject(id, rejection),
                Action::Trim(_) => self.trim.notify_one(),
            }
        }
    }

    fn dispatch(&mut self, dispatch: Dispatch) {
        let now = self.clock.now();
        let mut parts = Vec::with_capacity(dispatch.parts.len());
        let model = self.owner(dispatch.model);
        let metrics = self.models.get(&model).map(|model| &model.metrics);
        for part in &dispatch.parts {
            // A cancelled request stays in its batch only if the scheduler did not hear of it in time: never, since
            // messages are taken in before actions are asked for.
            let pending = self.pending.get_mut(part.request).expect("the scheduler dispatches only what is pending");
            if pending.dispatched.is_none() {
                pending.dispatched = Some(now);
                if let Some(metrics) = metrics {
                    let waited = now.since(pending.arrived);
                    metrics.queue_seconds.observe(waited.as_secs_f64());
                    metrics.spent(Stage::Queue, waited);
                }
            }
            parts.push(BatchPart { request: Arc::clone(&pending.request), start: part.start, rows: part.rows });
        }
        if let Some(metrics) = metrics {
            metrics.batch_rows.observe(f64::from(dispatch.rows));
            metrics.batch_fill_ratio.observe(f64::from(dispatch.rows) / f64::from(dispatch.padded_rows));
            metrics.padding_rows.inc_by(u64::from(dispatch.padded_rows.saturating_sub(dispatch.rows)));
            metrics.limited(dispatch.limited_by).inc();
        }
        let (id, bytes) = (dispatch.batch, dispatch.bytes);
        let batch = Batch { id, parts, bytes, padded_rows: dispatch.padded_rows };
        let worker = self.workers.get(&dispatch.instance);
        let sent = worker.is_some_and(|worker| worker.batches.try_send(batch).is_ok());
        let (id, instance) = (dispatch.batch, dispatch.instance);
        self.flights.insert(id, Flight { model, dispatch, begun: now });
        if !sent {
            self.lost(id, model, instance, "its thread has ended".to_owned());
        }
    }

    fn complete(&mut self, completion: Completion) {
        let Some(flight) = self.flights.remove(&completion.batch) else { return };
        let model = flight.model;
        self.observe(&flight, &completion);
        self.trace_batch(&flight, &completion);
        let outcome = match completion.result {
            Ok(outputs) => {
                self.count_batch(&flight, completion.stages);
                self.deliver(&flight.dispatch.parts, outputs, completion.stages);
                Outcome::Done { duration: completion.stages.occupied(), bytes: completion.bytes }
            }
            Err(RunError::OutOfMemory { message }) => {
                tracing::warn!(model = %model, rows = flight.dispatch.rows, %message, "a batch found no memory");
                Outcome::OutOfMemory { bytes: completion.bytes }
            }
            Err(RunError::Model(text)) => {
                self.remember_fault(&flight.dispatch.parts, &text);
                Outcome::Failed
            }
            Err(RunError::Lost(reason)) => {
                self.flights.insert(completion.batch, flight);
                return self.lost(completion.batch, model, completion.instance, reason);
            }
        };
        self.handle(Input::Complete(completion.batch, outcome));
    }

    /// Publishes first, closes the door, and only then lets the scheduler place the rows elsewhere.
    fn lost(&mut self, batch: BatchId, model: ModelId, instance: InstanceId, reason: String) {
        tracing::error!(%model, %instance, %reason, "an instance is lost");
        self.workers.remove(&instance);
        let remaining = self.models.get_mut(&model).map_or(0, |loaded| {
            loaded.instances.retain(|other| *other != instance);
            loaded.instances.len()
        });
        let _ = self.events.try_send(Event::InstanceLost { model, instance, reason, remaining });
        let orphans: Vec<BatchId> = self
            .flights
            .iter()
            .filter(|(id, flight)| **id != batch && flight.dispatch.instance == instance)
            .map(|(id, _)| *id)
            .collect();
        for id in std::iter::once(batch).chain(orphans) {
            self.flights.remove(&id);
            self.handle(Input::Complete(id, Outcome::InstanceLost));
        }
    }

    fn is_drained(&self) -> bool {
        self.drained.is_some() && self.pending.is_empty() && self.flights.is_empty()
    }
}
