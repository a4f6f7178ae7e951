//! The arithmetic of Kubernetes' HorizontalPodAutoscaler for one metric of its pods.
//!
//! Desired are as many pods as bring the mean to the target, unless the mean is within a tenth of it. Pods that do not report
//! count as the target where the others say "fewer", and as nothing where they say "more". What is desired then passes
//! through the stabilization windows and the policies that bound how fast replicas come and go.

use crate::units::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Means this near the target change nothing.
const TOLERANCE: f64 = 0.1;

/// By how much replicas may change within a period.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// A part of those there are, in percent.
    Percent(f64),
    /// Pods.
    Pods(u32),
}

/// A bound on how fast replicas come or go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// How many.
    pub step: Step,
    /// Within this time.
    pub period: Duration,
}

/// What is desired is only followed as far as this lets it. Of several policies the fastest counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Behaviour {
    /// More replicas: the least that was desired within this time.
    pub up_window: Duration,
    /// Bounds on the way up.
    pub up: Vec<Policy>,
    /// Fewer replicas: the most that was desired within this time.
    pub down_window: Duration,
    /// Bounds on the way down.
    pub down: Vec<Policy>,
}

impl Behaviour {
    /// As config/kubernetes/components/autoscale-hpa has it.
    #[must_use]
    pub fn shipped() -> Self {
        let policy = |step, seconds| Policy { step, period: Duration::from_secs(seconds) };
        Self {
            up_window: Duration::ZERO,
            up: vec![policy(Step::Percent(100.0), 30), policy(Step::Pods(2), 30)],
            down_window: Duration::from_secs(300),
            down: vec![policy(Step::Pods(1), 60)],
        }
    }
}

/// One autoscaler.
#[derive(Clone, Debug)]
pub(super) struct Autoscaler {
    behaviour: Behaviour,
    bounds: (u32, u32),
    target: f64,
    /// What was desired, and when.
    recommendations: VecDeque<(Instant, u32)>,
    /// How many replicas came (or went, if negative), and when.
    changes: VecDeque<(Instant, i64)>,
}

impl Autoscaler {
    pub(super) fn new(behaviour: Behaviour, bounds: (u32, u32), target: f64) -> Self {
        Self { behaviour, bounds, target, recommendations: VecDeque::new(), changes: VecDeque::new() }
    }

    /// How many replicas there are to be, of the `current` ones that say this of the metric (`None`: nothing).
    pub(super) fn decide(&mut self, now: Instant, readings: &[Option<f64>]) -> u32 {
        let current = readings.len() as u32;
        if self.recommendations.is_empty() {
            self.recommendations.push_back((now, current));
        }
        let desired = desired(readings, self.target);
        let stable = self.stabilize(now, current, desired);
        let bounded = match stable {
            more if more > current => more.min(self.most(now, current)),
            fewer if fewer < current => fewer.max(self.fewest(now, current)),
            same => same,
        };
        let decided = bounded.clamp(self.bounds.0, self.bounds.1);
        if decided != current {
            self.changes.push_back((now, i64::from(decided) - i64::from(current)));
        }
        decided
    }

    /// Up to the least, or down to the most, that was desired within the window of each direction.
    fn stabilize(&mut self, now: Instant, current: u32, desired: u32) -> u32 {
        let longest = self.behaviour.up_window.max(self.behaviour.down_window);
        self.recommendations.push_back((now, desired));
        self.recommendations.retain(|(at, _)| now.since(*at) <= longest);
        let within = |window| self.recommendations.iter().filter(move |(at, _)| now.since(*at) < window);
        let least = within(self.behaviour.up_window).map(|(_, count)| *count).fold(desired, u32::min);
        let most = within(self.behaviour.down_window).map(|(_, count)| *count).fold(desired, u32::max);
        if current < least { least } else { current.min(most) }
    }

    /// How many there were a period ago.
    fn before(&self, now: Instant, current: u32, period: Duration) -> u32 {
        let since: i64 = self.changes.iter().filter(|(at, _)| now.since(*at) < period).map(|(_, change)| *change).sum();
        (i64::from(current) - since).max(0) as u32
    }

    fn most(&self, now: Instant, current: u32) -> u32 {
        let reach = |policy: &Policy| {
            let before = self.before(now, current, policy.period);
            match policy.step {
                Step::Pods(pods) => before + pods,
                Step::Percent(percent) => (f64::from(before) * (1.0 + percent / 100.0)).ceil() as u32,
            }
        };
        self.behaviour.up.iter().map(reach).max().unwrap_or(u32::MAX).max(current)
    }

    fn fewest(&self, now: Instant, current: u32) -> u32 {
        let reach = |policy: &Policy| {
            let before = self.before(now, current, policy.period);
            match policy.step {
                Step::Pods(pods) => before.saturating_sub(pods),
                Step::Percent(percent) => (f64::from(before) * (1.0 - percent / 100.0)).max(0.0) as u32,
            }
        };
        self.behaviour.down.iter().map(reach).min().unwrap_or(0).min(current)
    }
}

/// How many replicas the metric alone asks for.
fn desired(readings: &[Option<f64>], target: f64) -> u32 {
    let current = readings.len() as u32;
    let known: Vec<f64> = readings.iter().flatten().copied().collect();
    if known.is_empty() || target <= 0.0 {
        return current;
    }
    let total: f64 = known.iter().sum();
    let ratio = total / (target * known.len() as f64);
    let filled = if known.len() == readings.len() {
        ratio
    } else {
        let missing = (readings.len() - known.len()) as f64;
        let filled = (total + if ratio < 1.0 { missing * target } else { 0.0 }) / (target * f64::from(current));
        // What is missing may soften an answer, never turn it round.
        if (ratio < 1.0) == (filled < 1.0) { filled } else { 1.0 }
    };
    if (filled - 1.0).abs() <= TOLERANCE {
        return current;
    }
    // Half a billionth off: a product that is whole stays whole.
    (filled * f64::from(current) - 5e-10).ceil() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::default() + Duration::from_secs(seconds)
    }

    #[test]
    fn desired_replicas_by_hand() {
        let all = |value: f64, count| vec![Some(value); count];
        for (readings, expected, why) in [
            (all(0.7, 4), 4, "at the target"),
            (all(0.76, 4), 4, "within a tenth"),
            (all(0.64, 4), 4, "within a tenth"),
            (all(0.8, 4), 5, "4.57 rounded up"),
            (all(1.4, 4), 8, "twice the target"),
            (all(0.35, 4), 2, "half the target"),
            (all(0.0, 4), 0, "nothing to do"),
            (vec![Some(1.4), Some(1.4), None, None], 4, "the two that start will do"),
            (vec![Some(2.1), Some(2.1), None, None], 6, "they will not"),
            (vec![Some(0.8), Some(0.8), None, None], 4, "never fewer where the others say more"),
            (vec![Some(0.35), Some(0.35), None, None], 3, "those that are silent count as the target"),
            (vec![None, None], 2, "nothing known"),
        ] {
            assert_eq!(desired(&readings, 0.7), expected, "{why}: {readings:?}");
        }
    }

    #[test]
    fn the_way_up_is_bounded_by_the_fastest_policy() {
        let mut autoscaler = Autoscaler::new(Behaviour::shipped(), (2, 64), 0.7);
        let mut count = 3;
        let mut seen = Vec::new();
        for sync in 0..6 {
            count = autoscaler.decide(at(15 * sync), &vec![Some(70.0); count as usize]);
            seen.push(count);
        }
        // Doubled every 30 seconds, and never more than there may be.
        assert_eq!(seen, [6, 6, 12, 12, 24, 24]);
        for sync in 6..20 {
            count = autoscaler.decide(at(15 * sync), &vec![Some(70.0); count as usize]);
        }
        assert_eq!(count, 64);
    }

    #[test]
    fn the_way_down_waits_for_five_minutes_and_goes_one_by_one() {
        let mut autoscaler = Autoscaler::new(Behaviour::shipped(), (2, 64), 0.7);
        let mut count = 10;
        let mut last = Vec::new();
        for sync in 0..60 {
            let decided = autoscaler.decide(at(15 * sync), &vec![Some(0.1); count as usize]);
            if decided != count {
                last.push((15 * sync, decided));
            }
            count = decided;
        }
        let expected: Vec<(u64, u32)> = (0..8).map(|step| (300 + 60 * step, 9 - step as u32)).collect();
        assert_eq!(last, expected);
    }

    #[test]
    fn a_moment_of_load_keeps_replicas_for_the_whole_window() {
        let mut autoscaler = Autoscaler::new(Behaviour::shipped(), (1, 64), 0.7);
        let decide = |autoscaler: &mut Autoscaler, seconds, value| autoscaler.decide(at(seconds), &[Some(value); 4]);
        assert_eq!(decide(&mut autoscaler, 0, 0.1), 4);
        assert_eq!(decide(&mut autoscaler, 250, 0.7), 4);
        assert_eq!(decide(&mut autoscaler, 500, 0.1), 4);
        assert_eq!(decide(&mut autoscaler, 550, 0.1), 3);
    }
}
