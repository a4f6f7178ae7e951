//! What is counted for each model version.

use super::Built;
use super::triton::{Triton, TritonFamilies};
use crate::scheduler::{LimitedBy, Rejection};
use arc_swap::ArcSwapOption;
use prometheus::core::{MetricVec, MetricVecBuilder};
use prometheus::{
    Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The labels of one model version.
const MODEL: [&str; 2] = ["model", "version"];

/// The labels of a model version and one more.
fn and(label: &'static str) -> [&'static str; 3] {
    [MODEL[0], MODEL[1], label]
}

/// Codes of answers that a model version may have: more than there are.
const MOST_CODES: usize = 32;

/// Where the seconds of requests and instances go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Reading tensors out of a request.
    Decode,
    /// Waiting for the first dispatch.
    Queue,
    /// Copying rows into the batch.
    Gather,
    /// The model's run.
    Compute,
    /// Copying rows out of the batch.
    Scatter,
    /// Writing the answer.
    Encode,
}

const STAGES: [(Stage, &str); 6] = [
    (Stage::Decode, "decode"),
    (Stage::Queue, "queue"),
    (Stage::Gather, "gather"),
    (Stage::Compute, "compute"),
    (Stage::Scatter, "scatter"),
    (Stage::Encode, "encode"),
];

/// What a GPU and its driver do beside and within the stages.
const DEVICE_STAGES: [&str; 4] = ["launch", "copy", "run", "idle"];

impl Stage {
    /// What it is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        STAGES.iter().find(|(other, _)| *other == self).map_or("", |(_, name)| name)
    }
}

/// What a limit of batches is called.
#[must_use]
pub fn limit_name(limit: LimitedBy) -> &'static str {
    LIMITS.iter().find(|(other, _)| *other == limit).map_or("", |(_, name)| name)
}

const LIMITS: [(LimitedBy, &str); 7] = [
    (LimitedBy::Rows, "rows"),
    (LimitedBy::Bytes, "bytes"),
    (LimitedBy::Knee, "knee"),
    (LimitedBy::Deadline, "deadline"),
    (LimitedBy::Ladder, "ladder"),
    (LimitedBy::Retry, "retry"),
    (LimitedBy::Padding, "padding"),
];

const REASONS: [&str; 7] =
    ["queue_full", "too_large", "deadline_exceeded", "memory_exhausted", "draining", "unhealthy", "failed"];

/// The place of a rejection in [`REASONS`].
fn reason(rejection: &Rejection) -> usize {
    match rejection {
        Rejection::QueueFull { .. } => 0,
        Rejection::TooLarge { .. } => 1,
        Rejection::DeadlineExceeded => 2,
        Rejection::MemoryExhausted { .. } => 3,
        Rejection::Draining => 4,
        Rejection::Unhealthy => 5,
        Rejection::Failed => 6,
    }
}

/// The families of all model versions.
#[derive(Debug)]
pub(super) struct ModelFamilies {
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    request_rows: IntCounterVec,
    rejections: IntCounterVec,
    queue_requests: IntGaugeVec,
    queue_rows: IntGaugeVec,
    queue_oldest_seconds: GaugeVec,
    queue_seconds: HistogramVec,
    batch_rows: HistogramVec,
    batch_fill_ratio: HistogramVec,
    padding_rows: IntCounterVec,
    batches: IntCounterVec,
    limited: IntCounterVec,
    retried_rows: IntCounterVec,
    halvings: IntCounterVec,
    stage_seconds: CounterVec,
    device_seconds: CounterVec,
    estimate_ratio: HistogramVec,
    load_seconds: GaugeVec,
    instances: IntGaugeVec,
    offered_rate: GaugeVec,
    capacity: GaugeVec,
    saturation: GaugeVec,
    triton: TritonFamilies,
}

impl ModelFamilies {
    pub(super) fn new(built: &Built<'_>) -> Self {
        // From 50 µs to half a minute in steps of two, and powers of two.
        let seconds = prometheus::exponential_buckets(50e-6, 2.0, 20).expect("positive start, factor over one");
        let rows = prometheus::exponential_buckets(1.0, 2.0, 13).expect("positive start, factor over one");
        let tenths = prometheus::linear_buckets(0.1, 0.1, 10).expect("ten buckets");
        let ratios = [0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0];
        Self {
            requests: built.counters("requests_total", "Requests answered, by code: ok or the error's.", &and("code")),
            request_seconds: built.histograms("request_seconds", "From arrival to answer.", &MODEL, &seconds),
            request_rows: built.counters("request_rows_total", "Rows offered, refused ones included.", &MODEL),
            rejections: built.counters("rejections_total", "Requests that the scheduler refused.", &and("reason")),
            queue_requests: built.gauges("queue_requests", "Requests that wait.", &MODEL),
            queue_rows: built.gauges("queue_rows", "Rows that wait.", &MODEL),
            queue_oldest_seconds: built.float_gauges("queue_oldest_seconds", "The age of what waits longest.", &MODEL),
            queue_seconds: built.histograms("queue_seconds", "From arrival to first dispatch.", &MODEL, &seconds),
            batch_rows: built.histograms("batch_rows", "Rows per batch, padding not counted.", &MODEL, &rows),
            batch_fill_ratio: built.histograms("batch_fill_ratio", "Rows over rows run.", &MODEL, &tenths),
            padding_rows: built.counters("padding_rows_total", "Rows run that nobody asked for.", &MODEL),
            batches: built.counters("batches_total", "Batches by how they ended.", &and("outcome")),
            limited: built.counters("batch_limited_total", "What kept batches from being larger.", &and("by")),
            retried_rows: built.counters("retried_rows_total", "Rows that ran again, by why.", &and("reason")),
            halvings: built.counters("batch_halvings_total", "Batches that ran again in halves.", &MODEL),
            stage_seconds: built.float_counters("stage_seconds_total", "Seconds per stage.", &and("stage")),
            device_seconds: built.float_counters(
                "device_seconds_total",
                "What a GPU spends on batches.",
                &and("stage"),
            ),
            estimate_ratio: built.histograms("estimate_ratio", "Observed over predicted.", &and("of"), &ratios),
            load_seconds: built.float_gauges("model_load_seconds", "Loading and warming up.", &MODEL),
            instances: built.gauges("model_instances", "Instances that work.", &MODEL),
            offered_rate: built.float_gauges("offered_rows_per_second", "Over scaling.window.", &MODEL),
            capacity: built.float_gauges("capacity_rows_per_second", "At the knee, within the budget.", &MODEL),
            saturation: built.float_gauges("saturation", "Offered and waiting rows over the capacity.", &MODEL),
            triton: TritonFamilies::new(&Built { prefix: "nv", ..*built }),
        }
    }

    /// The handles of one model version. What has not happened yet is exposed as zero, or the first time that it does would
    /// not show in a rate.
    pub(super) fn model(&self, name: &str, version: u64) -> ModelMetrics {
        let version = version.to_string();
        let labels = [name, version.as_str()];
        let with = |extra: &'static str| [name, version.as_str(), extra];
        let outcome = |name| self.batches.with_label_values(&with(name));
        let retried = |name| self.retried_rows.with_label_values(&with(name));
        let codes: [OnceLock<(&'static str, IntCounter)>; MOST_CODES] = [const { OnceLock::new() }; MOST_CODES];
        let _ = codes[0].set(("ok", self.requests.with_label_values(&with("ok"))));
        ModelMetrics {
            labels: (name.to_owned(), version.clone()),
            requests: self.requests.clone(),
            codes,
            request_seconds: self.request_seconds.with_label_values(&labels),
            offered_rows: self.request_rows.with_label_values(&labels),
            rejections: REASONS.map(|reason| self.rejections.with_label_values(&with(reason))),
            queue_requests: self.queue_requests.with_label_values(&labels),
            queue_rows: self.queue_rows.with_label_values(&labels),
            queue_oldest_seconds: self.queue_oldest_seconds.with_label_values(&labels),
            queue_seconds: self.queue_seconds.with_label_values(&labels),
            batch_rows: self.batch_rows.with_label_values(&labels),
            batch_fill_ratio: self.batch_fill_ratio.with_label_values(&labels),
            padding_rows: self.padding_rows.with_label_values(&labels),
            done: outcome("done"),
            out_of_memory: outcome("out_of_memory"),
            failed: outcome("failed"),
            instance_lost: outcome("instance_lost"),
            retried: ["out_of_memory", "failed", "instance_lost"].map(retried),
            halvings: self.halvings.with_label_values(&labels),
            limited: LIMITS.map(|(_, name)| self.limited.with_label_values(&with(name))),
            stages: STAGES.map(|(_, name)| self.stage_seconds.with_label_values(&with(name))),
            device: DEVICE_STAGES.map(|name| self.device_seconds.with_label_values(&with(name))),
            seconds_ratio: self.estimate_ratio.with_label_values(&with("seconds")),
            bytes_ratio: self.estimate_ratio.with_label_values(&with("bytes")),
            load_seconds: self.load_seconds.with_label_values(&labels),
            instances: self.instances.with_label_values(&labels),
            offered_rate: self.offered_rate.with_label_values(&labels),
            capacity: Known::new(&self.capacity),
            saturation: Known::new(&self.saturation),
            triton: self.triton.model(name, &version),
        }
    }

    pub(super) fn forget(&self, name: &str, version: u64) {
        let version = version.to_string();
        let Self { requests, request_rows, rejections, padding_rows, batches, limited, retried_rows, halvings, .. } =
            self;
        for family in [requests, request_rows, rejections, padding_rows, batches, limited, retried_rows, halvings] {
            end(family, name, &version);
        }
        let Self { request_seconds, queue_seconds, batch_rows, batch_fill_ratio, estimate_ratio, .. } = self;
        for family in [request_seconds, queue_seconds, batch_rows, batch_fill_ratio, estimate_ratio] {
            end(family, name, &version);
        }
        for family in [&self.queue_requests, &self.queue_rows, &self.instances] {
            end(family, name, &version);
        }
        let Self { queue_oldest_seconds, load_seconds, offered_rate, capacity, saturation, .. } = self;
        for family in [queue_oldest_seconds, load_seconds, offered_rate, capacity, saturation] {
            end(family, name, &version);
        }
        end(&self.stage_seconds, name, &version);
        end(&self.device_seconds, name, &version);
        self.triton.forget(name, &version);
    }
}

/// Ends all series of a model version in one family.
pub(super) fn end<T: MetricVecBuilder>(family: &MetricVec<T>, name: &str, version: &str)
where
    MetricVec<T>: prometheus::core::Collector,
{
    use prometheus::core::Collector as _;
    let mut gone = Vec::new();
    for collected in family.collect() {
        for metric in collected.get_metric() {
            let label = |key: &str| metric.get_label().iter().find(|pair| pair.name() == key);
            let of_model = label("model").is_some_and(|pair| pair.value() == name)
                && label("version").is_some_and(|pair| pair.value() == version);
            if of_model {
                gone.push(
                    metric.get_label().iter().map(|pair| (pair.name().to_owned(), pair.value().to_owned())).collect(),
                );
            }
        }
    }
    let gone: Vec<Vec<(String, String)>> = gone;
    for labels in gone {
        let labels: HashMap<&str, &str> = labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        // Somebody else may have ended it meanwhile.
        let _ = family.remove(&labels);
    }
}

/// The handles of one model version.
#[derive(Debug)]
pub struct ModelMetrics {
    labels: (String, String),
    requests: IntCounterVec,
    /// Each code at its first place that is free; so it is found again without a lock.
    codes: [OnceLock<(&'static str, IntCounter)>; MOST_CODES],
    request_seconds: Histogram,
    /// Rows offered so far.
    pub offered_rows: IntCounter,
    rejections: [IntCounter; 7],
    /// Requests that wait.
    pub queue_requests: IntGauge,
    /// Rows that wait.
    pub queue_rows: IntGauge,
    /// The age of the request that waits longest.
    pub queue_oldest_seconds: Gauge,
    /// Time to the first dispatch.
    pub queue_seconds: Histogram,
    /// Rows per batch.
    pub batch_rows: Histogram,
    /// Rows over rows run.
    pub batch_fill_ratio: Histogram,
    /// Rows run beside those that were asked for.
    pub padding_rows: IntCounter,
    /// Batches that ended well.
    pub done: IntCounter,
    /// Batches that found no memory.
    pub out_of_memory: IntCounter,
    /// Batches on which the model failed.
    pub failed: IntCounter,
    /// Batches whose instance was lost.
    pub instance_lost: IntCounter,
    /// Rows that ran again for want of memory, after a failure, and after the loss of an instance.
    pub retried: [IntCounter; 3],
    /// Batches that ran again in halves.
    pub halvings: IntCounter,
    limited: [IntCounter; 7],
    stages: [Counter; 6],
    device: [Counter; 4],
    /// Observed over predicted seconds.
    pub seconds_ratio: Histogram,
    /// Observed over predicted bytes.
    pub bytes_ratio: Histogram,
    /// How long loading took.
    pub load_seconds: Gauge,
    /// Instances that work.
    pub instances: IntGauge,
    /// Rows offered per second.
    pub offered_rate: Gauge,
    capacity: Known,
    saturation: Known,
    /// The same in Triton's words.
    pub triton: Triton,
}

impl ModelMetrics {
    /// Counts an answered request. `code` is `ok` or the error's stable code.
    pub fn answered(&self, code: &'static str, seconds: f64) {
        self.request_seconds.observe(seconds);
        for place in &self.codes {
            let (taken, counter) = place.get_or_init(|| {
                let labels = [self.labels.0.as_str(), self.labels.1.as_str(), code];
                (code, self.requests.with_label_values(&labels))
            });
            if *taken == code {
                return counter.inc();
            }
        }
    }

    /// Counts a request that the scheduler refused.
    pub fn rejected(&self, rejection: &Rejection) {
        self.rejections[reason(rejection)].inc();
        self.triton.rejected(rejection);
    }

    /// The counter of batches that this limit kept from being larger.
    #[must_use]
    pub fn limited(&self, limit: LimitedBy) -> &IntCounter {
        let index = LIMITS.iter().position(|(other, _)| *other == limit).unwrap_or(0);
        &self.limited[index]
    }

    /// Counts seconds of a stage.
    pub fn spent(&self, stage: Stage, time: Duration) {
        let index = STAGES.iter().position(|(other, _)| *other == stage).unwrap_or(0);
        self.stages[index].inc_by(time.as_secs_f64());
    }

    /// Counts what a GPU and its driver did for a batch: its launch, the copies of its inputs, its run, and the time without
    /// work in front of it.
    pub fn spent_on_device(&self, [launch, copy, run, idle]: [Duration; 4]) {
        for (counter, time) in self.device.iter().zip([launch, copy, run, idle]) {
            counter.inc_by(time.as_secs_f64());
        }
    }

    /// Publishes what the model can do and how saturated it is. What is not known has no series: a zero would be read as
    /// "nothing to do".
    pub fn saturated(&self, capacity: Option<f64>, saturation: Option<f64>) {
        let labels = [self.labels.0.as_str(), self.labels.1.as_str()];
        self.capacity.publish(&labels, capacity);
        self.saturation.publish(&labels, saturation);
    }
}

/// A gauge that exists only while its value is known. Setting it takes no lock; coming and going does.
#[derive(Debug)]
struct Known {
    family: GaugeVec,
    gauge: ArcSwapOption<Gauge>,
}

impl Known {
    fn new(family: &GaugeVec) -> Self {
        Self { family: family.clone(), gauge: ArcSwapOption::empty() }
    }

    fn publish(&self, labels: &[&str], value: Option<f64>) {
        match (&*self.gauge.load(), value) {
            (Some(gauge), Some(value)) => gauge.set(value),
            (None, Some(value)) => {
                let gauge = self.family.with_label_values(labels);
                gauge.set(value);
                self.gauge.store(Some(Arc::new(gauge)));
            }
            (Some(_), None) => {
                self.gauge.store(None);
                // It may have ended with its model version.
                let _ = self.family.remove_label_values(labels);
            }
            (None, None) => {}
        }
    }
}
