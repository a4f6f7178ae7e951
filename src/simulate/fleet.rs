//! A run: pods that come and go, a balancer in front, metrics on their way, and the autoscaler behind.

use super::autoscaler::Autoscaler;
use super::histogram::Histogram;
use super::random::Random;
use super::replica::{Counters, Replica, SignalKind};
use super::{Setting, Workload};
use crate::units::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// How often replicas publish, and the load changes.
const TICK: Duration = Duration::from_millis(250);
/// The first load holds so long before anything counts: the run shall not begin with the start of everything.
const LEAD: Duration = Duration::from_secs(900);
/// The saturation of the pods that there are at the very first.
const FIRST: f64 = 0.6;

/// One minute of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Minute {
    /// Requests offered per second, as the workload says.
    pub offered: f64,
    /// Pods, those that start included.
    pub replicas: u32,
    /// Seconds that 99 of 100 of its requests were answered within; `None`: more were refused.
    pub p99: Option<f64>,
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Requests answered.
    pub answered: u64,
    /// Requests refused.
    pub refused: u64,
    /// What half of all requests were answered within.
    pub p50: Option<Duration>,
    /// What 99 of 100 requests were answered within; `None`: more were refused.
    pub p99: Option<Duration>,
    /// The share of requests that were refused or not answered within the objective.
    pub late: f64,
    /// Pods times hours, from their creation to their end.
    pub replica_hours: f64,
    /// The most pods at a time.
    pub most_replicas: u32,
    /// Batches that ran.
    pub batches: u64,
    /// How it went.
    pub minutes: Vec<Minute>,
}

impl Outcome {
    /// Whether 99 of 100 requests were answered within the objective.
    #[must_use]
    pub fn meets(&self, objective: Duration) -> bool {
        self.p99.is_some_and(|p99| p99 <= objective)
    }
}

/// One pod.
#[derive(Debug)]
struct Pod {
    replica: Replica,
    ready: Instant,
    leaving: bool,
    /// What scrapes have seen, ascending in time.
    scrapes: VecDeque<(Instant, Counters)>,
}

/// All of them.
#[derive(Debug)]
struct Fleet<'a> {
    setting: &'a Setting,
    signal: SignalKind,
    pods: Vec<Pod>,
    streams: u64,
    batches_gone: u64,
    all: Histogram,
    minute: Histogram,
}

/// One run of a workload, scaled on a signal with a target for the mean over the pods.
#[must_use]
pub fn run(setting: &Setting, workload: Workload, signal: SignalKind, target: f64) -> Outcome {
    let mut fleet = Fleet::new(setting, signal);
    let load = |at: Duration| setting.peak * workload.load(at.saturating_sub(LEAD));
    let first = (load(Duration::ZERO) / (FIRST * setting.capacity())).ceil() as u32;
    fleet.resize(Instant::default(), first.clamp(setting.replicas.0, setting.replicas.1), true);
    let mut autoscaler = Autoscaler::new(setting.behaviour.clone(), setting.replicas, target);
    let mut lost = Random::new(setting.seed, u64::MAX);
    let mut outcome = Fleet::nothing();
    let end = LEAD + workload.length();
    let (mut at, mut pods_seconds) = (Duration::ZERO, 0.0);
    let due = |at: Duration, every: Duration| at.as_nanos().is_multiple_of(every.as_nanos().max(1));
    while at < end {
        if at == LEAD {
            fleet.minute.clear();
            pods_seconds = 0.0;
        }
        let (now, next, rate) = (instant(at), instant(at + TICK), load(at));
        fleet.remember(workload.memory(at.saturating_sub(LEAD)));
        fleet.pods.iter_mut().for_each(|pod| pod.replica.quarters = workload.quarters(at.saturating_sub(LEAD)));
        fleet.live(now, next, rate, &mut lost);
        at += TICK;
        pods_seconds += fleet.pods.len() as f64 * TICK.as_secs_f64();
        outcome.most_replicas = outcome.most_replicas.max(if at > LEAD { fleet.pods.len() as u32 } else { 0 });
        if due(at, setting.scrape_interval) {
            fleet.scrape(next);
        }
        if at > LEAD && due(at, Duration::from_secs(60)) {
            let p99 = fleet.minute.quantile(0.99).map(|p99| p99.as_secs_f64());
            outcome.minutes.push(Minute { offered: rate, replicas: fleet.pods.len() as u32, p99 });
            fleet.end_minute();
        }
        if due(at, setting.sync_period) {
            let decided = autoscaler.decide(next, &fleet.readings(next));
            fleet.resize(next, decided, false);
        }
    }
    outcome.batches = fleet.batches();
    outcome.replica_hours = pods_seconds / 3600.0;
    (outcome.answered, outcome.refused) = (fleet.all.answered(), fleet.all.refused());
    (outcome.p50, outcome.p99) = (fleet.all.quantile(0.5), fleet.all.quantile(0.99));
    outcome.late = fleet.all.late(setting.objective);
    outcome
}

fn instant(at: Duration) -> Instant {
    Instant::default() + at
}

impl<'a> Fleet<'a> {
    fn new(setting: &'a Setting, signal: SignalKind) -> Self {
        let (all, minute) = (Histogram::new(), Histogram::new());
        Self { setting, signal, pods: Vec::new(), streams: 0, batches_gone: 0, all, minute }
    }

    fn nothing() -> Outcome {
        Outcome {
            answered: 0,
            refused: 0,
            p50: None,
            p99: None,
            late: 0.0,
            replica_hours: 0.0,
            most_replicas: 0,
            batches: 0,
            minutes: Vec::new(),
        }
    }

    fn remember(&mut self, memory: f64) {
        self.pods.iter_mut().for_each(|pod| pod.replica.remember(memory));
    }

    /// One tick. The balancer picks a ready pod at random for each request; with none, requests are lost.
    fn live(&mut self, now: Instant, next: Instant, rate: f64, lost: &mut Random) {
        let takes = |pod: &Pod| !pod.leaving && pod.ready <= now;
        let share = rate / self.pods.iter().filter(|pod| takes(pod)).count() as f64;
        if share.is_infinite() {
            self.minute.refuse(u64::from(lost.poisson(rate * next.since(now).as_secs_f64())));
        }
        for pod in &mut self.pods {
            let share = if takes(pod) { share } else { 0.0 };
            pod.replica.advance(next, share, &mut self.minute);
            pod.replica.publish();
        }
        let gone = |pod: &Pod| pod.leaving && pod.replica.inside() == 0;
        self.batches_gone +=
            self.pods.iter().filter(|pod| gone(pod)).map(|pod| pod.replica.counters.batches).sum::<u64>();
        self.pods.retain(|pod| !gone(pod));
    }

    /// What a minute has seen is part of the whole.
    fn end_minute(&mut self) {
        self.all.absorb(&self.minute);
        self.minute.clear();
    }

    fn scrape(&mut self, now: Instant) {
        let kept = self.setting.query_window + self.setting.metric_delay + self.setting.scrape_interval;
        for pod in self.pods.iter_mut().filter(|pod| pod.ready <= now) {
            pod.scrapes.push_back((now, pod.replica.counters));
            while pod.scrapes.front().is_some_and(|(at, _)| now.since(*at) > kept) {
                pod.scrapes.pop_front();
            }
        }
    }

    /// What the autoscaler sees of each pod that is meant to stay.
    fn readings(&self, now: Instant) -> Vec<Option<f64>> {
        let end = now - self.setting.metric_delay;
        let begin = end - self.setting.query_window;
        let reading = |pod: &Pod| {
            let seen: Vec<_> = pod.scrapes.iter().filter(|(at, _)| *at > begin && *at <= end).copied().collect();
            reading(self.signal, &seen)
        };
        self.pods.iter().filter(|pod| !pod.leaving).map(reading).collect()
    }

    /// Makes pods, or sends away those that start, then the youngest.
    fn resize(&mut self, now: Instant, wanted: u32, at_once: bool) {
        let mut staying: Vec<usize> = (0..self.pods.len()).filter(|index| !self.pods[*index].leaving).collect();
        while staying.len() > wanted as usize {
            let Some(index) = staying.pop() else { return };
            self.pods[index].leaving = true;
        }
        for _ in staying.len()..wanted as usize {
            self.streams += 1;
            let replica = Replica::new(self.setting, self.streams, now);
            let ready = if at_once { now } else { now + self.setting.startup };
            self.pods.push(Pod { replica, ready, leaving: false, scrapes: VecDeque::new() });
        }
    }

    fn batches(&self) -> u64 {
        self.batches_gone + self.pods.iter().map(|pod| pod.replica.counters.batches).sum::<u64>()
    }
}

/// What a query over a window says of one pod: the mean of a gauge, the rate of a counter. A rate needs two scrapes.
fn reading(signal: SignalKind, seen: &[(Instant, Counters)]) -> Option<f64> {
    let ((first, from), (last, to)) = (seen.first()?, seen.last()?);
    if signal == SignalKind::Saturation {
        return Some(seen.iter().map(|(_, counters)| counters.saturation).sum::<f64>() / seen.len() as f64);
    }
    let seconds = last.since(*first).as_secs_f64();
    if seconds <= 0.0 {
        return None;
    }
    match signal {
        SignalKind::Cpu => Some((to.cpu_seconds - from.cpu_seconds) / seconds),
        SignalKind::Busy => Some((to.busy_seconds - from.busy_seconds) / seconds),
        SignalKind::Concurrency => Some((to.inside_seconds - from.inside_seconds) / seconds),
        SignalKind::QueueTime => {
            let rows = to.dispatched - from.dispatched;
            Some(if rows > 0 { (to.queue_seconds - from.queue_seconds) / rows as f64 } else { 0.0 })
        }
        SignalKind::Saturation => None,
    }
}

/// What a signal reads in the mean of a replica under a steady load that is this part of its capacity.
pub(super) fn steady(setting: &Setting, signals: &[SignalKind], part: f64, length: Duration) -> Vec<f64> {
    let mut replica = Replica::new(setting, 0, Instant::default());
    let mut latencies = Histogram::new();
    let rate = part * setting.capacity();
    let mut seen = Vec::new();
    let (mut at, scrape) = (Duration::ZERO, setting.scrape_interval);
    while at < length {
        at += TICK;
        replica.advance(instant(at), rate, &mut latencies);
        replica.publish();
        let warm = at * 4 >= length;
        if warm && at.as_nanos().is_multiple_of(scrape.as_nanos().max(1)) {
            seen.push((instant(at), replica.counters));
        }
    }
    signals.iter().map(|signal| reading(*signal, &seen).unwrap_or(0.0)).collect()
}
