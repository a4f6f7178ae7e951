//! Which signal does with the fewest replicas what was promised: each with its own best target out of the same grid.
//!
//! A target of one signal says nothing to another, so all grids are made of the same parts of a replica's capacity: the target
//! of a part is what the signal reads under a steady load of that part. Each signal then keeps the target with the fewest
//! replica-hours among those that meet the objective in every load that is tuned on; with none, that with the fewest late
//! requests. It is then run with other random numbers, and on loads that nobody tuned for.

use super::fleet::{Outcome, run, steady};
use super::{Setting, SignalKind, Workload};
use rayon::prelude::*;
use std::time::Duration;

/// The parts of a replica's capacity that targets are made of.
pub const FRACTIONS: [f64; 8] = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9];
/// How long a steady load is looked at.
const STEADY: Duration = Duration::from_secs(600);
/// What the seed of the runs that are reported is apart from that of the tuning.
const OTHER_SEED: u64 = 0x5eed;

/// One target of one signal.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// The part of the capacity.
    pub fraction: f64,
    /// What the signal reads then.
    pub target: f64,
    /// What came of the loads that are tuned on, in order.
    pub outcomes: Vec<Outcome>,
}

impl Trial {
    /// The replica-hours of all of them.
    #[must_use]
    pub fn replica_hours(&self) -> f64 {
        self.outcomes.iter().map(|outcome| outcome.replica_hours).sum()
    }

    /// The share of late requests in the worst of them.
    #[must_use]
    pub fn worst_late(&self) -> f64 {
        self.outcomes.iter().map(|outcome| outcome.late).fold(0.0, f64::max)
    }

    /// Whether all of them meet the objective.
    #[must_use]
    pub fn meets(&self, objective: Duration) -> bool {
        self.outcomes.iter().all(|outcome| outcome.meets(objective))
    }
}

/// One signal, compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The signal.
    pub signal: SignalKind,
    /// All targets that were tried.
    pub trials: Vec<Trial>,
    /// The one that was kept.
    pub kept: usize,
    /// What came of it in each load that is reported, in order.
    pub reported: Vec<Outcome>,
}

/// All signals, compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Under these conditions.
    pub setting: Setting,
    /// The loads that targets were chosen on.
    pub tuned: Vec<Workload>,
    /// The loads that are reported.
    pub reported: Vec<Workload>,
    /// The signals.
    pub candidates: Vec<Candidate>,
    /// What came of each load that is reported with saturation at the target that is configured.
    pub configured: Vec<Outcome>,
}

/// What a signal reads under a steady load of this part of a replica's capacity.
#[must_use]
pub fn reading_at(setting: &Setting, signal: SignalKind, fraction: f64) -> f64 {
    steady(setting, &[signal], fraction, STEADY).first().copied().unwrap_or(0.0)
}

/// Compares all signals, on all processors: each run has its own random numbers, so the result is the same on any number of
/// them. `progress` hears of each signal that is done.
#[must_use]
pub fn compare(
    setting: &Setting,
    tuned: &[Workload],
    reported: &[Workload],
    progress: &mut dyn FnMut(&str),
) -> Comparison {
    let signals = SignalKind::ALL.map(|(_, signal)| signal);
    let readings: Vec<Vec<f64>> = FRACTIONS.par_iter().map(|part| steady(setting, &signals, *part, STEADY)).collect();
    let other = Setting { seed: setting.seed ^ OTHER_SEED, ..setting.clone() };
    let mut candidates = Vec::new();
    for (index, signal) in signals.into_iter().enumerate() {
        let trial = |(fraction, readings): (&f64, &Vec<f64>)| {
            let target = readings[index];
            let outcomes = tuned.par_iter().map(|load| run(setting, *load, signal, target)).collect();
            Trial { fraction: *fraction, target, outcomes }
        };
        let trials: Vec<Trial> = FRACTIONS.par_iter().zip(&readings).map(trial).collect();
        let kept = best(&trials, setting.objective);
        let target = trials[kept].target;
        let reported = reported.par_iter().map(|load| run(&other, *load, signal, target)).collect();
        candidates.push(Candidate { signal, trials, kept, reported });
        progress(signal.name());
    }
    let configured =
        reported.par_iter().map(|load| run(&other, *load, SignalKind::Saturation, setting.scaling.target)).collect();
    Comparison { setting: setting.clone(), tuned: tuned.to_vec(), reported: reported.to_vec(), candidates, configured }
}

/// The place of the trial to keep.
fn best(trials: &[Trial], objective: Duration) -> usize {
    let cheapest = |a: &&(usize, &Trial), b: &&(usize, &Trial)| a.1.replica_hours().total_cmp(&b.1.replica_hours());
    let punctual = |a: &&(usize, &Trial), b: &&(usize, &Trial)| a.1.worst_late().total_cmp(&b.1.worst_late());
    let all: Vec<(usize, &Trial)> = trials.iter().enumerate().collect();
    let meeting: Vec<(usize, &Trial)> = all.iter().filter(|(_, trial)| trial.meets(objective)).copied().collect();
    let kept = meeting.iter().min_by(cheapest).or_else(|| all.iter().min_by(punctual));
    kept.map_or(0, |(index, _)| *index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(late: f64, replica_hours: f64) -> Trial {
        let outcome = Outcome {
            answered: 1000,
            refused: 0,
            p50: None,
            p99: Some(Duration::from_millis(if late > 0.01 { 300 } else { 100 })),
            late,
            replica_hours,
            most_replicas: 1,
            batches: 1,
            minutes: Vec::new(),
        };
        Trial { fraction: 0.5, target: 1.0, outcomes: vec![outcome] }
    }

    #[test]
    fn the_cheapest_that_meets_the_objective_is_kept_or_else_the_most_punctual() {
        for (trials, kept) in [
            (vec![trial(0.0, 9.0), trial(0.009, 5.0), trial(0.02, 1.0)], 1),
            (vec![trial(0.0, 5.0), trial(0.0, 9.0)], 0),
            (vec![trial(0.5, 1.0), trial(0.02, 9.0), trial(0.4, 2.0)], 1),
        ] {
            assert_eq!(best(&trials, Duration::from_millis(200)), kept, "{trials:?}");
        }
    }
}
