//! The queue of one model: rows that wait, by class and level, and rows that came back.
//!
//! Within a class and level the order is that of arrival. Which class leads the next batch: rows that came back first; then the
//! most urgent level that has rows, and in it the class whose head is oldest. A level whose head was passed over by
//! [`MAX_OVERTAKES`] batches goes first, so that of any `MAX_OVERTAKES + levels` batches of a model at least one takes the
//! oldest head of each level that could run. (While all of a level is parked it is not passed over; it starts anew afterwards.)

mod class;

pub(super) use class::{Class, Parked};

use super::oom::{Piece, count, split_off};
use super::{Part, RequestMeta};
use crate::units::{ByteSize, ClassId, FamilyId, Instant, RequestId, Rows};
use std::collections::{BTreeMap, BTreeSet};

/// Batches that may pass over the oldest head of a level.
pub(super) const MAX_OVERTAKES: u32 = 16;
/// Classes without rows that are remembered for their ceilings.
const MAX_IDLE_CLASSES: usize = 1024;

/// The order of arrival.
pub(super) type Ticket = u64;
/// A level of priority; 1 is the most urgent.
pub(super) type Level = u32;
/// What rows run as: their class, with what the queue and the cost model know it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// The class.
    pub(super) class: ClassId,
    /// Its family.
    pub(super) family: Option<FamilyId>,
    /// Elements per row.
    pub(super) units: u64,
}

impl Kind {
    /// What the rows of a request run as if they run among their like.
    pub(super) fn of(meta: &RequestMeta) -> Self {
        Self { class: meta.class, family: meta.family, units: meta.units }
    }

    /// Those that may share a batch.
    pub(super) fn kin(self) -> Kin {
        self.family.map_or(Kin::Class(self.class), Kin::Family)
    }
}

/// Rows that may share a batch: those of a family, or of a class that has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kin {
    /// This class.
    Class(ClassId),
    /// All classes of this family.
    Family(FamilyId),
}

/// Every request inside the scheduler.
pub(super) type Requests = BTreeMap<RequestId, Request>;

/// A request inside the scheduler.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// What it is.
    pub(super) meta: RequestMeta,
    /// Its place in the order of arrival.
    pub(super) ticket: Ticket,
    /// When it came.
    pub(super) arrived: Instant,
    /// Its level.
    pub(super) level: Level,
    /// The first of its rows that was never dispatched.
    pub(super) next: Rows,
    /// Rows that are neither answered nor in flight: never dispatched, or returned.
    pub(super) waiting: Rows,
    /// Rows that have answers.
    pub(super) done: Rows,
    /// Instances lost under it.
    pub(super) losses: u32,
}

impl Request {
    /// Its rows that were never dispatched.
    pub(super) fn queued(&self) -> Rows {
        self.meta.rows - self.next
    }
}

/// Which class leads the next batch, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lead {
    /// Rows that came back.
    Returned(ClassId),
    /// Rows of this level first.
    Waiting(Level, ClassId),
}

impl Lead {
    /// The class.
    pub(super) fn class(self) -> ClassId {
        match self {
            Self::Returned(class) | Self::Waiting(_, class) => class,
        }
    }
}

/// The queue of one model.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    classes: BTreeMap<ClassId, Class>,
    /// The classes of each family, by units.
    families: BTreeMap<FamilyId, BTreeSet<(u64, ClassId)>>,
    /// The head of each class and level that may be considered.
    heads: BTreeSet<(Level, Ticket, ClassId)>,
    returned_heads: BTreeSet<(Ticket, Rows, ClassId)>,
    overtaken: BTreeMap<Level, u32>,
    /// Elements of the rows never dispatched, by level.
    work: BTreeMap<Level, u128>,
    /// Requests with rows never dispatched.
    pub(super) requests: u64,
    /// Rows never dispatched.
    pub(super) rows: u64,
    /// Rows that came back.
    pub(super) returned_rows: u64,
    /// Bytes of the requests counted in `requests`.
    pub(super) bytes: ByteSize,
}

impl Queue {
    /// A class.
    pub(super) fn class(&self, id: ClassId) -> Option<&Class> {
        self.classes.get(&id)
    }

    /// A class that is there.
    pub(super) fn class_mut(&mut self, id: ClassId) -> &mut Class {
        self.classes.get_mut(&id).expect("the class has rows or a ceiling")
    }

    /// All classes.
    pub(super) fn classes(&self) -> impl Iterator<Item = (ClassId, &Class)> {
        self.classes.iter().map(|(id, class)| (*id, class))
    }

    /// The classes of a family that are there, ascending by units.
    pub(super) fn family(&self, id: FamilyId) -> impl Iterator<Item = (ClassId, &Class)> {
        self.families.get(&id).into_iter().flatten().map(|(_, class)| (*class, &self.classes[class]))
    }

    /// How many batches in a row the oldest head of a level was not in.
    pub(super) fn passed_over(&self, level: Level) -> u32 {
        self.overtaken.get(&level).copied().unwrap_or(0)
    }

    /// Elements waiting at this level and at more urgent ones.
    pub(super) fn work_before(&self, level: Level) -> u128 {
        self.work.range(..=level).map(|(_, work)| work).sum()
    }

    /// Adds a request at the end.
    pub(super) fn push(&mut self, request: &Request) {
        let meta = &request.meta;
        let class = self.ensure(Kind::of(meta));
        if class.is_empty() {
            class.earliest_deadline = None;
        }
        class.earliest_deadline = class.earliest_deadline.into_iter().chain(meta.deadline).min();
        class.rows += u64::from(meta.rows);
        let level = class.waiting.entry(request.level).or_default();
        level.insert(request.ticket, meta.id);
        if level.len() == 1 && class.parked.is_none() {
            self.heads.insert((request.level, request.ticket, meta.class));
        }
        self.requests += 1;
        self.rows += u64::from(meta.rows);
        self.bytes += meta.bytes;
        *self.work.entry(request.level).or_default() += work(request, meta.rows);
    }

    /// Takes all rows of a request out, wherever they wait. Answers the classes that may have no rows any more.
    pub(super) fn remove(&mut self, requests: &Requests, request: &Request) -> BTreeSet<ClassId> {
        let id = request.meta.class;
        let mut touched = BTreeSet::from([id]);
        self.unlist(id);
        let queued = request.queued();
        if queued > 0 {
            self.leave(request, queued);
            self.class_mut(id).strike(request);
            self.requests -= 1;
            self.bytes = self.bytes.saturating_sub(request.meta.bytes);
        }
        self.list(id);
        if request.waiting > queued {
            self.returned_rows -= u64::from(request.waiting - queued);
            // Rows that were padded came back as what they ran as.
            let others = request.meta.family.into_iter().flat_map(|family| self.family(family)).map(|(other, _)| other);
            let others: BTreeSet<ClassId> = others.chain([id]).collect();
            touched.extend(others.into_iter().filter(|class| self.strike_returned(requests, *class, request.meta.id)));
        }
        self.forget(id);
        touched
    }

    /// Takes the rows of a request out of what came back as this class; false if there were none.
    fn strike_returned(&mut self, requests: &Requests, id: ClassId, request: RequestId) -> bool {
        if !self.classes.get(&id).is_some_and(|class| class.returned().any(|other| other == request)) {
            return false;
        }
        self.unlist(id);
        let pieces = std::mem::take(&mut self.class_mut(id).returned);
        for mut piece in pieces.into_values() {
            piece.parts.retain(|part| part.request != request);
            self.store(requests, id, piece);
        }
        self.list(id);
        self.forget(id);
        true
    }

    /// Whether rows of a request wait for memory that is not to be had.
    pub(super) fn is_starved(&self, meta: &RequestMeta) -> bool {
        let holds = |(id, class): (ClassId, &Class)| {
            class.starved.is_some() && (id == meta.class || class.returned().any(|other| other == meta.id))
        };
        let own = self.class(meta.class).map(|class| (meta.class, class));
        own.into_iter().chain(meta.family.into_iter().flat_map(|family| self.family(family))).any(holds)
    }

    /// Takes rows back that were dispatched before. They run again before anything else.
    pub(super) fn give_back(&mut self, requests: &mut Requests, kind: Kind, piece: Piece) {
        let class = kind.class;
        for part in &piece.parts {
            requests.get_mut(&part.request).expect("only rows of live requests are given back").waiting += part.rows;
        }
        self.unlist(class);
        self.ensure(kind);
        self.returned_rows += u64::from(piece.rows());
        self.store(requests, class, piece);
        self.list(class);
    }

    /// Which class leads the next batch.
    pub(super) fn lead(&self) -> Option<Lead> {
        if let Some((_, _, class)) = self.returned_heads.first() {
            return Some(Lead::Returned(*class));
        }
        let passed_over = self.overtaken.iter().filter(|(_, count)| **count >= MAX_OVERTAKES);
        let passed_over = passed_over.filter_map(|(level, count)| Some((*count, self.head(*level)?)));
        let head = passed_over.max_by_key(|(count, _)| *count).map(|(_, head)| head);
        let (level, _, class) = head.or_else(|| self.heads.first().copied())?;
        Some(Lead::Waiting(level, class))
    }

    /// How many rows could run together under this lead, up to `most`.
    pub(super) fn rows_under(&self, lead: Lead, most: Rows) -> u64 {
        match lead {
            Lead::Returned(class) => u64::from(count(&self.classes[&class].peek_returned(most))),
            Lead::Waiting(_, class) => self.classes[&class].rows,
        }
    }

    /// The first `most` rows that run together under this lead.
    pub(super) fn peek(&self, requests: &Requests, lead: Lead, most: Rows) -> Vec<Part> {
        match lead {
            Lead::Returned(class) => self.classes[&class].peek_returned(most),
            Lead::Waiting(level, class) => self.classes[&class].peek_waiting(requests, level, most),
        }
    }

    /// Takes the rows out that [`Queue::peek`] has shown, or the first of them, and counts which levels were passed over.
    pub(super) fn take(&mut self, requests: &mut Requests, lead: Lead, parts: &[Part]) {
        let fresh = if matches!(lead, Lead::Waiting(..)) { parts } else { &[] };
        let passed_over = self.heads_without(fresh);
        let classes: BTreeSet<ClassId> =
            fresh.iter().map(|part| requests[&part.request].meta.class).chain([lead.class()]).collect();
        classes.iter().for_each(|class| self.unlist(*class));
        match lead {
            Lead::Returned(class) => self.take_returned(requests, class, count(parts)),
            Lead::Waiting(..) => self.take_waiting(requests, parts),
        }
        for part in parts {
            requests.get_mut(&part.request).expect("queued requests are known").waiting -= part.rows;
        }
        for class in classes {
            self.list(class);
            self.forget(class);
        }
        self.overtaken = passed_over;
    }

    /// Keeps a class out of consideration.
    pub(super) fn park(&mut self, class: ClassId, parked: Parked) {
        self.unlist(class);
        self.class_mut(class).parked = Some(parked);
    }

    /// Considers a class again.
    pub(super) fn unpark(&mut self, class: ClassId) -> Option<Parked> {
        let parked = self.classes.get_mut(&class)?.parked.take()?;
        self.list(class);
        self.forget(class);
        Some(parked)
    }

    /// A batch of this class found memory.
    pub(super) fn fed(&mut self, class: ClassId) {
        if let Some(state) = self.classes.get_mut(&class) {
            state.starved = None;
            self.forget(class);
        }
    }

    fn take_waiting(&mut self, requests: &mut Requests, parts: &[Part]) {
        for part in parts {
            let request = requests.get_mut(&part.request).expect("queued requests are known");
            assert_eq!(request.next, part.start, "rows are dispatched in order");
            request.next += part.rows;
            self.leave(request, part.rows);
            if request.queued() == 0 {
                self.class_mut(request.meta.class).strike(request);
                self.requests -= 1;
                self.bytes = self.bytes.saturating_sub(request.meta.bytes);
            }
        }
    }

    fn take_returned(&mut self, requests: &Requests, class: ClassId, mut rows: Rows) {
        self.returned_rows -= u64::from(rows);
        while rows > 0 {
            let (_, mut piece) = self.class_mut(class).returned.pop_first().expect("as many rows as were shown");
            let taken = piece.rows().min(rows);
            rows -= taken;
            piece.parts = split_off(&mut piece.parts, taken);
            self.store(requests, class, piece);
        }
    }

    /// The levels whose oldest head is not in a batch, and how often that has happened.
    fn heads_without(&self, parts: &[Part]) -> BTreeMap<Level, u32> {
        let mut counts = BTreeMap::new();
        let mut next = self.heads.first();
        while let Some(&(level, ticket, class)) = next {
            let head = self.classes[&class].waiting[&level][&ticket];
            if !parts.iter().any(|part| part.request == head) {
                counts.insert(level, self.overtaken.get(&level).map_or(1, |count| count.saturating_add(1)));
            }
            next = level.checked_add(1).and_then(|level| self.heads.range((level, 0, ClassId(0))..).next());
        }
        counts
    }

    fn head(&self, level: Level) -> Option<(Level, Ticket, ClassId)> {
        self.heads.range((level, 0, ClassId(0))..).next().copied().filter(|(found, ..)| *found == level)
    }

    fn leave(&mut self, request: &Request, rows: Rows) {
        self.rows -= u64::from(rows);
        self.class_mut(request.meta.class).rows -= u64::from(rows);
        let left = self.work.get_mut(&request.level).expect("its level has work");
        *left -= work(request, rows);
        if *left == 0 {
            self.work.remove(&request.level);
        }
    }

    fn store(&mut self, requests: &Requests, class: ClassId, piece: Piece) {
        let Some(first) = piece.parts.first() else { return };
        let key = (requests[&first.request].ticket, first.start);
        let before = self.class_mut(class).returned.insert(key, piece);
        assert!(before.is_none(), "rows came back twice");
    }

    /// A class, made if it is not there.
    pub(super) fn ensure(&mut self, kind: Kind) -> &mut Class {
        let Kind { class: id, family, units } = kind;
        if self.classes.len() >= MAX_IDLE_CLASSES && !self.classes.contains_key(&id) {
            self.classes.retain(|_, class| !class.is_empty());
            self.families.values_mut().for_each(|classes| classes.retain(|(_, id)| self.classes.contains_key(id)));
            self.families.retain(|_, classes| !classes.is_empty());
        }
        if let Some(family) = family {
            self.families.entry(family).or_default().insert((units, id));
        }
        let class = self.classes.entry(id).or_default();
        (class.units, class.family) = (units, family);
        class
    }

    /// Drops a class without rows and without anything to remember.
    fn forget(&mut self, id: ClassId) {
        let remembered = |class: &Class| class.parked.is_some() || class.ceiling.is_some() || class.starved.is_some();
        let Some(class) = self.classes.get(&id).filter(|class| class.is_empty() && !remembered(class)) else { return };
        let (family, units) = (class.family, class.units);
        self.classes.remove(&id);
        if let Some(family) = family
            && let Some(classes) = self.families.get_mut(&family)
        {
            classes.remove(&(units, id));
            if classes.is_empty() {
                self.families.remove(&family);
            }
        }
    }

    fn unlist(&mut self, id: ClassId) {
        let Some(class) = self.classes.get(&id).filter(|class| class.parked.is_none()) else { return };
        for (level, ticket, _) in class.level_heads() {
            self.heads.remove(&(level, ticket, id));
        }
        if let Some(((ticket, start), _)) = class.returned.first_key_value() {
            self.returned_heads.remove(&(*ticket, *start, id));
        }
    }

    fn list(&mut self, id: ClassId) {
        let Some(class) = self.classes.get(&id).filter(|class| class.parked.is_none()) else { return };
        self.heads.extend(class.level_heads().map(|(level, ticket, _)| (level, ticket, id)));
        if let Some(((ticket, start), _)) = class.returned.first_key_value() {
            self.returned_heads.insert((*ticket, *start, id));
        }
    }
}

fn work(request: &Request, rows: Rows) -> u128 {
    u128::from(rows) * u128::from(request.meta.units.max(1))
}
