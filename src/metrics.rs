//! Every metric, with its unit in its name, as typed handles in one struct.
//!
//! Counting costs an atomic add: label values are resolved once per model version, not once per request.

use crate::memory::LedgerStats;
use crate::scheduler::{LimitedBy, Rejection};
use crate::units::{ByteSize, DeviceId};
use prometheus::core::Collector;
use prometheus::{
    Counter, CounterVec, Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

/// Seconds: from 50 µs to half a minute in steps of two.
fn seconds_buckets() -> Vec<f64> {
    prometheus::exponential_buckets(50e-6, 2.0, 20).expect("positive start, factor over one")
}

/// Rows: powers of two.
fn rows_buckets() -> Vec<f64> {
    prometheus::exponential_buckets(1.0, 2.0, 13).expect("positive start, factor over one")
}

/// The server's metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    request_rows: IntCounterVec,
    queue_requests: IntGaugeVec,
    queue_rows: IntGaugeVec,
    queue_seconds: HistogramVec,
    batch: BatchFamilies,
    rejections: IntCounterVec,
    load_seconds: GaugeVec,
    memory_bytes: IntGaugeVec,
    arena_bytes: IntGaugeVec,
    memory_events: IntCounterVec,
    requests_in_flight: IntGaugeVec,
}

/// What is counted per batch.
#[derive(Debug)]
struct BatchFamilies {
    rows: HistogramVec,
    fill_ratio: HistogramVec,
    outcomes: IntCounterVec,
    limited: IntCounterVec,
    stage_seconds: CounterVec,
    estimate_ratio: HistogramVec,
}

impl BatchFamilies {
    fn new(built: &Built<'_>) -> Self {
        let tenths = prometheus::linear_buckets(0.1, 0.1, 10).expect("ten buckets");
        let ratios = [0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0];
        Self {
            rows: built.histograms("batch_rows", "Rows per batch, padding not counted.", &MODEL, &rows_buckets()),
            fill_ratio: built.histograms("batch_fill_ratio", "Rows over rows run, padding included.", &MODEL, &tenths),
            outcomes: built.counters("batches_total", "Batches by how they ended.", &and("outcome")),
            limited: built.counters("batch_limited_total", "What kept batches from being larger.", &and("by")),
            stage_seconds: built.float_counters(
                "stage_seconds_total",
                "Seconds of instances per stage.",
                &and("stage"),
            ),
            estimate_ratio: built.histograms("estimate_ratio", "Observed over predicted.", &and("of"), &ratios),
        }
    }
}

/// A request inside HTTP.
#[derive(Debug)]
pub struct InFlight(IntGauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The labels of a model version and one more.
fn and(label: &'static str) -> [&'static str; 3] {
    [MODEL[0], MODEL[1], label]
}

/// The labels of one model version.
const MODEL: [&str; 2] = ["model", "version"];

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics, registered, at zero.
    ///
    /// # Panics
    /// If two metrics share a name.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        let built = Built { registry: &registry };
        let seconds = seconds_buckets();
        let metrics = Self {
            requests: built.counters("requests_total", "Requests answered, by code: ok or the error's.", &and("code")),
            request_seconds: built.histograms("request_seconds", "From arrival to answer.", &MODEL, &seconds),
            request_rows: built.counters("request_rows_total", "Rows offered, refused ones included.", &MODEL),
            rejections: built.counters("rejections_total", "Requests that the scheduler refused.", &and("reason")),
            queue_requests: built.gauges("queue_requests", "Requests that wait.", &MODEL),
            queue_rows: built.gauges("queue_rows", "Rows that wait.", &MODEL),
            queue_seconds: built.histograms("queue_seconds", "From arrival to first dispatch.", &MODEL, &seconds),
            batch: BatchFamilies::new(&built),
            load_seconds: built.float_gauges("model_load_seconds", "Loading and warming up.", &MODEL),
            memory_bytes: built.gauges("memory_bytes", "Device memory by kind.", &["device", "kind"]),
            arena_bytes: built.gauges("arena_bytes", "Bytes of one arena by kind.", &["arena", "kind"]),
            memory_events: built.counters("memory_events_total", "What the ledger has done.", &["device", "what"]),
            requests_in_flight: built.gauges("requests_in_flight", "Requests that HTTP has not answered yet.", &[]),
            registry: registry.clone(),
        };
        let build = built.gauges("build_info", "Always 1.", &["version"]);
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        metrics
    }

    /// One more request is inside HTTP, until the guard goes; a client that leaves takes its guard with it.
    #[must_use]
    pub fn request_begins(&self) -> InFlight {
        let gauge = self.requests_in_flight.with_label_values::<&str>(&[]);
        gauge.inc();
        InFlight(gauge)
    }

    /// The handles of one model version.
    #[must_use]
    pub fn model(&self, name: &str, version: u64) -> ModelMetrics {
        let version = version.to_string();
        let labels = [name, version.as_str()];
        let with = |extra: &'static str| [name, version.as_str(), extra];
        // What has not happened yet is exposed as zero, or the first time that it does would not show in a rate.
        let _ = (self.requests.with_label_values(&with("ok")), self.request_rows.with_label_values(&labels));
        REASONS.iter().for_each(|reason| drop(self.rejections.with_label_values(&with(reason))));
        ModelMetrics {
            queue_requests: self.queue_requests.with_label_values(&labels),
            queue_rows: self.queue_rows.with_label_values(&labels),
            queue_seconds: self.queue_seconds.with_label_values(&labels),
            batch_rows: self.batch.rows.with_label_values(&labels),
            batch_fill_ratio: self.batch.fill_ratio.with_label_values(&labels),
            done: self.batch.outcomes.with_label_values(&with("done")),
            out_of_memory: self.batch.outcomes.with_label_values(&with("out_of_memory")),
            failed: self.batch.outcomes.with_label_values(&with("failed")),
            instance_lost: self.batch.outcomes.with_label_values(&with("instance_lost")),
            limited: LIMITS.map(|limit| self.batch.limited.with_label_values(&with(limit_name(limit)))),
            stages: ["gather", "compute", "scatter"]
                .map(|stage| self.batch.stage_seconds.with_label_values(&with(stage))),
            seconds_ratio: self.batch.estimate_ratio.with_label_values(&with("seconds")),
            bytes_ratio: self.batch.estimate_ratio.with_label_values(&with("bytes")),
            load_seconds: self.load_seconds.with_label_values(&labels),
        }
    }

    /// Counts a request that the scheduler refused.
    pub fn reject(&self, name: &str, version: u64, rejection: &Rejection) {
        let labels = [name, &version.to_string(), rejection_name(rejection)];
        self.rejections.with_label_values(&labels).inc();
    }

    /// Counts the rows of a request that fits its model, whatever becomes of it.
    pub fn offered(&self, name: &str, version: u64, rows: u32) {
        self.request_rows.with_label_values(&[name, &version.to_string()]).inc_by(u64::from(rows));
    }

    /// Counts an answered request. `code` is `ok` or the error's stable code.
    pub fn answered(&self, name: &str, version: u64, code: &str, seconds: f64) {
        let version = version.to_string();
        self.requests.with_label_values(&[name, version.as_str(), code]).inc();
        self.request_seconds.with_label_values(&[name, version.as_str()]).observe(seconds);
    }

    /// Publishes one kind of bytes of a device.
    pub fn memory(&self, device: DeviceId, kind: &str, bytes: ByteSize) {
        let bytes = i64::try_from(bytes.0).unwrap_or(i64::MAX);
        self.memory_bytes.with_label_values(&[&device.to_string(), kind]).set(bytes);
    }

    /// Publishes everything that a ledger says. `committed + outside + free` is `total`.
    pub fn ledger(&self, stats: &LedgerStats) {
        let LedgerStats { device, limit, headroom, margin, committed, allocated, free, total, outside, .. } = stats;
        let kinds = [
            ("limit", limit),
            ("headroom", headroom),
            ("margin", margin),
            ("committed", committed),
            ("allocated", allocated),
            ("free", free),
            ("total", total),
            ("outside", outside),
        ];
        kinds.into_iter().for_each(|(kind, &bytes)| self.memory(*device, kind, bytes));
        // Arenas come and go with models: those that are gone must not stay.
        self.arena_bytes.reset();
        for arena in &stats.arenas {
            let kinds = [("allocated", arena.allocated), ("reserved", arena.reserved), ("active", arena.active)];
            for (kind, bytes) in kinds {
                let bytes = i64::try_from(bytes.0).unwrap_or(i64::MAX);
                self.arena_bytes.with_label_values(&[arena.label.as_str(), kind]).set(bytes);
            }
        }
        let counters = &stats.counters;
        let counts = [
            ("commits", counters.commits),
            ("decommits", counters.decommits),
            ("failures", counters.failures),
            ("reclaimed_bytes", counters.reclaimed),
            ("trimmed_bytes", counters.trimmed),
        ];
        for (what, count) in counts {
            let label = [&device.to_string(), what];
            let counter = self.memory_events.with_label_values(&label);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
    }

    /// The text exposition of everything.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        // Writing to a vector does not fail, and every family here was checked when it was registered.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut out);
        out
    }
}

/// The handles of one model version.
#[derive(Clone, Debug)]
pub struct ModelMetrics {
    /// Requests that wait.
    pub queue_requests: IntGauge,
    /// Rows that wait.
    pub queue_rows: IntGauge,
    /// Time to the first dispatch.
    pub queue_seconds: Histogram,
    /// Rows per batch.
    pub batch_rows: Histogram,
    /// Rows over rows run.
    pub batch_fill_ratio: Histogram,
    /// Batches that ended well.
    pub done: IntCounter,
    /// Batches that found no memory.
    pub out_of_memory: IntCounter,
    /// Batches on which the model failed.
    pub failed: IntCounter,
    /// Batches whose instance was lost.
    pub instance_lost: IntCounter,
    limited: [IntCounter; 6],
    /// Seconds in gather, compute, scatter.
    pub stages: [Counter; 3],
    /// Observed over predicted seconds.
    pub seconds_ratio: Histogram,
    /// Observed over predicted bytes.
    pub bytes_ratio: Histogram,
    /// How long loading took.
    pub load_seconds: Gauge,
}

impl ModelMetrics {
    /// The counter of batches that this limit kept from being larger.
    #[must_use]
    pub fn limited(&self, limit: LimitedBy) -> &IntCounter {
        let index = LIMITS.iter().position(|&other| other == limit).unwrap_or(0);
        &self.limited[index]
    }
}

const LIMITS: [LimitedBy; 6] =
    [LimitedBy::Rows, LimitedBy::Bytes, LimitedBy::Knee, LimitedBy::Deadline, LimitedBy::Ladder, LimitedBy::Retry];

fn limit_name(limit: LimitedBy) -> &'static str {
    match limit {
        LimitedBy::Rows => "rows",
        LimitedBy::Bytes => "bytes",
        LimitedBy::Knee => "knee",
        LimitedBy::Deadline => "deadline",
        LimitedBy::Ladder => "ladder",
        LimitedBy::Retry => "retry",
    }
}

/// The names that [`rejection_name`] gives.
const REASONS: [&str; 7] =
    ["queue_full", "too_large", "deadline_exceeded", "memory_exhausted", "draining", "unhealthy", "failed"];

fn rejection_name(rejection: &Rejection) -> &'static str {
    match rejection {
        Rejection::QueueFull { .. } => "queue_full",
        Rejection::TooLarge { .. } => "too_large",
        Rejection::DeadlineExceeded => "deadline_exceeded",
        Rejection::MemoryExhausted { .. } => "memory_exhausted",
        Rejection::Draining => "draining",
        Rejection::Unhealthy => "unhealthy",
        Rejection::Failed => "failed",
    }
}

/// Makes metrics under the server's prefix and registers them.
struct Built<'a> {
    registry: &'a Registry,
}

impl Built<'_> {
    fn register<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("names and labels are constants");
        self.registry.register(Box::new(metric.clone())).expect("names are unique");
        metric
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register(IntCounterVec::new(options(name, help), labels))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.register(IntGaugeVec::new(options(name, help), labels))
    }

    fn float_counters(&self, name: &str, help: &str, labels: &[&str]) -> CounterVec {
        self.register(CounterVec::new(options(name, help), labels))
    }

    fn float_gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.register(GaugeVec::new(options(name, help), labels))
    }

    fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
        let options = HistogramOpts::from(options(name, help)).buckets(buckets.to_vec());
        self.register(HistogramVec::new(options, labels))
    }
}

fn options(name: &str, help: &str) -> Opts {
    Opts::new(name, help).namespace("concertina")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_exposed_under_its_labels() {
        let metrics = Metrics::new();
        let model = metrics.model("m", 3);
        model.limited(LimitedBy::Knee).inc();
        metrics.reject("m", 3, &Rejection::Draining);
        metrics.answered("m", 3, "ok", 0.001);
        let text = String::from_utf8(metrics.encode()).unwrap();
        for line in [
            r#"concertina_batch_limited_total{by="knee",model="m",version="3"} 1"#,
            r#"concertina_rejections_total{model="m",reason="draining",version="3"} 1"#,
            r#"concertina_requests_total{code="ok",model="m",version="3"} 1"#,
            r#"concertina_request_seconds_count{model="m",version="3"} 1"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
