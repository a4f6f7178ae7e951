//! The ends of batches: answers, and rows that run again.

use super::cost::Denied;
use super::machine::{InFlight, Scheduler};
use super::oom::{Ceiling, MAX_INSTANCE_LOSSES, Piece, Returned, Starved, halves, is_single};
use super::queue::{Kind, Parked};
use super::{Action, Observation, Outcome, Part, Rejection};
use crate::units::{BatchId, ByteSize, Instant};
use std::time::Duration;

impl Scheduler {
    pub(super) fn complete(&mut self, now: Instant, batch: BatchId, outcome: Outcome) {
        let flight = self.in_flight.remove(&batch).expect("only batches in flight complete");
        self.release(now, &flight);
        match outcome {
            Outcome::Done { duration, bytes } => self.done(now, flight, duration, bytes),
            Outcome::OutOfMemory { bytes } => self.out_of_memory(now, flight, bytes),
            Outcome::Failed => self.failed(flight),
            Outcome::InstanceLost => self.instance_lost(flight),
        }
    }

    /// What only this batch needed is free again, whatever its outcome.
    fn release(&mut self, now: Instant, flight: &InFlight) {
        let dispatch = &flight.dispatch;
        self.device(flight.device).release(dispatch.instance, dispatch.batch);
        let held = self.in_flight.values().filter(|other| other.dispatch.instance == dispatch.instance);
        let next: Duration = held.filter_map(|other| other.dispatch.duration).sum();
        if let Some(model) = self.models.get_mut(&dispatch.model) {
            model.rows_in_flight -= u64::from(dispatch.rows);
            model.vacate(dispatch.instance, now, next);
        }
        self.unblock(flight.device);
        self.line_up(dispatch.model);
    }

    fn done(&mut self, now: Instant, flight: InFlight, duration: Duration, bytes: ByteSize) {
        let (kind, rows) = (flight.kind, flight.dispatch.padded_rows);
        if let Some(model) = self.models.get_mut(&flight.dispatch.model) {
            let Kind { class, units, .. } = flight.ran_as;
            model.cost.observe(Observation { class, units, rows, duration, bytes });
            model.queue.fed(kind.class);
            let answered = flight.dispatch.rows;
            model.echo.answered(now, kind.kin(), answered, duration, model.plan.max_gather_delay);
            self.unpark(flight.dispatch.model, kind.class);
        }
        for part in flight.dispatch.parts {
            let Some(request) = self.requests.get_mut(&part.request) else { continue };
            request.done += part.rows;
            assert!(request.done <= request.meta.rows, "rows were answered twice");
            if request.done == request.meta.rows {
                self.requests.remove(&part.request);
                self.outbox.push_back(Action::Finish(part.request));
            }
        }
    }

    /// The rows run again in halves, because the ceiling is half of what failed. A smallest batch has no halves: it waits.
    fn out_of_memory(&mut self, now: Instant, mut flight: InFlight, bytes: ByteSize) {
        self.outbox.push_back(Action::Trim(flight.device));
        let (id, kind) = (flight.dispatch.model, flight.kind);
        let Kind { class, units, .. } = kind;
        let rows = flight.dispatch.padded_rows;
        let parts = self.still_wanted(std::mem::take(&mut flight.dispatch.parts));
        let capacity = self.device(flight.device).capacity();
        let Some(model) = self.models.get_mut(&id) else { return self.reject_all(&parts, Rejection::Unhealthy) };
        let Kind { class: ran, units: ran_units, .. } = flight.ran_as;
        model.cost.denied(Denied { class: ran, units: ran_units, rows, bytes });
        let smallest = rows <= model.ladder().smallest();
        let needed = model.least_bytes(class, units);
        if smallest && needed > capacity {
            return self.reject_all(&parts, Rejection::TooLarge { needed, capacity });
        }
        let state = model.queue.ensure(kind);
        state.ceiling = Some(Ceiling::after(rows, now, state.ceiling));
        if smallest {
            state.starved = Some(Starved::failed(now, state.starved));
        }
        let pause = state.starved.map(|starved| starved.not_before).filter(|until| *until > now);
        self.give_back(&flight, Piece { parts, why: Returned::Memory });
        if let Some(until) = pause {
            self.unpark(id, class);
            self.park(id, class, Parked::Backoff(until));
        }
    }

    /// One request alone is guilty; of several, one is: they run again in two halves.
    fn failed(&mut self, mut flight: InFlight) {
        let parts = std::mem::take(&mut flight.dispatch.parts);
        if is_single(&parts) {
            return self.reject_all(&parts, Rejection::Failed);
        }
        for half in halves(parts) {
            let parts = self.still_wanted(half);
            self.give_back(&flight, Piece { parts, why: Returned::Suspect });
        }
    }

    fn instance_lost(&mut self, mut flight: InFlight) {
        let id = flight.dispatch.model;
        if let Some(model) = self.models.get_mut(&id) {
            model.instances.retain(|instance| instance.id != flight.dispatch.instance);
        }
        let mut parts = self.still_wanted(std::mem::take(&mut flight.dispatch.parts));
        let mut suspects = Vec::new();
        for part in &parts {
            let request = self.requests.get_mut(&part.request).expect("still wanted");
            request.losses += 1;
            if request.losses > MAX_INSTANCE_LOSSES {
                suspects.push(part.clone());
            }
        }
        self.reject_all(&suspects, Rejection::Unhealthy);
        parts.retain(|part| self.requests.contains_key(&part.request));
        self.give_back(&flight, Piece { parts, why: Returned::Suspect });
        if self.models.get(&id).is_some_and(|model| model.instances.is_empty()) {
            self.reject_queue(id);
        }
    }

    /// Puts rows back in front of the queue, or refuses them if the model is gone.
    fn give_back(&mut self, flight: &InFlight, piece: Piece) {
        let id = flight.dispatch.model;
        let Some(model) = self.models.get_mut(&id) else { return self.reject_all(&piece.parts, Rejection::Unhealthy) };
        for part in &piece.parts {
            self.deadlines.extend(self.requests[&part.request].meta.deadline.map(|deadline| (deadline, part.request)));
        }
        model.queue.give_back(&mut self.requests, flight.kind, piece);
        self.end_company(id, flight.kind.class);
        self.line_up(id);
    }

    fn still_wanted(&self, mut parts: Vec<Part>) -> Vec<Part> {
        parts.retain(|part| self.requests.contains_key(&part.request));
        parts
    }

    fn reject_all(&mut self, parts: &[Part], rejection: Rejection) {
        for part in parts {
            self.reject(part.request, rejection);
        }
    }
}
