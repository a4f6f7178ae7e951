//! Packing: which rows of a family share the next batch, and how long all of them are padded.
//!
//! Rows of a family may run as any class of it that is at least as large as their own. Padding costs time, and so does running
//! few rows at once. What a batch is worth is what its rows would cost among their like, each at its own size in the best batch
//! that fits and was seen; the batch that is worth the most for each second that it takes is run. This is what gives the most
//! rows per second in the long run, for all rows must be served some day: whoever counts rows alone serves the short ones only.
//!
//! Of batches that are worth about as much, the one with the oldest head runs. Full batches of any length are about equal, so
//! without that chance would decide who waits, and the unlucky would wait long.
//!
//! Whoever waits is not left out for ever: once the oldest head of a level was left out of [`MAX_PASSED_OVER`] batches, or could
//! miss its deadline by one batch more, only batches with it are considered.

use super::budget::Device;
use super::cost::Estimate;
use super::dispatch::size;
use super::model::Model;
use super::oom::{count, join, split_off};
use super::policy::Room;
use super::queue::{Class, Lead, Level, Parked, Requests};
use super::{Packing, Part};
use crate::units::{ClassId, FamilyId, Instant, ModelId, RequestId, Rows};
use std::collections::BTreeMap;

/// Batches that may leave out the oldest head of a level although they are of its family.
pub(super) const MAX_PASSED_OVER: u32 = 4;
/// What a batch with an older head may be worth less, as a part of the best: costs are known no better. In simulations of mixed
/// lengths at saturation (tests/lengths.rs) it costs no rows per second and makes the longest waits shorter.
const ABOUT_EQUAL: f64 = 0.25;
/// Classes of a family that are looked at, those with the oldest heads first.
const WINDOW: usize = 64;

/// Rows that are to share a batch.
#[derive(Debug)]
pub(super) struct Mix {
    /// The class that all of them are padded to, at the level that leads.
    pub(super) lead: Lead,
    /// The rows; those of one class in order of arrival.
    pub(super) parts: Vec<Part>,
    /// Whether other rows of the family wait that were left out.
    pub(super) leaves_out: bool,
}

/// Where packing looks.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) now: Instant,
    /// When the batch would begin.
    pub(super) start: Instant,
    pub(super) id: ModelId,
    pub(super) model: &'a Model,
    pub(super) requests: &'a Requests,
    pub(super) device: &'a Device,
    /// The memory that the batch may have.
    pub(super) room: Room,
}

/// A class that has rows.
struct Member<'a> {
    id: ClassId,
    class: &'a Class,
    /// Its head at the level that leads, and when it came in the order of arrivals; `None`: it has rows at other levels only.
    head: Option<(u64, RequestId)>,
    /// Rows of all levels.
    rows: Rows,
    /// The most rows that a batch of this class may have.
    cap: Rows,
    /// Seconds of such a batch.
    seconds: f64,
    /// Seconds that one of its rows costs among its like.
    worth: f64,
    estimate: Estimate<'a>,
}

/// A batch that is considered: rows of the classes from `last` up to `top`, padded to `top`.
#[derive(Clone, Copy)]
struct Candidate {
    top: usize,
    last: usize,
    rows: Rows,
    /// Seconds of worth for each second that it takes.
    rate: f64,
    /// Rows of the head that had to be taken first.
    first: Rows,
}

impl View<'_> {
    /// The rows that run with, or in place of, those of the class that leads; `None` where nothing is known that would speak for
    /// other rows than those of that class.
    pub(super) fn mix(self, lead: Lead) -> Option<Mix> {
        let Lead::Waiting(level, class) = lead else { return None };
        let family = self.model.queue.class(class)?.family?;
        match self.model.plan.packing {
            Packing::Near => self.near(level, class, family),
            Packing::Fifo => self.fifo(level, family),
        }
    }

    /// The rows that are worth the most for each second.
    fn near(self, level: Level, oldest: ClassId, family: FamilyId) -> Option<Mix> {
        let members = self.members(level, family)?;
        let oldest = members.iter().position(|member| member.id == oldest)?;
        let (_, head) = members[oldest].head?;
        let slowest = members.iter().map(|member| member.seconds).fold(0.0, f64::max);
        let deadline = self.requests[&head].meta.deadline;
        let is_urgent = deadline.is_some_and(|at| at.since(self.start).as_secs_f64() < 2.0 * slowest);
        let must = (is_urgent || self.model.queue.passed_over(level) >= MAX_PASSED_OVER).then_some(oldest);
        let may_lead =
            |(_, member): &(usize, &Member<'_>)| member.head.is_some() && !self.device.closed_to(self.id, member.id);
        let tops = members.iter().enumerate().skip(must.unwrap_or(0)).filter(may_lead);
        let candidates: Vec<Candidate> = tops.filter_map(|(top, _)| self.candidate(&members, top, must)).collect();
        let best = candidates.iter().map(|candidate| candidate.rate).fold(0.0, f64::max);
        // Of about equal ones the one that serves the oldest head.
        let age = |candidate: &Candidate| {
            let heads = members[candidate.last..=candidate.top].iter().filter_map(|member| member.head);
            heads.map(|(ticket, _)| ticket).min()
        };
        let good = candidates.into_iter().filter(|candidate| candidate.rate >= best * (1.0 - ABOUT_EQUAL));
        let candidate = good.min_by_key(age)?;
        let parts = self.parts(&members, level, candidate, must);
        let all: u64 = members.iter().map(|member| u64::from(member.rows)).sum();
        let leaves_out = all > u64::from(candidate.rows);
        Some(Mix { lead: Lead::Waiting(level, members[candidate.top].id), parts, leaves_out })
    }

    /// The classes of a family that have rows and may run, ascending by size. `None` if there is nothing to choose from, or if
    /// nothing is known of the costs.
    fn members(&self, level: Level, family: FamilyId) -> Option<Vec<Member<'_>>> {
        let mut members = Vec::new();
        for (id, class) in waiting(self.model, family) {
            let most = self.model.ladder().largest();
            // One that finds no room at all may still ride along with none but itself to blame; it is not looked at.
            let Ok(found) = size(self.now, self.model, (id, u64::MAX), self.room) else { continue };
            let seconds = found.duration?.as_secs_f64();
            let estimate = self.model.cost.estimate(id, class.units);
            let worth = estimate.best_per_row(found.rows)?;
            let head = class.head(level);
            let rows = class.rows.min(most.into()) as Rows;
            members.push(Member { id, class, head, rows, cap: found.rows, seconds, worth, estimate });
        }
        if members.len() > WINDOW {
            let mut ages: Vec<u64> =
                members.iter().filter_map(|member| member.head).map(|(ticket, _)| ticket).collect();
            ages.sort_unstable();
            let youngest = ages.get(WINDOW - 1).copied().unwrap_or(u64::MAX);
            members.retain(|member| member.head.is_some_and(|(ticket, _)| ticket <= youngest));
        }
        (members.len() > 1).then_some(members)
    }

    /// The best batch that is padded to `top`, with the head of the class `must` in it if there is one: its own rows, then those
    /// of the next smaller class, and so on as long as each raises what the batch is worth for each second.
    fn candidate(&self, members: &[Member<'_>], top: usize, must: Option<usize>) -> Option<Candidate> {
        let Member { cap, estimate, .. } = members[top];
        let ladder = self.model.ladder();
        let first = match must.filter(|must| *must != top) {
            Some(must) => {
                let (_, head) = members[must].head?;
                self.requests[&head].queued().min(cap.saturating_sub(1))
            }
            None => 0,
        };
        if must.is_some_and(|must| must != top) && first == 0 {
            return None;
        }
        let mut worth = f64::from(first) * must.map_or(0.0, |must| members[must].worth);
        let mut found = Candidate { top, last: top, rows: first, rate: 0.0, first };
        for at in (0..=top).rev() {
            let taken = if must == Some(at) && at != top { first.min(members[at].rows) } else { 0 };
            let more = (members[at].rows - taken).min(cap - found.rows);
            if more == 0 {
                continue;
            }
            let rows = found.rows + more;
            let all = worth + f64::from(more) * members[at].worth;
            let rate = all / estimate.seconds(ladder.padded(rows))?.max(1e-9);
            if at < top && rate <= found.rate {
                break;
            }
            worth = all;
            found = Candidate { last: at, rows, rate, ..found };
        }
        Some(found)
    }

    fn parts(&self, members: &[Member<'_>], level: Level, chosen: Candidate, must: Option<usize>) -> Vec<Part> {
        let Candidate { top, last, rows, first, .. } = chosen;
        let mut parts = Vec::new();
        if let Some((_, head)) = must.filter(|_| first > 0).and_then(|must| members[must].head) {
            parts.push(Part { request: head, start: self.requests[&head].next, rows: first });
        }
        for at in (last..=top).rev() {
            let skipped = if must == Some(at) && at != top { first } else { 0 };
            let mut more = members[at].class.peek_waiting(self.requests, level, rows - count(&parts) + skipped);
            for part in split_off(&mut more, skipped) {
                join(&mut parts, &part);
            }
        }
        parts
    }

    /// In order of arrival, as many as may run together, padded to the longest.
    fn fifo(self, level: Level, family: FamilyId) -> Option<Mix> {
        let classes: Vec<_> = waiting(self.model, family).collect();
        let mut next: BTreeMap<u64, usize> = BTreeMap::new();
        let mut queues: Vec<_> = classes.iter().map(|(_, class)| class.at_level(level).peekable()).collect();
        for (at, queue) in queues.iter_mut().enumerate() {
            next.extend(queue.peek().map(|(ticket, _)| (*ticket, at)));
        }
        let (mut parts, mut rows, mut top, mut cap) = (Vec::new(), 0, None, 0);
        while let Some((_, at)) = next.pop_first() {
            let (id, _) = classes[at];
            if top.is_none_or(|top| at > top) {
                let closed = self.device.closed_to(self.id, id);
                let Ok(found) = size(self.now, self.model, (id, u64::MAX), self.room) else { break };
                if closed || found.rows <= rows {
                    break;
                }
                (top, cap) = (Some(at), found.rows);
            }
            let Some((_, request)) = queues[at].next() else { continue };
            let queued = self.requests[&request].queued().min(cap - rows);
            join(&mut parts, &Part { request, start: self.requests[&request].next, rows: queued });
            rows += queued;
            if rows == cap {
                break;
            }
            next.extend(queues[at].peek().map(|(ticket, _)| (*ticket, at)));
        }
        let all: u64 = classes.iter().map(|(_, class)| class.rows).sum();
        let (id, _) = classes[top?];
        Some(Mix { lead: Lead::Waiting(level, id), parts, leaves_out: all > u64::from(rows) })
    }
}

/// The classes of a family that have rows and may run: those that wait for company have found it.
fn waiting(model: &Model, family: FamilyId) -> impl Iterator<Item = (ClassId, &Class)> {
    let may_run = |class: &Class| matches!(class.parked, None | Some(Parked::Company(_)));
    model.queue.family(family).filter(move |(_, class)| class.rows > 0 && may_run(class))
}
