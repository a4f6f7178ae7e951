//! Dispatch: which class runs next, how large, or why it waits.

use super::budget::Claim;
use super::machine::{InFlight, Scheduler};
use super::model::{Instance, Model};
use super::oom::{MEMORY_PATIENCE, MEMORY_RETRY_AFTER, STARVED_POLL, Starved, split_off};
use super::policy::{Bounds, NoRoom, Size, form_batch, meet_deadlines};
use super::queue::{Lead, Parked, Requests};
use super::{Dispatch, LimitedBy, Part, Rejection};
use crate::units::{BatchId, ByteSize, Instant, ModelId, RequestId, Rows};
use std::time::Duration;

/// A batch that may run.
struct Choice {
    lead: Lead,
    slot: Instance,
    size: Size,
    parts: Vec<Part>,
}

/// What is to be done about the class that leads.
enum Verdict {
    /// Run these rows.
    Run(Choice),
    /// Consider it later.
    Park(Parked),
    /// It fits as soon as batches in flight end.
    Claim(ByteSize),
    /// It is not predicted to fit at all at present.
    Starve,
    /// Its first request cannot be served.
    Reject(RequestId, Rejection),
    /// The instance is busy and the batch may still grow.
    Wait,
}

impl Scheduler {
    /// The next batch of any model that may have one. Models take turns.
    pub(super) fn next_dispatch(&mut self, now: Instant) -> Option<Dispatch> {
        while let Some(id) = self.line.pop_front() {
            self.models.get_mut(&id).expect("models in line are loaded").in_line = false;
            if let Some(dispatch) = self.dispatch_from(now, id) {
                self.line_up(id);
                return Some(dispatch);
            }
        }
        None
    }

    /// Ends because each turn but the last parks a class or rejects a request.
    fn dispatch_from(&mut self, now: Instant, id: ModelId) -> Option<Dispatch> {
        loop {
            let slot = self.models[&id].slot()?;
            let lead = self.models[&id].queue.lead()?;
            if self.review_starved(now, id, lead) {
                continue;
            }
            let class = lead.class();
            match self.consider(now, id, slot, lead) {
                Verdict::Run(choice) => return Some(self.commit(now, id, choice)),
                Verdict::Park(parked) => self.park(id, class, parked),
                Verdict::Claim(needed) => self.claim(id, lead, needed),
                Verdict::Starve => self.starve(now, id, lead),
                Verdict::Reject(request, rejection) => self.reject_at_head(request, rejection),
                Verdict::Wait => return None,
            }
        }
    }

    fn consider(&self, now: Instant, id: ModelId, slot: Instance, lead: Lead) -> Verdict {
        let model = &self.models[&id];
        let class = model.queue.class(lead.class()).expect("a class that leads has rows");
        let device = &self.devices[&model.plan.device];
        if device.closed_to(id, lead.class()) {
            return Verdict::Park(Parked::Memory(None));
        }
        // Where bytes are what limits, other idle instances have as much claim to them: one batch that takes all that is left
        // would keep them idle.
        let share = ByteSize(device.left().0 / model.idle_instances().max(1));
        let size = match size(now, model, lead, device.left()) {
            Ok(all) if all.limited_by == LimitedBy::Bytes => size(now, model, lead, share).unwrap_or(all),
            Ok(size) => size,
            Err(NoRoom { needed }) => return self.no_room(now, id, (slot, lead), needed),
        };
        let idle = slot.held == 0;
        if !idle && !is_as_large_as_ever(now, model, lead, size, device.budget()) {
            return Verdict::Wait;
        }
        if let Some(until) = self.company_until(now, model, lead, size).filter(|until| *until > now) {
            return Verdict::Park(Parked::Company(until));
        }
        let mut parts = model.queue.peek(&self.requests, lead, size.rows);
        let start = if idle { now } else { slot.free_at.max(now) };
        let allowed = allowances(&self.requests, &parts, start);
        let slack = |rows| allowed.get(allowed.partition_point(|(upto, _)| *upto < rows)).and_then(|(_, slack)| *slack);
        let estimate = model.cost.estimate(lead.class(), class.units);
        match meet_deadlines(model.ladder(), estimate, size, slack) {
            Some(met) if idle || met.rows == size.rows => {
                split_off(&mut parts, met.rows);
                let limited_by = if matches!(lead, Lead::Returned(_)) { LimitedBy::Retry } else { met.limited_by };
                Verdict::Run(Choice { lead, slot, size: Size { limited_by, ..met }, parts })
            }
            None if idle => Verdict::Reject(parts[0].request, Rejection::DeadlineExceeded),
            _ => Verdict::Wait,
        }
    }

    /// Not even the smallest batch fits.
    fn no_room(&self, now: Instant, id: ModelId, (slot, lead): (Instance, Lead), needed: ByteSize) -> Verdict {
        let model = &self.models[&id];
        let device = &self.devices[&model.plan.device];
        let class = model.queue.class(lead.class()).expect("a class that leads has rows");
        if needed > device.capacity() {
            let head = model.queue.peek(&self.requests, lead, 1)[0].request;
            return Verdict::Reject(head, Rejection::TooLarge { needed, capacity: device.capacity() });
        }
        if needed <= device.budget() {
            return Verdict::Claim(needed);
        }
        let due = class.starved.is_some_and(|starved| starved.not_before <= now);
        if device.in_flight() > 0 || !due || device.budget() == ByteSize::ZERO {
            return Verdict::Starve;
        }
        // The prediction may be wrong: alone on its device, one row may try with all there is.
        let padded_rows = model.ladder().smallest();
        let duration = model.cost.estimate(lead.class(), class.units).duration(padded_rows);
        let limited_by = if matches!(lead, Lead::Returned(_)) { LimitedBy::Retry } else { LimitedBy::Bytes };
        let size = Size { rows: 1, padded_rows, bytes: device.budget(), duration, limited_by };
        Verdict::Run(Choice { lead, slot, size, parts: model.queue.peek(&self.requests, lead, 1) })
    }

    /// Until when a batch waits for company, if it does: only if more rows would make it larger, and never so long that the
    /// earliest deadline could not be met with as much time again as the batch takes.
    fn company_until(&self, now: Instant, model: &Model, lead: Lead, size: Size) -> Option<Instant> {
        let waits = matches!(lead, Lead::Waiting(..)) && size.limited_by == LimitedBy::Rows && !self.draining;
        if !waits {
            return None;
        }
        let class = model.queue.class(lead.class())?;
        let (_, oldest) = class.oldest()?;
        let delay = Some(model.plan.max_queue_delay).filter(|delay| *delay > Duration::ZERO);
        let patient = delay.map(|delay| self.requests[&oldest].arrived + delay);
        let until = patient.max(gather_until(now, model, lead, size))?;
        let latest = class.earliest_deadline.map(|deadline| deadline - size.duration.unwrap_or_default() * 2);
        Some(latest.map_or(until, |latest| latest.min(until)))
    }

    fn commit(&mut self, now: Instant, id: ModelId, choice: Choice) -> Dispatch {
        let Choice { lead, slot, size, parts } = choice;
        let model = self.models.get_mut(&id).expect("a model that runs is loaded");
        let (device, units) = (model.plan.device, model.queue.class_mut(lead.class()).units);
        let Size { rows, padded_rows, bytes, duration, limited_by } = size;
        assert!(rows > 0 && rows <= padded_rows && padded_rows <= model.ladder().largest(), "a batch of {rows} rows");
        assert_eq!(rows, super::oom::count(&parts), "a batch has the rows of its parts");
        model.queue.take(&mut self.requests, lead, &parts);
        model.occupy(slot.id, now, duration);
        model.rows_in_flight += u64::from(rows);
        for part in &parts {
            let request = &self.requests[&part.request];
            if let Some(deadline) = request.meta.deadline.filter(|_| request.waiting == 0) {
                self.deadlines.remove(&(deadline, part.request));
            }
        }
        self.batches += 1;
        let batch = BatchId(self.batches);
        let dispatch =
            Dispatch { batch, model: id, instance: slot.id, parts, rows, padded_rows, bytes, duration, limited_by };
        let reserving = self.device(device);
        reserving.reserve(bytes);
        let budget = reserving.budget();
        if reserving.disclaim(id, lead.class()) {
            self.unblock(device);
        } else {
            reserving.overtaken();
        }
        self.models.get_mut(&id).expect("still loaded").note_pace(lead.class(), units, budget);
        let flight = InFlight { dispatch: dispatch.clone(), class: lead.class(), units, device };
        self.in_flight.insert(batch, flight);
        self.settle(id, lead.class());
        dispatch
    }

    /// Waits for bytes of batches in flight. Rows that came back are not overtaken.
    fn claim(&mut self, id: ModelId, lead: Lead, needed: ByteSize) {
        let device = self.models[&id].plan.device;
        let patience = if matches!(lead, Lead::Returned(_)) { 0 } else { super::budget::MAX_OVERTAKES };
        self.device(device).claim(Claim { model: id, class: lead.class(), needed, patience });
        self.park(id, lead.class(), Parked::Memory(None));
    }

    /// Waits for memory that nobody in flight holds; others go on meanwhile.
    fn starve(&mut self, now: Instant, id: ModelId, lead: Lead) {
        let model = self.models.get_mut(&id).expect("a class that leads has a model");
        let device = model.plan.device;
        let class = model.queue.class_mut(lead.class());
        let starved = *class.starved.get_or_insert(Starved::predicted(now));
        let poll = now + STARVED_POLL;
        let wake = if starved.not_before > now { starved.not_before.min(poll) } else { poll };
        self.disclaim(device, id, lead.class());
        self.park(id, lead.class(), Parked::Memory(Some(wake)));
    }

    /// Rejects the requests of a starved class that have waited too long; true if there were any. Those with a deadline wait
    /// for it.
    fn review_starved(&mut self, now: Instant, id: ModelId, lead: Lead) -> bool {
        let class = self.models.get_mut(&id).expect("a class that leads has a model").queue.class_mut(lead.class());
        let Some(starved) = class.starved.as_mut().filter(|starved| starved.review <= now) else { return false };
        starved.review = now + STARVED_POLL;
        let since = starved.since;
        let is_over = |id: &RequestId| {
            let request = &self.requests[id];
            request.meta.deadline.is_none() && request.arrived.max(since) + MEMORY_PATIENCE <= now
        };
        let mut over: Vec<_> = class.returned().chain(class.waiting()).filter(is_over).collect();
        over.dedup();
        for request in &over {
            self.reject(*request, Rejection::MemoryExhausted { retry_after: MEMORY_RETRY_AFTER });
        }
        !over.is_empty()
    }

    /// Rejects a head. If it was for its deadline, the estimate that said so is trusted a little less.
    fn reject_at_head(&mut self, request: RequestId, rejection: Rejection) {
        let meta = self.requests[&request].meta;
        if rejection == Rejection::DeadlineExceeded {
            let model = self.models.get_mut(&meta.model).expect("a class that leads has a model");
            model.cost.doubt(meta.class);
        }
        self.reject(request, rejection);
    }
}

/// The largest useful size of the next batch of a class that fits `bytes`.
fn size(now: Instant, model: &Model, lead: Lead, bytes: ByteSize) -> Result<Size, NoRoom> {
    let class = model.queue.class(lead.class()).expect("a class that leads has rows");
    let estimate = model.cost.estimate(lead.class(), class.units);
    let rows = model.queue.rows_under(lead, model.ladder().largest());
    let ceiling = class.ceiling.map(|ceiling| ceiling.rows_at(now));
    form_batch(model.ladder(), estimate, Bounds { rows, knee: estimate.knee_or_trial(), ceiling, bytes })
}

/// Until when a batch waits for the rows that tend to follow the last answers, if with them, and although it waits, more
/// rows per second come out than without.
fn gather_until(now: Instant, model: &Model, lead: Lead, size: Size) -> Option<Instant> {
    let expected = model.echo.expected(now, lead.class())?;
    let estimate = model.cost.estimate(lead.class(), model.queue.class(lead.class())?.units);
    let most = estimate.knee().unwrap_or(Rows::MAX).min(model.ladder().largest());
    let larger = size.rows.saturating_add(expected.rows).min(most);
    let rate = |rows: Rows, seconds: f64| f64::from(rows) / seconds.max(1e-9);
    let waited = expected.soon.since(now).as_secs_f64();
    let gain = rate(larger, waited + estimate.seconds(larger)?) > rate(size.rows, estimate.seconds(size.rows)?);
    gain.then_some(expected.until)
}

/// Whether waiting could not make a batch larger: only then a busy instance may hold it.
fn is_as_large_as_ever(now: Instant, model: &Model, lead: Lead, found: Size, budget: ByteSize) -> bool {
    match (lead, found.limited_by) {
        (Lead::Returned(_), _) => false,
        (_, LimitedBy::Knee | LimitedBy::Ladder) => true,
        (_, LimitedBy::Bytes) => size(now, model, lead, budget).is_ok_and(|later| later.rows == found.rows),
        _ => false,
    }
}

/// For each prefix of `parts`: its rows, and how long they may take if they start at `start`.
fn allowances(requests: &Requests, parts: &[Part], start: Instant) -> Vec<(Rows, Option<Duration>)> {
    let prefix = |(rows, slack): &mut (Rows, Option<Duration>), part: &Part| {
        let own = requests[&part.request].meta.deadline.map(|deadline| deadline.since(start));
        (*rows, *slack) = (*rows + part.rows, slack.iter().copied().chain(own).min());
        Some((*rows, *slack))
    };
    parts.iter().scan((0, None), prefix).collect()
}
