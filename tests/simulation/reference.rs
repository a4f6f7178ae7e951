//! A batcher that is too simple to be wrong, for the regime where nothing but order, size and delay counts.

use concertina::scheduler::{Part, RequestMeta};
use concertina::units::{ClassId, Instant, RequestId, Rows};
use std::time::Duration;

/// One row that waits.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    request: RequestId,
    row: Rows,
    class: ClassId,
    arrived: Instant,
}

/// All rows in one list; everything is a search through it.
#[derive(Debug)]
pub(crate) struct Reference {
    rows: Vec<Waiting>,
    pub(crate) largest: Rows,
    pub(crate) delay: Duration,
}

impl Reference {
    pub(crate) fn new(largest: Rows, delay: Duration) -> Self {
        Self { rows: Vec::new(), largest, delay }
    }

    pub(crate) fn arrive(&mut self, now: Instant, meta: &RequestMeta) {
        let waiting = |row| Waiting { request: meta.id, row, class: meta.class, arrived: now };
        self.rows.extend((0..meta.rows).map(waiting));
    }

    pub(crate) fn cancel(&mut self, id: RequestId) {
        self.rows.retain(|row| row.request != id);
    }

    /// What an idle instance runs now.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Vec<Part>> {
        let ready = |head: &&Waiting| {
            let together = self.rows.iter().filter(|row| row.class == head.class).count();
            let oldest = self.rows.iter().find(|row| row.class == head.class).map(|row| row.arrived);
            together >= self.largest as usize || oldest.is_some_and(|arrived| arrived + self.delay <= now)
        };
        let class = self.rows.iter().find(ready)?.class;
        let mut parts: Vec<Part> = Vec::new();
        for _ in 0..self.largest {
            let Some(at) = self.rows.iter().position(|row| row.class == class) else { break };
            let row = self.rows.remove(at);
            match parts.last_mut() {
                Some(last) if last.request == row.request => last.rows += 1,
                _ => parts.push(Part { request: row.request, start: row.row, rows: 1 }),
            }
        }
        Some(parts)
    }
}
