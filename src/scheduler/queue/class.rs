//! One class of a model: its rows, and why it may not be considered for a while.

use super::super::Part;
use super::super::oom::{Ceiling, Piece, Returned, Starved, join};
use super::{Level, Request, Requests, Ticket};
use crate::units::{FamilyId, Instant, RequestId, Rows};
use std::collections::BTreeMap;

/// One class of a model.
#[derive(Clone, Debug, Default)]
pub(in crate::scheduler) struct Class {
    /// Elements per row.
    pub(in crate::scheduler) units: u64,
    /// The classes that its rows may share a batch with.
    pub(in crate::scheduler) family: Option<FamilyId>,
    /// Rows never dispatched.
    pub(in crate::scheduler) rows: u64,
    /// The earliest deadline that was seen since the class had no rows.
    pub(in crate::scheduler) earliest_deadline: Option<Instant>,
    /// Set while it is not considered.
    pub(in crate::scheduler) parked: Option<Parked>,
    /// Set for a while after memory ran out.
    pub(in crate::scheduler) ceiling: Option<Ceiling>,
    /// Set while its smallest batch finds no memory.
    pub(in crate::scheduler) starved: Option<Starved>,
    /// No level is empty.
    pub(in crate::scheduler) waiting: BTreeMap<Level, BTreeMap<Ticket, RequestId>>,
    pub(in crate::scheduler) returned: BTreeMap<(Ticket, Rows), Piece>,
}

impl Class {
    /// Whether it has no rows.
    pub(in crate::scheduler) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.returned.is_empty()
    }

    /// The request that has waited longest among those with rows never dispatched. O(levels).
    pub(in crate::scheduler) fn oldest(&self) -> Option<(Ticket, RequestId)> {
        self.level_heads().map(|(_, ticket, request)| (ticket, request)).min()
    }

    /// Requests with rows that came back.
    pub(in crate::scheduler) fn returned(&self) -> impl Iterator<Item = RequestId> {
        self.returned.values().flat_map(|piece| piece.parts.iter().map(|part| part.request))
    }

    /// Requests with rows never dispatched.
    pub(in crate::scheduler) fn waiting(&self) -> impl Iterator<Item = RequestId> {
        self.waiting.values().flat_map(BTreeMap::values).copied()
    }

    /// The first `most` rows that came back and may run together.
    pub(in crate::scheduler) fn peek_returned(&self, most: Rows) -> Vec<Part> {
        let mut parts = Parts::up_to(most);
        let mut pieces = self.returned.values().peekable();
        while let Some(piece) = pieces.next() {
            let all = piece.parts.iter().all(|part| parts.add(part));
            let mixes = piece.why == Returned::Memory && pieces.peek().is_some_and(|next| next.why == Returned::Memory);
            if !(all && mixes) {
                break;
            }
        }
        parts.parts
    }

    /// The first `most` rows never dispatched: those of `level`, then those of the other levels.
    pub(in crate::scheduler) fn peek_waiting(&self, requests: &Requests, level: Level, most: Rows) -> Vec<Part> {
        let leading = self.waiting.get(&level).into_iter();
        let rest = self.waiting.iter().filter(|(other, _)| **other != level).map(|(_, queue)| queue);
        let mut parts = Parts::up_to(most);
        for id in leading.chain(rest).flat_map(BTreeMap::values).copied() {
            let request = &requests[&id];
            if !parts.add(&Part { request: id, start: request.next, rows: request.queued() }) {
                break;
            }
        }
        parts.parts
    }

    /// The oldest request of a level.
    pub(in crate::scheduler) fn head(&self, level: Level) -> Option<(Ticket, RequestId)> {
        self.at_level(level).next()
    }

    /// The requests of a level, in order of arrival.
    pub(in crate::scheduler) fn at_level(&self, level: Level) -> impl Iterator<Item = (Ticket, RequestId)> {
        self.waiting.get(&level).into_iter().flatten().map(|(ticket, request)| (*ticket, *request))
    }

    /// The oldest request of each level that has any.
    pub(in crate::scheduler) fn level_heads(&self) -> impl Iterator<Item = (Level, Ticket, RequestId)> {
        let head = |(level, queue): (&Level, &BTreeMap<Ticket, RequestId>)| {
            queue.first_key_value().map(|(ticket, request)| (*level, *ticket, *request))
        };
        self.waiting.iter().filter_map(head)
    }

    /// Takes a request out of its level.
    pub(in crate::scheduler) fn strike(&mut self, request: &Request) {
        let level = self.waiting.get_mut(&request.level).expect("a request with queued rows is in its level");
        assert_eq!(level.remove(&request.ticket), Some(request.meta.id), "a request left the queue twice");
        if level.is_empty() {
            self.waiting.remove(&request.level);
        }
    }
}

/// Until when a class is not considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheduler) enum Parked {
    /// It waits for company; an arrival ends that too.
    Company(Instant),
    /// It waits until bytes become free; it is looked at again at this instant at the latest, if there is one.
    Memory(Option<Instant>),
    /// Its smallest batch ran out of memory.
    Backoff(Instant),
}

impl Parked {
    /// When the wait ends by itself.
    pub(in crate::scheduler) fn wake(self) -> Option<Instant> {
        match self {
            Self::Company(wake) | Self::Backoff(wake) => Some(wake),
            Self::Memory(wake) => wake,
        }
    }
}

/// Parts of a batch while it is put together.
struct Parts {
    parts: Vec<Part>,
    left: Rows,
}

impl Parts {
    fn up_to(most: Rows) -> Self {
        Self { parts: Vec::new(), left: most }
    }

    /// Adds as much of a part as there is room for; false if there is no more room.
    fn add(&mut self, part: &Part) -> bool {
        let rows = part.rows.min(self.left);
        if rows > 0 {
            join(&mut self.parts, &Part { rows, ..part.clone() });
        }
        self.left -= rows;
        self.left > 0
    }
}
