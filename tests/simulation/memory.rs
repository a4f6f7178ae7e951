//! What the batches of instances take of their devices, kept by whoever does not trust the scheduler's sums.

use concertina::units::{BatchId, DeviceId, InstanceId};
use std::collections::{BTreeMap, VecDeque};

/// One batch that an instance holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) batch: BatchId,
    /// What its run takes at the highest.
    pub(crate) peak: u64,
    /// What its inputs take while it waits for its turn, if it has no run memory by then; `None`: it has that from the beginning.
    pub(crate) staged: Option<u64>,
}

/// The batches that each instance holds, in the order in which they run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    held: BTreeMap<(DeviceId, InstanceId), VecDeque<Held>>,
}

impl Memory {
    pub(crate) fn hold(&mut self, device: DeviceId, instance: InstanceId, held: Held) {
        self.held.entry((device, instance)).or_default().push_back(held);
    }

    pub(crate) fn release(&mut self, batch: BatchId) {
        self.held.values_mut().for_each(|queue| queue.retain(|held| held.batch != batch));
    }

    /// The sum over instances of what may be promised to them.
    pub(crate) fn promised(&self, device: DeviceId) -> u64 {
        self.instances(device).map(promised).sum()
    }

    /// The most that can be taken at once from now on, whenever which instance comes to its next batch.
    pub(crate) fn needed(&self, device: DeviceId) -> u64 {
        self.instances(device).map(most).sum()
    }

    fn instances(&self, device: DeviceId) -> impl Iterator<Item = &VecDeque<Held>> {
        self.held.iter().filter(move |((on, _), _)| *on == device).map(|(_, queue)| queue)
    }
}

/// The largest run that takes turns, all that do not, and the inputs of those that wait for their turn.
fn promised(queue: &VecDeque<Held>) -> u64 {
    let (turns, apart): (Vec<&Held>, Vec<&Held>) = queue.iter().partition(|held| held.staged.is_some());
    let largest = turns.iter().map(|held| held.peak).max().unwrap_or(0);
    let waiting: u64 = turns.iter().skip(1).filter_map(|held| held.staged).sum();
    largest + waiting + apart.iter().map(|held| held.peak).sum::<u64>()
}

/// Plays the batches one after the other.
fn most(queue: &VecDeque<Held>) -> u64 {
    let mut queue = queue.clone();
    let mut most = 0;
    while let Some(running) = queue.front() {
        let waiting = queue.iter().skip(1).map(|held| held.staged.unwrap_or(held.peak));
        most = most.max(running.peak + waiting.sum::<u64>());
        queue.pop_front();
    }
    most
}
