//! A fleet of replicas behind a load balancer, scaled as Kubernetes scales, in virtual time: what a scaling signal is worth.
//!
//! The scheduler and the scaling signal are the server's own code. Around them stand an open-loop load ([`Workload`]), replicas
//! whose runs take as long as a measured device needs ([`Machine`]), the metrics' way through scrapes and a query, and the
//! arithmetic of the HorizontalPodAutoscaler. Nothing here reads a clock; the same seed gives the same numbers.
//!
//! It is fast enough for days at ten thousand requests a second because nothing happens to a request while its replica's
//! instance is busy: whoever comes meanwhile is handed over as one group at the end of the batch. Arrivals are a Poisson process
//! and a balancer that picks replicas at random leaves each one a Poisson process, so this changes no distribution.

mod autoscaler;
mod compare;
mod fleet;
mod histogram;
mod machine;
mod random;
mod replica;
mod report;
mod svg;
mod workload;

pub use autoscaler::{Behaviour, Policy, Step};
pub use compare::{Candidate, Comparison, FRACTIONS, Trial, compare, reading_at};
pub use fleet::{Minute, Outcome, run};
pub use machine::Machine;
pub use replica::SignalKind;
pub use workload::Workload;

use crate::signal::Scaling;
use std::time::Duration;

/// Everything but the load, the signal and its target.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// What the random numbers come from.
    pub seed: u64,
    /// The highest rate of a workload, in requests of one row per second.
    pub peak: f64,
    /// What 99 of 100 requests are to be answered within; a refused request is not.
    pub objective: Duration,
    /// From the autoscaler's decision until the new pod takes requests.
    pub startup: Duration,
    /// Between two scrapes of a pod.
    pub scrape_interval: Duration,
    /// The window that the query takes a mean or a rate over.
    pub query_window: Duration,
    /// What else lies between a scrape and the autoscaler: ingestion, the adapter's cache.
    pub metric_delay: Duration,
    /// Between two decisions of the autoscaler.
    pub sync_period: Duration,
    /// The fewest and the most pods.
    pub replicas: (u32, u32),
    /// How fast the autoscaler may go.
    pub behaviour: Behaviour,
    /// As the server's keys `scaling.target` and `scaling.window`.
    pub scaling: Scaling,
    /// As the server's key `model.max_queue_rows`.
    pub max_queue_rows: u64,
    /// As the server's key `model.knee_tolerance`.
    pub knee_tolerance: f64,
    /// What a replica runs on.
    pub machine: Machine,
}

impl Setting {
    /// As shipped: the server's defaults come in, the rest is what config/kubernetes says and what was measured of clusters.
    #[must_use]
    pub fn new(scaling: Scaling, max_queue_rows: u64, knee_tolerance: f64) -> Self {
        let seconds = Duration::from_secs;
        Self {
            seed: 1,
            peak: 10_000.0,
            objective: Duration::from_millis(200),
            startup: seconds(45),
            scrape_interval: seconds(5),
            query_window: seconds(30),
            metric_delay: seconds(5),
            sync_period: seconds(15),
            replicas: (2, 64),
            behaviour: Behaviour::shipped(),
            scaling,
            max_queue_rows,
            knee_tolerance,
            machine: Machine::small_gpu(),
        }
    }

    /// Rows per second of one replica at its best batch.
    #[must_use]
    pub fn capacity(&self) -> f64 {
        self.machine.best_rate(1.0)
    }
}

#[cfg(test)]
mod tests;
