//! What the batches that one instance holds need together, since they run one after the other.
//!
//! Where a run takes over the memory of the run before it, all of them together need no more of it than the one that needs the most.
//! What a batch needs besides, while it waits for its turn, is room for its inputs, which are copied to the device by then. Those
//! of the batch in front lie in buffers that stay with the instance: they are no part of any budget.

use crate::units::{BatchId, ByteSize, Rows};

/// What one batch needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    /// Peak bytes of its run.
    pub(super) peak: ByteSize,
    /// Bytes of its inputs beside the run of a batch before it, whose run memory it takes over; `None`: it takes nothing over.
    pub(super) staged: Option<ByteSize>,
}

/// The batches that an instance holds, in the order in which they run.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns {
    held: Vec<(BatchId, Need)>,
}

impl Turns {
    /// Adds a batch that runs behind all others.
    pub(super) fn add(&mut self, batch: BatchId, need: Need) {
        self.held.push((batch, need));
    }

    /// Takes a batch out, wherever it is; false if it is not there.
    pub(super) fn remove(&mut self, batch: BatchId) -> bool {
        let before = self.held.len();
        self.held.retain(|(other, _)| *other != batch);
        self.held.len() < before
    }

    /// Whether no batch is left.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// What all of them need together. It never grows when one of them is taken out.
    pub(super) fn bytes(&self) -> ByteSize {
        let apart = self.held.iter().filter(|(_, need)| need.staged.is_none()).map(|(_, need)| need.peak);
        let behind = self.staged().skip(1).map(|(_, staged)| staged);
        apart.chain(behind).fold(self.taken_over(), |sum, bytes| sum + bytes)
    }

    /// Run memory that the next batch takes over.
    pub(super) fn taken_over(&self) -> ByteSize {
        self.staged().map(|(peak, _)| peak).max().unwrap_or_default()
    }

    /// Peak and staged bytes of those that take turns.
    fn staged(&self) -> impl Iterator<Item = (ByteSize, ByteSize)> + '_ {
        self.held.iter().filter_map(|(_, need)| Some((need.peak, need.staged?)))
    }
}

/// Bytes of the inputs of so many rows of `units` elements, where an element takes `unit` bytes.
pub(super) fn staged(unit: ByteSize, units: u64, rows: Rows) -> ByteSize {
    ByteSize(unit.0.saturating_mul(units).saturating_mul(rows.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(needs: &[(u64, Option<u64>)]) -> Turns {
        let mut turns = Turns::default();
        for (batch, &(peak, staged)) in (1..).map(BatchId).zip(needs) {
            turns.add(batch, Need { peak: ByteSize(peak), staged: staged.map(ByteSize) });
        }
        turns
    }

    #[test]
    fn batches_that_take_turns_need_what_the_largest_does_and_the_inputs_of_those_behind() {
        type Case = (&'static [(u64, Option<u64>)], u64, u64);
        let table: [Case; 7] = [
            (&[], 0, 0),
            (&[(100, Some(5))], 100, 100),
            (&[(100, Some(5)), (100, Some(5))], 105, 100),
            (&[(100, Some(5)), (130, Some(7))], 137, 130),
            (&[(130, Some(7)), (100, Some(5)), (90, Some(4))], 139, 130),
            (&[(100, None), (100, None)], 200, 0),
            (&[(100, None), (60, Some(5)), (60, Some(5))], 165, 60),
        ];
        for (needs, bytes, taken_over) in table {
            let turns = turns(needs);
            assert_eq!((turns.bytes().0, turns.taken_over().0), (bytes, taken_over), "{needs:?}");
        }
    }

    #[test]
    fn batches_may_end_in_any_order() {
        for (order, expected) in [
            ([1, 2, 3], [134, 90, 0]),
            ([2, 1, 3], [104, 90, 0]),
            ([3, 2, 1], [137, 100, 0]),
            ([1, 3, 2], [134, 130, 0]),
        ] {
            let mut turns = turns(&[(100, Some(5)), (130, Some(7)), (90, Some(4))]);
            assert_eq!(turns.bytes(), ByteSize(141));
            let bytes = order.map(|batch| {
                assert!(turns.remove(BatchId(batch)) && !turns.remove(BatchId(batch)));
                turns.bytes().0
            });
            assert_eq!((bytes, turns.is_empty()), (expected, true), "{order:?}");
        }
    }

    #[test]
    fn inputs_are_as_many_bytes_as_their_elements_take() {
        assert_eq!(staged(ByteSize(4), 3 * 224 * 224, 256), ByteSize(154_140_672));
        assert_eq!(staged(ByteSize(8), u64::MAX, 2), ByteSize::MAX);
    }
}
