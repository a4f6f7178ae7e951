//! Dispatch: which class runs next, how large, or why it waits.

use super::budget::{Claim, Device};
use super::machine::{InFlight, Scheduler};
use super::model::{Instance, Model};
use super::oom::{MEMORY_PATIENCE, MEMORY_RETRY_AFTER, STARVED_POLL, Starved, count, split_off};
use super::pack::{Mix, View};
use super::policy::{Bounds, NoRoom, Room, Size, form_batch, meet_deadlines};
use super::queue::{Class, Kin, Kind, Lead, Parked, Requests};
use super::turns::{Need, staged};
use super::{Dispatch, LimitedBy, Part, Rejection};
use crate::units::{BatchId, ByteSize, ClassId, Instant, ModelId, RequestId, Rows};
use std::collections::BTreeSet;
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

    /// Other rows of its family may run with those of the class that leads, or in place of them.
    fn consider(&self, now: Instant, id: ModelId, slot: Instance, lead: Lead) -> Verdict {
        let model = &self.models[&id];
        let device = &self.devices[&model.plan.device];
        let start = if slot.held == 0 { now } else { slot.free_at.max(now) };
        let room = room(model, device, slot);
        let view = View { now, start, id, model, requests: &self.requests, device, room };
        if let Some(mix) = view.mix(lead)
            && let verdict @ (Verdict::Run(_) | Verdict::Park(_) | Verdict::Wait) =
                self.weigh(now, id, slot, &Crowd::of(mix, model))
        {
            return verdict;
        }
        if device.closed_to(id, lead.class()) {
            return Verdict::Park(Parked::Memory(None));
        }
        self.weigh(now, id, slot, &Crowd::alone(lead, model))
    }

    fn weigh(&self, now: Instant, id: ModelId, slot: Instance, crowd: &Crowd) -> Verdict {
        let (lead, model) = (crowd.lead, &self.models[&id]);
        let device = &self.devices[&model.plan.device];
        let size = match crowd.fit(now, model, device, slot) {
            Ok(size) => size,
            Err(NoRoom { needed }) => return self.no_room(now, id, (slot, lead), needed),
        };
        let idle = slot.held == 0;
        if !idle && !crowd.is_as_large_as_ever(now, model, size, device.budget()) {
            return Verdict::Wait;
        }
        let mut parts = match &crowd.parts {
            Some(parts) => parts.clone(),
            None => model.queue.peek(&self.requests, lead, size.rows),
        };
        if let Some(until) = self.company_until(now, model, crowd, (size, &parts)).filter(|until| *until > now) {
            return Verdict::Park(Parked::Company(until));
        }
        split_off(&mut parts, size.rows);
        let start = if idle { now } else { slot.free_at.max(now) };
        let allowed = allowances(&self.requests, &parts, start);
        let slack = |rows| allowed.get(allowed.partition_point(|(upto, _)| *upto < rows)).and_then(|(_, slack)| *slack);
        let units = model.queue.class(lead.class()).expect("a class that leads has rows").units;
        let estimate = model.cost.estimate(lead.class(), units);
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
    fn company_until(
        &self,
        now: Instant,
        model: &Model,
        crowd: &Crowd,
        (size, parts): (Size, &[Part]),
    ) -> Option<Instant> {
        let waits = matches!(crowd.lead, Lead::Waiting(..)) && size.limited_by == LimitedBy::Rows && !self.draining;
        if !waits {
            return None;
        }
        let classes: BTreeSet<ClassId> = parts.iter().map(|part| self.requests[&part.request].meta.class).collect();
        let classes = || classes.iter().filter_map(|class| model.queue.class(*class));
        let oldest = classes().filter_map(Class::oldest).min();
        let delay = Some(model.plan.max_queue_delay).filter(|delay| *delay > Duration::ZERO);
        let patient = delay.zip(oldest).map(|(delay, (_, oldest))| self.requests[&oldest].arrived + delay);
        let until = patient.max(gather_until(now, model, crowd, size))?;
        let earliest = classes().filter_map(|class| class.earliest_deadline).min();
        let latest = earliest.map(|deadline| deadline - size.duration.unwrap_or_default() * 2);
        Some(latest.map_or(until, |latest| latest.min(until)))
    }

    fn commit(&mut self, now: Instant, id: ModelId, choice: Choice) -> Dispatch {
        let Choice { lead, slot, size, parts } = choice;
        let model = self.models.get_mut(&id).expect("a model that runs is loaded");
        let device = model.plan.device;
        let kinds = parts.iter().map(|part| Kind::of(&self.requests[&part.request].meta));
        // What was cut off may have been what the others were to be padded for.
        let ran_as = kinds.clone().max_by_key(|kind| kind.units).expect("a batch has rows");
        let led_by = model.queue.class_mut(lead.class());
        let kind = match lead {
            Lead::Returned(class) => Kind { class, family: led_by.family, units: led_by.units },
            Lead::Waiting(..) => ran_as,
        };
        let classes: BTreeSet<ClassId> = kinds.map(|kind| kind.class).chain([lead.class()]).collect();
        let Size { rows, padded_rows, bytes, duration, limited_by } = size;
        let staged = model.plan.staged_unit.map(|unit| staged(unit, kind.units, padded_rows));
        assert!(rows > 0 && rows <= padded_rows && padded_rows <= model.ladder().largest(), "a batch of {rows} rows");
        assert_eq!(rows, count(&parts), "a batch has the rows of its parts");
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
        let dispatch = Dispatch {
            batch,
            model: id,
            class: kind.class,
            instance: slot.id,
            parts,
            rows,
            padded_rows,
            bytes,
            duration,
            limited_by,
        };
        let reserving = self.device(device);
        reserving.reserve(slot.id, batch, Need { peak: bytes, staged });
        let budget = reserving.budget();
        let claimed = classes.iter().filter(|class| reserving.disclaim(id, **class)).count();
        if claimed > 0 {
            self.unblock(device);
        } else {
            reserving.overtaken();
        }
        self.models.get_mut(&id).expect("still loaded").note_pace(kind.class, kind.units, budget);
        self.in_flight.insert(batch, InFlight { dispatch: dispatch.clone(), kind, ran_as, device });
        classes.into_iter().for_each(|class| self.settle(id, class));
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

/// Rows that may run together.
struct Crowd {
    lead: Lead,
    kin: Kin,
    /// How many there are.
    rows: u64,
    /// Which they are, if they are not the first of the class that leads.
    parts: Option<Vec<Part>>,
    /// Whether others were left out that would have been padded too far.
    leaves_out: bool,
}

impl Crowd {
    /// Rows of the class that leads.
    fn alone(lead: Lead, model: &Model) -> Self {
        let rows = model.queue.rows_under(lead, model.ladder().largest());
        Self { lead, kin: kin(model, lead), rows, parts: None, leaves_out: false }
    }

    /// Rows of several classes.
    fn of(mix: Mix, model: &Model) -> Self {
        let Mix { lead, parts, leaves_out } = mix;
        Self { lead, kin: kin(model, lead), rows: count(&parts).into(), parts: Some(parts), leaves_out }
    }

    /// The largest useful size that this instance has room for.
    fn fit(&self, now: Instant, model: &Model, device: &Device, slot: Instance) -> Result<Size, NoRoom> {
        let all = self.size(now, model, room(model, device, slot))?;
        if slot.held > 0 {
            return Ok(all);
        }
        // Where bytes are what limits, other idle instances have as much claim to them: one batch that takes all that is left
        // would keep them idle.
        let is_short = all.limited_by == LimitedBy::Bytes;
        let share = ByteSize(device.left().0 / if is_short { model.idle_instances().max(1) } else { 1 });
        // A few rows less leave room for the inputs of the next batch, which are then copied while this one runs.
        let is_followed = model.plan.pipeline > 1 && model.queue.rows > u64::from(all.rows);
        if is_followed && let Ok(size) = self.size(now, model, followed(model, share)) {
            return Ok(size);
        }
        let own = is_short.then(|| self.size(now, model, Room::of(share)));
        Ok(own.and_then(Result::ok).unwrap_or(all))
    }

    /// The largest useful size that there is room for.
    fn size(&self, now: Instant, model: &Model, room: Room) -> Result<Size, NoRoom> {
        let size = size(now, model, (self.lead.class(), self.rows), room)?;
        let limited_by = match size.limited_by {
            LimitedBy::Rows if self.leaves_out => LimitedBy::Padding,
            other => other,
        };
        Ok(Size { limited_by, ..size })
    }

    /// Whether waiting could not make a batch larger: only then a busy instance may hold it.
    fn is_as_large_as_ever(&self, now: Instant, model: &Model, found: Size, budget: ByteSize) -> bool {
        match (self.lead, found.limited_by) {
            (Lead::Returned(_), _) => false,
            (_, LimitedBy::Knee | LimitedBy::Ladder) => true,
            (_, LimitedBy::Bytes) => {
                self.size(now, model, followed(model, budget)).is_ok_and(|later| later.rows == found.rows)
            }
            _ => false,
        }
    }
}

/// The memory that a batch on this instance may have. One that waits behind others takes over their run memory, where that is how
/// they run.
fn room(model: &Model, device: &Device, slot: Instance) -> Room {
    match model.plan.staged_unit.filter(|_| slot.held > 0) {
        Some(staged_unit) => Room { bytes: device.left(), taken_over: device.taken_over(slot.id), staged_unit },
        None => Room::of(device.left()),
    }
}

/// So many bytes for a batch and for what as large a batch needs that waits behind it, where that takes over its run memory.
fn followed(model: &Model, bytes: ByteSize) -> Room {
    Room { staged_unit: model.plan.staged_unit.unwrap_or_default(), ..Room::of(bytes) }
}

/// Those that may share a batch with the class that leads.
fn kin(model: &Model, lead: Lead) -> Kin {
    let family = model.queue.class(lead.class()).and_then(|class| class.family);
    family.map_or(Kin::Class(lead.class()), Kin::Family)
}

/// The largest useful size of a batch of a class that there is room for, of so many rows.
pub(super) fn size(now: Instant, model: &Model, (class, rows): (ClassId, u64), room: Room) -> Result<Size, NoRoom> {
    let state = model.queue.class(class).expect("only classes with rows are sized");
    let estimate = model.cost.estimate(class, state.units);
    let ceiling = state.ceiling.map(|ceiling| ceiling.rows_at(now));
    form_batch(model.ladder(), estimate, Bounds { rows, knee: estimate.knee_or_trial(), ceiling, room })
}

/// Until when a batch waits for the rows that tend to follow the last answers, if with them, and although it waits, more
/// rows per second come out than without.
fn gather_until(now: Instant, model: &Model, crowd: &Crowd, size: Size) -> Option<Instant> {
    let class = crowd.lead.class();
    let expected = model.echo.expected(now, crowd.kin)?;
    let estimate = model.cost.estimate(class, model.queue.class(class)?.units);
    let most = estimate.knee().unwrap_or(Rows::MAX).min(model.ladder().largest());
    let larger = size.rows.saturating_add(expected.rows).min(most);
    let rate = |rows: Rows, seconds: f64| f64::from(rows) / seconds.max(1e-9);
    let waited = expected.soon.since(now).as_secs_f64();
    let gain = rate(larger, waited + estimate.seconds(larger)?) > rate(size.rows, estimate.seconds(size.rows)?);
    gain.then_some(expected.until)
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
