//! What to commit and what to give back: decisions over plain numbers. Nothing here acts.

use std::cmp::Reverse;
use std::time::Duration;

use crate::units::Instant;

/// Bytes that no run has reached for this long are given back.
pub const QUIET: Duration = Duration::from_secs(1);

/// A granule younger than this is not given back for the sake of the headroom, unless it is urgent: so a neighbour whose
/// use jitters around the headroom costs a granule at most two round trips a second.
pub const MIN_AGE: Duration = Duration::from_millis(500);

/// Arenas whose idle times lie in one such interval count as idle equally long; then the priority decides.
pub const IDLE_STEP: Duration = Duration::from_millis(250);

/// When free bytes are under the headroom, this part of the headroom is freed on top, so that the next small dip finds
/// room. Growth may take it again: it is not a second headroom.
pub const SLACK_DIVISOR: u64 = 8;

/// Free bytes under this part of the headroom are urgent: young granules go as well.
pub const URGENT_DIVISOR: u64 = 2;

/// The largest granule. One costs the driver about the same whatever its size, so few large ones are cheap, and small
/// ones give back exactly.
pub const MAX_GRANULE: usize = 256 << 20;

/// A granule is at most this part of what lies below it: giving back errs by no more than that part, and the number of
/// granules grows with the logarithm of the size.
pub const GRANULE_DIVISOR: usize = 4;

/// An allocation that finds too little committed asks for this part of the arena more, so that loading weights tensor by
/// tensor does not call the driver for each.
pub const STEP_DIVISOR: usize = 16;

/// At most this much more.
pub const MAX_STEP: usize = 32 << 20;

/// Physical memory committed, and given back, as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granule {
    pub(super) start: usize,
    pub(super) bytes: usize,
    /// When it was committed.
    pub(super) committed_at: Instant,
    /// When a block last lay in it or above it, as far as has been noticed.
    pub(super) used_at: Instant,
}

/// The granules of one arena in which nothing lives, the highest first: the order in which they can go.
#[derive(Clone, Debug)]
pub(super) struct Tail {
    pub(super) arena: usize,
    pub(super) priority: u32,
    /// In a run: nothing may be taken now.
    pub(super) busy: bool,
    pub(super) granules: Vec<Granule>,
}

impl Tail {
    /// All bytes that could be given back if the arena is not in a run.
    pub(super) fn bytes(&self) -> u64 {
        self.granules.iter().map(|granule| granule.bytes as u64).sum()
    }
}

/// So many granules from the end of one arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Take {
    pub(super) arena: usize,
    pub(super) granules: usize,
}

/// The bytes of a device as one number each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Balance {
    pub(super) limit: u64,
    /// What has to stay free: for neighbours, and lest the system fails.
    pub(super) headroom: u64,
    pub(super) committed: u64,
    pub(super) free: u64,
}

impl Balance {
    /// Bytes that may be committed now.
    pub(super) fn room(self) -> u64 {
        self.limit.saturating_sub(self.committed).min(self.free.saturating_sub(self.headroom))
    }

    /// Bytes that have to be given back before `bytes` may be committed.
    pub(super) fn missing(self, bytes: u64) -> u64 {
        let over_limit = self.committed.saturating_add(bytes).saturating_sub(self.limit);
        let under_headroom = self.headroom.saturating_add(bytes).saturating_sub(self.free);
        over_limit.max(under_headroom)
    }

    /// The most bytes that could be committed after `reclaimable` ones have been taken back.
    pub(super) fn attainable(self, reclaimable: u64) -> u64 {
        let within_limit = self.limit.saturating_add(reclaimable).saturating_sub(self.committed);
        within_limit.min(self.free.saturating_add(reclaimable).saturating_sub(self.headroom))
    }

    /// Bytes to give back at once.
    fn pressure(self) -> Pressure {
        let over_limit = self.committed.saturating_sub(self.limit);
        let wanted = self.headroom.saturating_add(self.headroom / SLACK_DIVISOR);
        let under_headroom = if self.free < self.headroom { wanted - self.free } else { 0 };
        Pressure {
            bytes: over_limit.max(under_headroom),
            urgent: if self.free < self.headroom / URGENT_DIVISOR { under_headroom } else { 0 }.max(over_limit),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Pressure {
    /// Bytes to give back altogether.
    bytes: u64,
    /// So many of them whatever their age.
    urgent: u64,
}

/// One granule in the order in which granules are given up.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    tail: usize,
    bytes: u64,
    committed_at: Instant,
    used_at: Instant,
}

/// All granules that may go, in the order in which they go: idle longest first, then the least urgent priority.
fn in_order(tails: &[Tail]) -> Vec<Candidate> {
    let mut keyed = Vec::new();
    for (index, tail) in tails.iter().enumerate() {
        let mut used_at = Instant::default();
        for (depth, granule) in tail.granules.iter().enumerate() {
            // A granule goes only after all above it, so it waits for the last used of them.
            used_at = used_at.max(granule.used_at);
            let step = u128::from(used_at.0) / IDLE_STEP.as_nanos();
            let Granule { committed_at, bytes, .. } = *granule;
            let candidate = Candidate { tail: index, bytes: bytes as u64, committed_at, used_at };
            keyed.push(((step, Reverse(tail.priority), used_at, index, depth), candidate));
        }
    }
    keyed.sort_unstable_by_key(|(key, _)| *key);
    keyed.into_iter().map(|(_, candidate)| candidate).collect()
}

/// Counts granules per arena, keeping the order in which the arenas first appear.
fn collect(tails: &[Tail], taken: &[Candidate]) -> Vec<Take> {
    let mut takes: Vec<Take> = Vec::new();
    for candidate in taken {
        let arena = tails[candidate.tail].arena;
        match takes.iter_mut().find(|take| take.arena == arena) {
            Some(take) => take.granules += 1,
            None => takes.push(Take { arena, granules: 1 }),
        }
    }
    takes
}

/// Which granules to take so that another arena can have `missing` bytes; `None` if all of them would not be enough, for
/// then nobody's granules are worth taking.
pub(super) fn reclaim(tails: &[Tail], missing: u64) -> Option<Vec<Take>> {
    let mut taken = Vec::new();
    let mut sum = 0;
    for candidate in in_order(tails).into_iter().filter(|candidate| !tails[candidate.tail].busy) {
        if sum >= missing {
            break;
        }
        sum += candidate.bytes;
        taken.push(candidate);
    }
    (sum >= missing).then(|| collect(tails, &taken))
}

/// What [`trim`] decided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Trim {
    pub(super) takes: Vec<Take>,
    /// An arena in a run has granules that would go as well: look again when its run ends.
    pub(super) look_again: bool,
}

/// Which granules to give back: those that have been quiet, and as many more as the limit and the headroom demand.
pub(super) fn trim(tails: &[Tail], balance: Balance, now: Instant) -> Trim {
    let pressure = balance.pressure();
    let mut stopped = vec![false; tails.len()];
    let (mut taken, mut sum, mut look_again) = (Vec::new(), 0, false);
    for candidate in in_order(tails) {
        let quiet = now.since(candidate.used_at) >= QUIET;
        let young = now.since(candidate.committed_at) < MIN_AGE;
        let pressed = sum < pressure.urgent || (sum < pressure.bytes && !young);
        if stopped[candidate.tail] || !(quiet || pressed) {
            stopped[candidate.tail] = true;
            continue;
        }
        if tails[candidate.tail].busy {
            look_again = true;
            continue;
        }
        sum += candidate.bytes;
        taken.push(candidate);
    }
    Trim { takes: collect(tails, &taken), look_again }
}

/// The sizes of the granules to commit from `start` on so that they sum up to `bytes`, a multiple of `granularity`.
pub(super) fn granules(start: usize, bytes: usize, granularity: usize) -> impl Iterator<Item = usize> {
    let (mut at, end) = (start, start + bytes);
    std::iter::from_fn(move || {
        let part = at / GRANULE_DIVISOR;
        let power = part.checked_ilog2().map_or(0, |exponent| 1 << exponent);
        let size = usize::min(power, MAX_GRANULE).max(granularity).min(end - at);
        at += size;
        (size > 0).then_some(size)
    })
}

/// How far an arena grows when an allocation needs the prefix to reach `end`: a little further, within the address range.
pub(super) fn generous(end: usize, committed: usize, address_space: usize) -> usize {
    end.max(committed + usize::min(committed / STEP_DIVISOR, MAX_STEP)).min(address_space)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn at(milliseconds: u64) -> Instant {
        Instant(milliseconds * 1_000_000)
    }

    /// Granules of 1 MiB, the highest first, as `(committed at, used at)` in milliseconds.
    fn tail(arena: usize, priority: u32, granules: &[(u64, u64)]) -> Tail {
        let granules = granules
            .iter()
            .map(|(committed, used)| Granule { start: 0, bytes: MIB, committed_at: at(*committed), used_at: at(*used) })
            .collect();
        Tail { arena, priority, busy: false, granules }
    }

    fn busy(mut tail: Tail) -> Tail {
        tail.busy = true;
        tail
    }

    fn take(arena: usize, granules: usize) -> Take {
        Take { arena, granules }
    }

    #[test]
    fn reclaim_takes_the_longest_idle_then_the_least_urgent() {
        type Case = (&'static str, Vec<Tail>, usize, Option<Vec<Take>>);
        let table: [Case; 8] = [
            ("nothing is needed", vec![tail(0, 1, &[(0, 0)])], 0, Some(vec![])),
            ("idle longest", vec![tail(0, 1, &[(0, 900)]), tail(1, 1, &[(0, 100)])], 1, Some(vec![take(1, 1)])),
            ("idle alike", vec![tail(0, 1, &[(0, 100)]), tail(1, 7, &[(0, 200)])], 1, Some(vec![take(1, 1)])),
            ("idle comes first", vec![tail(0, 1, &[(0, 100)]), tail(1, 7, &[(0, 900)])], 1, Some(vec![take(0, 1)])),
            (
                "several",
                vec![tail(3, 1, &[(0, 9), (0, 9)]), tail(5, 2, &[(0, 9)])],
                2,
                Some(vec![take(5, 1), take(3, 1)]),
            ),
            ("busy ones are left", vec![busy(tail(0, 1, &[(0, 0)])), tail(1, 1, &[(0, 5)])], 1, Some(vec![take(1, 1)])),
            ("not enough: nothing is taken", vec![busy(tail(0, 1, &[(0, 0)])), tail(1, 1, &[(0, 5)])], 2, None),
            (
                "a granule waits for those above it",
                vec![tail(0, 1, &[(0, 2000), (0, 0)]), tail(1, 1, &[(0, 1000)])],
                1,
                Some(vec![take(1, 1)]),
            ),
        ];
        for (name, tails, granules, expected) in table {
            assert_eq!(reclaim(&tails, (granules * MIB) as u64), expected, "{name}");
        }
    }

    #[test]
    fn trim_gives_back_quiet_granules_and_what_is_pressed_for() {
        let mib = MIB as u64;
        let calm = Balance { limit: 100 * mib, headroom: 8 * mib, committed: 20 * mib, free: 50 * mib };
        let tight = Balance { free: 7 * mib, ..calm };
        let urgent = Balance { free: 3 * mib, ..calm };
        let lowered = Balance { limit: 18 * mib, ..calm };
        let old = [(0, 4500), (0, 4400), (0, 4000), (0, 3500)];
        let young = [(4900, 4900), (4900, 4900), (4900, 4900)];
        let quiet_below = [(0, 4900), (0, 100)];
        type Case = (&'static str, Vec<Tail>, Balance, Vec<Take>, bool);
        let table: [Case; 10] = [
            ("calm and quiet", vec![tail(0, 1, &[(0, 4000), (0, 3000)])], calm, vec![take(0, 2)], false),
            ("calm and used", vec![tail(0, 1, &old)], calm, vec![], false),
            ("quiet under a used one", vec![tail(0, 1, &quiet_below)], calm, vec![], false),
            ("calm, quiet, busy", vec![busy(tail(0, 1, &[(0, 3000)]))], calm, vec![], true),
            ("calm, used, busy", vec![busy(tail(0, 1, &old))], calm, vec![], false),
            ("headroom and a slack", vec![tail(0, 1, &old)], tight, vec![take(0, 2)], false),
            ("young ones stay", vec![tail(0, 1, &young), tail(1, 1, &old)], tight, vec![take(1, 2)], false),
            ("urgent", vec![tail(0, 1, &young)], urgent, vec![take(0, 3)], false),
            ("lowered limit", vec![tail(0, 1, &young)], lowered, vec![take(0, 2)], false),
            ("lowered limit, busy", vec![busy(tail(0, 1, &young)), tail(1, 1, &old)], lowered, vec![take(1, 2)], false),
        ];
        for (name, tails, balance, takes, look_again) in table {
            assert_eq!(trim(&tails, balance, at(5000)), Trim { takes, look_again }, "{name}");
        }
        let only_busy = [busy(tail(0, 1, &young))];
        assert!(trim(&only_busy, lowered, at(5000)).look_again);
    }

    #[test]
    fn room_and_missing_agree() {
        let table = [
            (Balance { limit: 100, headroom: 10, committed: 20, free: 50 }, 40),
            (Balance { limit: 30, headroom: 10, committed: 20, free: 50 }, 10),
            (Balance { limit: 10, headroom: 10, committed: 20, free: 50 }, 0),
            (Balance { limit: 100, headroom: 60, committed: 20, free: 50 }, 0),
            (Balance { limit: u64::MAX, headroom: 0, committed: 20, free: 50 }, 50),
        ];
        for (balance, room) in table {
            assert_eq!(balance.room(), room, "{balance:?}");
            assert!(balance.missing(room + 1) > 0, "{balance:?}");
            assert_eq!(
                balance.missing(room) == 0,
                balance.committed <= balance.limit && balance.headroom <= balance.free
            );
        }
        let balance = Balance { limit: 10, headroom: 0, committed: 20, free: 50 };
        assert_eq!((balance.attainable(5), balance.attainable(15)), (0, 5));
        assert_eq!(balance.missing(5), 15, "what is over the limit has to go as well");
    }

    #[test]
    fn granules_grow_with_what_lies_below() {
        let sizes = |start: usize, bytes: usize| {
            granules(start * MIB, bytes * MIB, 2 * MIB).map(|b| b / MIB).collect::<Vec<_>>()
        };
        assert_eq!(sizes(0, 20), [2; 8].into_iter().chain([4]).collect::<Vec<_>>());
        assert_eq!(sizes(1024, 600), [256, 256, 88]);
        assert_eq!(sizes(4096, 0), Vec::<usize>::new());
        assert!(sizes(0, 4096).len() < 45);
        for bytes in (2..5000).step_by(2) {
            assert_eq!(sizes(6, bytes).iter().sum::<usize>(), bytes);
            assert!(sizes(6, bytes).iter().all(|size| size % 2 == 0 && *size > 0));
        }
    }

    #[test]
    fn growth_is_generous_within_the_address_range() {
        assert_eq!(generous(3 * MIB, 0, 64 * MIB), 3 * MIB);
        assert_eq!(generous(33 * MIB, 32 * MIB, 64 * MIB), 34 * MIB);
        assert_eq!(generous(33 * MIB, 32 * MIB, 33 * MIB), 33 * MIB);
        assert_eq!(generous(4097 * MIB, 4096 * MIB, 8192 * MIB), 4128 * MIB);
    }
}
