//! Which runs of a session are recorded, and when: some sizes while the model loads, and again, or for the first time, what a
//! shortage of memory has taken or denied.
//!
//! Recording takes a session and some runs, on the thread that serves, so what is missing waits until nobody has asked for
//! anything for a while, and one size is made at a time.
//!
//! What is denied memory while it is recorded leaves that size and the larger ones unrecorded, until there has been room for a
//! while. Whoever needs memory has what is recorded dropped: see `flight`.

use super::calibrate::{self, Trial};
use super::cuda;
use super::graphs::{self, Example, Recipe};
use super::locks::Locks;
use super::session::without_paths;
use super::shelf::Unrecorded;
use super::{RunError, Session};
use crate::clock::Clock;
use crate::model::settings::{CudaGraph, Fill};
use crate::units::{Instant, Rows};
use std::time::Duration;

/// Runs by which a recording and the run that it replaces are compared; the fastest of each counts.
const TRIALS: u32 = 8;
/// A recording must be so much faster.
const MUST_TAKE: f64 = 0.9;
/// Larger batches are not tried: what a recording saves is the host's work, and these keep the device busy for longer.
const MOST_ROWS: Rows = 64;
/// After so many sizes in a row that do not gain, larger ones are not tried.
const PATIENCE: usize = 2;

/// What is missing is recorded when the instance has had nothing to do for so long. A steady flow of
/// more than a few requests per second leaves no such time; what comes behind such a time seldom meets a recording…
pub(super) const IDLE: Duration = Duration::from_secs(2);
/// …and there is so many times as much room as what was dropped takes…
const ROOM: u64 = 4;
/// …and has been for so long, and twice as long after each attempt that fell short…
const CALM: Duration = Duration::from_secs(5);
/// …up to about this.
const MOST_CALM: Duration = Duration::from_secs(600);

/// What is to be recorded.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How.
    pub recipe: Recipe,
    /// Which sizes, ascending.
    pub sizes: Vec<Rows>,
    /// Whether only what gains is kept.
    pub mode: CudaGraph,
    /// What integers of synthetic rows are.
    pub integers: Fill,
}

impl Session {
    /// Says what to record when the thread that will run this session is there.
    pub fn plan_recording(&mut self, plan: Plan) {
        let weak = std::sync::Arc::downgrade(&self.graphs);
        // Asked by whoever needs memory, on any thread.
        self.arena.device().on_shortage(Box::new(move || weak.upgrade().map(|graphs| graphs.drop_all())));
        self.plan = Some(plan);
    }

    /// Records what was planned, on the thread that will play it, and answers how long each recorded size takes now.
    pub fn record(&mut self, clock: Clock) -> Vec<(Rows, Duration)> {
        let Some(plan) = self.plan.take() else { return Vec::new() };
        let Climbed { recorded, wanted, fault } =
            climb(&plan.sizes, |rows| self.try_one(&plan, rows, (Locks::Wait, clock)));
        if let Some((rows, reason)) = fault {
            let short = matches!(reason, Unrecorded::Short(_));
            let reason = without_paths(cuda::without_host(&reason.to_string()));
            tracing::info!(rows, reason, short, "runs of this model are not recorded");
            self.unrecorded = Some(format!("{rows} rows: {reason}"));
        }
        self.warm_again(&plan, &recorded, clock);
        self.plan = Some(Plan { sizes: wanted, ..plan });
        recorded
    }

    /// Records one size and answers how long it keeps the instance now; `None`: no recording of it is worth its memory.
    fn try_one(
        &mut self,
        plan: &Plan,
        rows: Rows,
        (locks, clock): (Locks, Clock),
    ) -> Result<Option<Duration>, Unrecorded> {
        let (before, Trial { took: after, occupied, device, .. }) = self.record_one(plan, rows, (locks, clock))?;
        let gains = after.as_secs_f64() <= MUST_TAKE * before.as_secs_f64();
        tracing::info!(rows, ?before, ?after, ?device, gains, "a run was recorded");
        if !gains && plan.mode != CudaGraph::On {
            self.graphs.forget(&plan.recipe.scratch, rows, clock);
            return Ok(None);
        }
        self.note_device_time(rows, device);
        Ok(Some(occupied))
    }

    /// Recording has run the small sizes last. Where sessions keep to sizes, those that are not played back get theirs again now,
    /// and not while somebody waits.
    fn warm_again(&mut self, plan: &Plan, kept: &[(Rows, Duration)], clock: Clock) {
        let Some(spec) = self.spec.clone().filter(|_| self.plans_by_shape()) else {
            return;
        };
        for &rows in plan.sizes.iter().filter(|rows| kept.iter().all(|(other, _)| other != *rows)) {
            // What does not run now will say so when it is asked for.
            let _ = calibrate::fastest(self, &spec, (rows, 1), (plan.integers, clock));
        }
    }

    /// Whether sizes are missing for their memory: then [`Self::restore_one`] is to be called after each [`IDLE`] without a batch.
    pub(super) fn misses_recordings(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.sizes.len() > self.graphs.count())
    }

    /// Records one size that is missing for its memory, if nobody has wanted anything since `idle_since`, there has been room for
    /// a while, and nobody else loads or records.
    pub(super) fn restore_one(&mut self, idle_since: Instant, clock: Clock) {
        let Some(plan) = self.plan.as_ref().filter(|_| self.misses_recordings()) else { return };
        let now = clock.now();
        let roomy = self.arena.device().sample(now).budget.0 >= ROOM * plan.recipe.missing().0;
        // Before the runs that a recording is compared with.
        if !self.retry.is_due(now, idle_since, roomy) || !graphs::is_free() {
            return;
        }
        let recorded = self.graphs.sizes();
        let Some(rows) = plan.sizes.iter().copied().find(|rows| !recorded.contains(rows)) else { return };
        let plan = plan.clone();
        let tried = self.try_one(&plan, rows, (Locks::Try, clock));
        match &tried {
            Err(Unrecorded::Short(reason)) => {
                tracing::info!(rows, reason, "a run could not be recorded for want of memory");
                self.retry.fell_short();
            }
            Err(Unrecorded::Impossible(reason)) => tracing::info!(rows, reason, "a run could not be recorded"),
            Err(Unrecorded::Busy) => {}
            Ok(_) => self.retry.went_well(),
        }
        self.plan = Some(Plan { sizes: still_wanted(&plan.sizes, rows, &tried), ..plan });
    }

    /// Why sizes are missing among those that are recorded.
    #[must_use]
    pub fn unrecorded(&self) -> Option<&str> {
        self.unrecorded.as_deref()
    }

    /// Records one size; answers how long it took before, and a run of it now.
    fn record_one(
        &mut self,
        plan: &Plan,
        rows: Rows,
        (locks, clock): (Locks, Clock),
    ) -> Result<(Duration, Trial), Unrecorded> {
        let spec = self.spec.clone().ok_or_else(|| "the session has no model".to_owned())?;
        let fail = |error: RunError| match error {
            RunError::OutOfMemory { .. } => Unrecorded::Short(error.to_string()),
            _ => Unrecorded::Impossible(error.to_string()),
        };
        let how = (plan.integers, clock);
        let Trial { took: before, bytes, .. } = calibrate::fastest(self, &spec, (rows, TRIALS), how).map_err(fail)?;
        let lanes = self.lanes.as_ref().ok_or_else(|| "the session has no device".to_owned())?;
        let (inputs, outputs) = lanes.last_shapes().ok_or_else(|| "it has outputs that stay on the host".to_owned())?;
        let example = Example { inputs, outputs, bytes };
        graphs::record(&self.graphs, &plan.recipe, (&spec, lanes.stream()), (rows, &example), (locks, clock))?;
        let after = calibrate::fastest(self, &spec, (rows, TRIALS), how);
        let after = after.map_err(|error| {
            self.graphs.forget(&plan.recipe.scratch, rows, clock);
            fail(error)
        })?;
        if !self.graphs.sizes().contains(&rows) {
            return Err(Unrecorded::Short("its memory was wanted elsewhere at once".to_owned()));
        }
        Ok((before, after))
    }

    /// The sizes that are recorded.
    #[must_use]
    pub fn recorded(&self) -> Vec<Rows> {
        self.graphs.sizes()
    }
}

/// What recording a ladder of sizes has come to.
#[derive(Debug, PartialEq)]
struct Climbed {
    /// Each size that gains, and how long it takes now.
    recorded: Vec<(Rows, Duration)>,
    /// These, and those that memory was too short for: to be recorded when there is room.
    wanted: Vec<Rows>,
    /// What ended the ladder.
    fault: Option<(Rows, Unrecorded)>,
}

/// Tries sizes, ascending, until one cannot be recorded or too many do not gain.
fn climb(sizes: &[Rows], mut attempt: impl FnMut(Rows) -> Result<Option<Duration>, Unrecorded>) -> Climbed {
    let sizes: Vec<Rows> = sizes.iter().copied().filter(|rows| *rows <= MOST_ROWS).collect();
    let (mut recorded, mut fault, mut in_vain) = (Vec::new(), None, 0);
    for &rows in &sizes {
        match attempt(rows) {
            Ok(Some(took)) => {
                recorded.push((rows, took));
                in_vain = 0;
            }
            Ok(None) => in_vain += 1,
            Err(reason) => {
                fault = Some((rows, reason));
                break;
            }
        }
        if in_vain >= PATIENCE {
            break;
        }
    }
    let short = match &fault {
        Some((first, Unrecorded::Short(_))) => sizes.iter().copied().skip_while(|rows| rows < first).collect(),
        _ => Vec::new(),
    };
    let wanted = recorded.iter().map(|(rows, _)| *rows).chain(short).collect();
    Climbed { recorded, wanted, fault }
}

/// What of a plan is still to be kept recorded after one size was tried: all if memory was short or others were busy, all others if it does not gain,
/// and only smaller ones if it cannot be recorded.
fn still_wanted(sizes: &[Rows], tried: Rows, result: &Result<Option<Duration>, Unrecorded>) -> Vec<Rows> {
    let stays = |rows: &Rows| match result {
        Ok(Some(_)) | Err(Unrecorded::Short(_) | Unrecorded::Busy) => true,
        Ok(None) => *rows != tried,
        Err(Unrecorded::Impossible(_)) => *rows < tried,
    };
    sizes.iter().copied().filter(stays).collect()
}

/// When sizes that are missing for their memory are tried.
#[derive(Debug, Default)]
pub(super) struct Retry {
    /// Since when there has been room.
    roomy_since: Option<Instant>,
    /// Attempts in a row that fell short.
    fell_short: u32,
}

impl Retry {
    /// Whether one may be tried now, of an instance that has had nothing to do since then; `roomy`: whether there is room now.
    fn is_due(&mut self, now: Instant, idle_since: Instant, roomy: bool) -> bool {
        if !roomy {
            self.roomy_since = None;
            return false;
        }
        let calm = CALM.saturating_mul(2u32.saturating_pow(self.fell_short)).min(MOST_CALM);
        now.since(*self.roomy_since.get_or_insert(now)) >= calm && now.since(idle_since) >= IDLE
    }

    /// There was less room than it looked like.
    fn fell_short(&mut self) {
        self.roomy_since = None;
        self.fell_short = self.fell_short.saturating_add(1);
    }

    fn went_well(&mut self) {
        self.fell_short = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOK: Duration = Duration::from_millis(1);

    fn at(seconds: u64) -> Instant {
        Instant(seconds * 1_000_000_000)
    }

    fn short() -> Unrecorded {
        Unrecorded::Short("no memory".to_owned())
    }

    fn impossible() -> Unrecorded {
        Unrecorded::Impossible("an operator".to_owned())
    }

    /// Tries 1, 2, 4 and so on up to 128, and answers what is recorded, what is wanted, and which size was tried last.
    fn climbed(attempt: impl Fn(Rows) -> Result<Option<Duration>, Unrecorded>) -> (Vec<Rows>, Vec<Rows>, Rows) {
        let mut last = 0;
        let climbed = climb(&[1, 2, 4, 8, 16, 32, 64, 128], |rows| {
            last = rows;
            attempt(rows)
        });
        (climbed.recorded.iter().map(|(rows, _)| *rows).collect(), climbed.wanted, last)
    }

    #[test]
    fn what_is_short_of_memory_stays_wanted_with_all_larger_sizes_and_what_is_impossible_does_not() {
        let up_to = |most: Rows, fault: fn() -> Unrecorded| {
            climbed(move |rows| if rows > most { Err(fault()) } else { Ok(Some(TOOK)) })
        };
        assert_eq!(up_to(256, short), (vec![1, 2, 4, 8, 16, 32, 64], vec![1, 2, 4, 8, 16, 32, 64], 64));
        assert_eq!(up_to(4, short), (vec![1, 2, 4], vec![1, 2, 4, 8, 16, 32, 64], 8));
        assert_eq!(up_to(0, short), (vec![], vec![1, 2, 4, 8, 16, 32, 64], 1));
        assert_eq!(up_to(4, impossible), (vec![1, 2, 4], vec![1, 2, 4], 8));
    }

    #[test]
    fn sizes_that_do_not_gain_are_not_wanted_and_two_in_a_row_end_the_ladder() {
        let gains = |sizes: &'static [Rows]| climbed(|rows| Ok(Some(TOOK).filter(|_| sizes.contains(&rows))));
        assert_eq!(gains(&[1, 4, 64]), (vec![1, 4], vec![1, 4], 16));
        // One in vain, and then a shortage: it is not tried again.
        let mixed = climbed(|rows| if rows == 4 { Err(short()) } else { Ok(Some(TOOK).filter(|_| rows == 1)) });
        assert_eq!(mixed, (vec![1], vec![1, 4, 8, 16, 32, 64], 4));
    }

    #[test]
    fn a_later_attempt_keeps_what_may_still_be_recorded() {
        let after = |result| still_wanted(&[1, 2, 4, 8], 4, &result);
        assert_eq!(after(Ok(Some(TOOK))), [1, 2, 4, 8]);
        assert_eq!(after(Err(short())), [1, 2, 4, 8]);
        assert_eq!(after(Err(Unrecorded::Busy)), [1, 2, 4, 8]);
        assert_eq!(after(Ok(None)), [1, 2, 8]);
        assert_eq!(after(Err(impossible())), [1, 2]);
    }

    #[test]
    fn a_calm_is_as_long_as_there_is_room_and_doubles_with_each_attempt_that_falls_short() {
        let due = |retry: &mut Retry, seconds, roomy| retry.is_due(at(seconds), at(0), roomy);
        let mut retry = Retry::default();
        assert!(!due(&mut retry, 10, true) && !due(&mut retry, 14, true) && due(&mut retry, 15, true));
        // A moment without room begins it anew.
        assert!(!due(&mut retry, 16, false) && !due(&mut retry, 17, true) && due(&mut retry, 22, true));
        retry.fell_short();
        assert!(!due(&mut retry, 30, true) && !due(&mut retry, 39, true) && due(&mut retry, 40, true));
        (0..100).for_each(|_| retry.fell_short());
        assert!(!due(&mut retry, 100, true) && !due(&mut retry, 699, true) && due(&mut retry, 700, true));
        retry.went_well();
        assert!(!due(&mut retry, 701, false) && !due(&mut retry, 702, true) && due(&mut retry, 707, true));
    }

    #[test]
    fn an_instance_that_was_busy_a_moment_ago_records_nothing_but_its_calm_goes_on() {
        let mut retry = Retry::default();
        assert!(!retry.is_due(at(10), at(9), true));
        assert!(!retry.is_due(at(20), at(19), true), "it may be asked again at once");
        assert!(retry.is_due(at(21), at(19), true));
    }
}
