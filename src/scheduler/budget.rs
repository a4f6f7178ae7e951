//! The bytes of one device: what runs may use, what is reserved, and whose turn it is when bytes are short.
//!
//! A head that would fit if batches in flight ended is blocked. Smaller work may overtake it, but only [`MAX_OVERTAKES`]
//! batches; then the device is closed to everyone else until the head has run. One head at a time holds this claim.

use super::MemorySample;
use super::turns::{Need, Turns};
use crate::units::{BatchId, ByteSize, ClassId, InstanceId, ModelId};
use std::collections::{BTreeMap, BTreeSet};

/// Batches that may overtake a head that waits for bytes.
pub(super) const MAX_OVERTAKES: u32 = 4;

/// A claim on the next bytes that become free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    /// The model of the head.
    pub(super) model: ModelId,
    /// The class of the head.
    pub(super) class: ClassId,
    /// The bytes it waits for.
    pub(super) needed: ByteSize,
    /// Batches that may still overtake it.
    pub(super) patience: u32,
}

/// One device.
#[derive(Clone, Debug, Default)]
pub(super) struct Device {
    sample: Option<MemorySample>,
    /// What the instances need whose batches are in flight; `reserved` is the sum.
    turns: BTreeMap<InstanceId, Turns>,
    reserved: ByteSize,
    in_flight: u32,
    claim: Option<Claim>,
    /// Classes that wait for bytes: to be considered again when some become free.
    pub(super) blocked: BTreeSet<(ModelId, ClassId)>,
}

impl Device {
    /// Takes a sample. A claim that could not be met even if all batches ended is void.
    pub(super) fn measure(&mut self, sample: MemorySample) {
        self.sample = Some(sample);
        self.claim = self.claim.filter(|claim| claim.needed <= sample.budget);
    }

    /// Bytes that runs may use altogether; without a sample there is no limit.
    pub(super) fn budget(&self) -> ByteSize {
        self.sample.map_or(ByteSize::MAX, |sample| sample.budget)
    }

    /// Bytes that runs could use if nothing else were on the device.
    pub(super) fn capacity(&self) -> ByteSize {
        self.sample.map_or(ByteSize::MAX, |sample| sample.capacity)
    }

    /// Bytes that the batches in flight need.
    pub(super) fn reserved(&self) -> ByteSize {
        self.reserved
    }

    /// Bytes of the budget that are not reserved.
    pub(super) fn left(&self) -> ByteSize {
        self.budget().saturating_sub(self.reserved)
    }

    /// Batches in flight.
    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Run memory that the next batch of an instance takes over from those that it holds.
    pub(super) fn taken_over(&self, instance: InstanceId) -> ByteSize {
        self.turns.get(&instance).map(Turns::taken_over).unwrap_or_default()
    }

    /// Reserves what a batch needs beyond what its instance has.
    pub(super) fn reserve(&mut self, instance: InstanceId, batch: BatchId, need: Need) {
        let left = self.left();
        let turns = self.turns.entry(instance).or_default();
        let before = turns.bytes();
        turns.add(batch, need);
        let bytes = turns.bytes().saturating_sub(before);
        assert!(bytes <= left, "a batch that needs {bytes} more was dispatched with {left} left");
        self.reserved += bytes;
        self.in_flight += 1;
    }

    /// Releases what only a batch that has ended needed.
    pub(super) fn release(&mut self, instance: InstanceId, batch: BatchId) {
        let turns = self.turns.get_mut(&instance).expect("an instance with a batch in flight has a turn");
        let before = turns.bytes();
        let was_there = turns.remove(batch);
        let bytes = before.saturating_sub(turns.bytes());
        if turns.is_empty() {
            self.turns.remove(&instance);
        }
        assert!(was_there && bytes <= self.reserved && self.in_flight > 0, "more was released than reserved");
        self.reserved = self.reserved.saturating_sub(bytes);
        self.in_flight -= 1;
        assert!(self.in_flight > 0 || self.reserved == ByteSize::ZERO, "bytes stay reserved without a batch");
    }

    /// Whether another head has waited long enough for bytes.
    pub(super) fn closed_to(&self, model: ModelId, class: ClassId) -> bool {
        self.claim.is_some_and(|claim| claim.patience == 0 && (claim.model, claim.class) != (model, class))
    }

    /// Claims the next bytes unless someone has before.
    pub(super) fn claim(&mut self, claim: Claim) {
        assert!(claim.needed <= self.budget(), "a claim that cannot be met");
        match &mut self.claim {
            None => self.claim = Some(claim),
            Some(mine) if (mine.model, mine.class) == (claim.model, claim.class) => mine.needed = claim.needed,
            Some(_) => (),
        }
    }

    /// Gives up a claim; true if there was one.
    #[must_use]
    pub(super) fn disclaim(&mut self, model: ModelId, class: ClassId) -> bool {
        let mine = self.claim.is_some_and(|claim| (claim.model, claim.class) == (model, class));
        if mine {
            self.claim = None;
        }
        mine
    }

    /// Counts a batch that overtakes the claim.
    pub(super) fn overtaken(&mut self) {
        if let Some(claim) = &mut self.claim {
            claim.patience = claim.patience.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::DeviceId;

    const ONE: InstanceId = InstanceId(1);

    fn device(budget: u64) -> Device {
        let mut device = Device::default();
        device.measure(MemorySample { device: DeviceId(0), budget: ByteSize(budget), capacity: ByteSize(100) });
        device
    }

    fn claim(class: u32, patience: u32) -> Claim {
        Claim { model: ModelId(0), class: ClassId(class), needed: ByteSize(50), patience }
    }

    fn need(peak: u64) -> Need {
        Need { peak: ByteSize(peak), staged: None }
    }

    #[test]
    fn what_is_left_never_falls_below_zero() {
        let mut device = device(80);
        device.reserve(ONE, BatchId(1), need(60));
        assert_eq!(device.left(), ByteSize(20));
        device.measure(MemorySample { device: DeviceId(0), budget: ByteSize(10), capacity: ByteSize(100) });
        assert_eq!((device.left(), device.reserved()), (ByteSize::ZERO, ByteSize(60)));
        device.release(ONE, BatchId(1));
        assert_eq!(device.left(), ByteSize(10));
    }

    #[test]
    fn a_batch_behind_another_one_reserves_what_it_cannot_take_over() {
        let turn = |peak, staged| Need { peak: ByteSize(peak), staged: Some(ByteSize(staged)) };
        let mut device = device(80);
        device.reserve(ONE, BatchId(1), turn(50, 9));
        device.reserve(ONE, BatchId(2), turn(60, 10));
        assert_eq!((device.left(), device.taken_over(ONE)), (ByteSize(10), ByteSize(60)));
        device.reserve(InstanceId(2), BatchId(3), turn(10, 2));
        assert_eq!(device.left(), ByteSize::ZERO, "another instance takes nothing over from this one");
        device.release(ONE, BatchId(1));
        assert_eq!(device.left(), ByteSize(10), "the next one is in front now");
        device.release(InstanceId(2), BatchId(3));
        device.release(ONE, BatchId(2));
        assert_eq!((device.left(), device.in_flight()), (ByteSize(80), 0));
    }

    #[test]
    #[should_panic(expected = "was dispatched with")]
    fn more_than_is_left_cannot_be_reserved() {
        device(80).reserve(ONE, BatchId(1), need(81));
    }

    #[test]
    #[should_panic(expected = "more was released")]
    fn what_was_not_reserved_cannot_be_released() {
        let mut device = device(80);
        device.reserve(ONE, BatchId(1), need(10));
        device.release(ONE, BatchId(2));
    }

    #[test]
    fn a_claim_closes_the_device_after_some_batches() {
        let (model, mine, other) = (ModelId(0), ClassId(1), ClassId(2));
        let mut device = device(80);
        device.claim(claim(1, 2));
        device.claim(claim(2, 0));
        for _ in 0..2 {
            assert!(!device.closed_to(model, other));
            device.overtaken();
        }
        assert!(device.closed_to(model, other) && !device.closed_to(model, mine));
        assert!(!device.disclaim(model, other));
        assert!(device.disclaim(model, mine));
        assert!(!device.closed_to(model, other));
    }

    #[test]
    fn a_claim_that_no_longer_fits_is_void() {
        let mut device = device(80);
        device.claim(claim(1, 0));
        device.measure(MemorySample { device: DeviceId(0), budget: ByteSize(49), capacity: ByteSize(100) });
        assert!(!device.closed_to(ModelId(0), ClassId(2)));
    }
}
