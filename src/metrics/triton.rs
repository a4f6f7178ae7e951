//! The same counts under the names that dashboards for Triton, and its own tools, read. All times are microseconds.
//!
//! As there, times are added when a request has been answered well, and each request of a batch counts the whole of its batch.

use super::Built;
use super::model::end;
use crate::scheduler::Rejection;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use std::time::Duration;

const MODEL: [&str; 2] = ["model", "version"];
const FAILURES: [&str; 4] = ["REJECTED", "CANCELED", "BACKEND", "OTHER"];
const TIMES: [(&str, &str); 5] = [
    ("inference_request_duration_us", "From arrival to answer, summed over requests."),
    ("inference_queue_duration_us", "From arrival to dispatch, summed over requests."),
    ("inference_compute_input_duration_us", "Gathering inputs, summed over requests."),
    ("inference_compute_infer_duration_us", "The model's runs, summed over requests."),
    ("inference_compute_output_duration_us", "Scattering outputs, summed over requests."),
];

/// The families of all model versions.
#[derive(Debug)]
pub(super) struct TritonFamilies {
    success: IntCounterVec,
    failure: IntCounterVec,
    count: IntCounterVec,
    executions: IntCounterVec,
    times: [IntCounterVec; 5],
    pending: IntGaugeVec,
}

impl TritonFamilies {
    pub(super) fn new(built: &Built<'_>) -> Self {
        let failure = ["model", "version", "reason"];
        Self {
            success: built.counters("inference_request_success", "Requests answered well.", &MODEL),
            failure: built.counters("inference_request_failure", "Requests not answered well.", &failure),
            count: built.counters("inference_count", "Rows answered.", &MODEL),
            executions: built.counters("inference_exec_count", "Batches run.", &MODEL),
            times: TIMES.map(|(name, help)| built.counters(name, help, &MODEL)),
            pending: built.gauges("inference_pending_request_count", "Requests that wait.", &MODEL),
        }
    }

    pub(super) fn model(&self, name: &str, version: &str) -> Triton {
        let labels = [name, version];
        Triton {
            success: self.success.with_label_values(&labels),
            failures: FAILURES.map(|reason| self.failure.with_label_values(&[name, version, reason])),
            count: self.count.with_label_values(&labels),
            executions: self.executions.with_label_values(&labels),
            times: self.times.each_ref().map(|family| family.with_label_values(&labels)),
            pending: self.pending.with_label_values(&labels),
        }
    }

    pub(super) fn forget(&self, name: &str, version: &str) {
        let Self { success, failure, count, executions, times, pending } = self;
        for family in [success, failure, count, executions].into_iter().chain(times) {
            end(family, name, version);
        }
        end(pending, name, version);
    }
}

/// How long one request took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestTimes {
    /// From arrival to answer.
    pub total: Duration,
    /// From arrival to first dispatch.
    pub queue: Duration,
    /// Gathering, computing and scattering, of all batches that it had rows in.
    pub batches: [Duration; 3],
}

/// The handles of one model version.
#[derive(Debug)]
pub struct Triton {
    success: IntCounter,
    failures: [IntCounter; 4],
    count: IntCounter,
    /// Batches run.
    pub executions: IntCounter,
    times: [IntCounter; 5],
    /// Requests that wait.
    pub pending: IntGauge,
}

impl Triton {
    /// Counts a request that was answered well.
    pub fn succeeded(&self, rows: u32, times: RequestTimes) {
        self.success.inc();
        self.count.inc_by(u64::from(rows));
        let RequestTimes { total, queue, batches: [gather, compute, scatter] } = times;
        for (counter, time) in self.times.iter().zip([total, queue, gather, compute, scatter]) {
            counter.inc_by(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        }
    }

    /// Counts a client that has gone.
    pub fn cancelled(&self) {
        self.failures[1].inc();
    }

    /// Counts a request that the scheduler refused.
    pub(super) fn rejected(&self, rejection: &Rejection) {
        let index = match rejection {
            Rejection::QueueFull { .. }
            | Rejection::TooLarge { .. }
            | Rejection::DeadlineExceeded
            | Rejection::MemoryExhausted { .. } => 0,
            Rejection::Failed => 2,
            Rejection::Draining | Rejection::Unhealthy => 3,
        };
        self.failures[index].inc();
    }
}
