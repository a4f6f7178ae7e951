//! Every metric, with its unit in its name, as typed handles in one struct.
//!
//! Counting costs an atomic add: handles are resolved once per model version and found without a lock. What describes a
//! device as a whole is published as one picture and taken apart by the scrape, so that the numbers of one scrape belong together.
//! The series of a model version end with it, and every label has few values.

mod ledger;
mod model;
mod process;
mod readings;
mod triton;

pub use model::{ModelMetrics, Stage, limit_name};
pub use readings::DeviceReading;
pub use triton::{RequestTimes, Triton};

use crate::memory::LedgerStats;
use crate::scheduler::Rejection;
use crate::signal::Signal;
use crate::units::{ByteSize, DeviceId};
use arc_swap::ArcSwap;
use ledger::Ledgers;
use model::ModelFamilies;
use process::Process;
use prometheus::core::Collector;
use prometheus::{
    CounterVec, Encoder, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};
use readings::Readings;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The server's metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    families: ModelFamilies,
    /// The handles of all models, by name and version.
    models: ArcSwap<BTreeMap<String, BTreeMap<u64, Arc<ModelMetrics>>>>,
    ledgers: Arc<Ledgers>,
    readings: Arc<Readings>,
    requests_in_flight: IntGauge,
    saturation_model_maximum: Gauge,
    saturation_pod: Gauge,
    desired_replicas: Gauge,
    spans: SpanCounts,
}

/// What has become of spans.
#[derive(Clone, Debug)]
pub struct SpanCounts {
    /// The collector has taken them.
    pub exported: IntCounter,
    /// There was no room for them.
    pub dropped: IntCounter,
    /// The collector was not there, or did not want them.
    pub failed: IntCounter,
}

/// A request inside HTTP.
#[derive(Debug)]
pub struct InFlight(IntGauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}

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
        let built = Built { registry: &registry, prefix: "concertina" };
        let build = built.gauges("build_info", "Always 1.", &["version"]);
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        built.register(Ok(Process::new()));
        let spans = built.counters("trace_spans_total", "Spans by what became of them.", &["outcome"]);
        let spans = |outcome| spans.with_label_values(&[outcome]);
        Self {
            families: ModelFamilies::new(&built),
            models: ArcSwap::default(),
            ledgers: built.register(Ok(Shared(Arc::new(Ledgers::new())))).0,
            readings: built.register(Ok(Shared(Arc::new(Readings::new())))).0,
            requests_in_flight: built.register(IntGauge::with_opts(
                built.options("requests_in_flight", "Requests that HTTP has not answered yet."),
            )),
            saturation_model_maximum: built.gauge("saturation_model_maximum", "The most saturated model."),
            saturation_pod: built.gauge("saturation_pod", "The most saturated device, over its models: scale on this."),
            desired_replicas: built.gauge("desired_replicas", "saturation_pod over scaling.target, not rounded."),
            spans: SpanCounts { exported: spans("exported"), dropped: spans("dropped"), failed: spans("failed") },
            registry: registry.clone(),
        }
    }

    /// What counts spans.
    #[must_use]
    pub fn spans(&self) -> SpanCounts {
        self.spans.clone()
    }

    /// One more request is inside HTTP, until the guard goes; a client that leaves takes its guard with it.
    #[must_use]
    pub fn request_begins(&self) -> InFlight {
        self.requests_in_flight.inc();
        InFlight(self.requests_in_flight.clone())
    }

    /// The handles of one model version, from now on.
    #[must_use]
    pub fn model(&self, name: &str, version: u64) -> Arc<ModelMetrics> {
        if let Some(model) = self.known(name, version) {
            return model;
        }
        let model = Arc::new(self.families.model(name, version));
        self.models.rcu(|models| {
            let mut models = BTreeMap::clone(models);
            models.entry(name.to_owned()).or_default().entry(version).or_insert_with(|| Arc::clone(&model));
            models
        });
        self.known(name, version).unwrap_or(model)
    }

    /// The same if somebody has asked for them: what is counted of a version that is gone must not bring it back.
    #[must_use]
    pub fn known(&self, name: &str, version: u64) -> Option<Arc<ModelMetrics>> {
        self.models.load().get(name)?.get(&version).cloned()
    }

    /// Ends the series of a model version that is gone for good, so that versions to come do not pile up.
    pub fn forget(&self, name: &str, version: u64) {
        self.models.rcu(|models| {
            let mut models = BTreeMap::clone(models);
            if let Some(versions) = models.get_mut(name) {
                versions.remove(&version);
            }
            models.retain(|_, versions| !versions.is_empty());
            models
        });
        self.families.forget(name, version);
    }

    /// Counts a request that the scheduler refused.
    pub fn reject(&self, name: &str, version: u64, rejection: &Rejection) {
        if let Some(model) = self.known(name, version) {
            model.rejected(rejection);
        }
    }

    /// Counts the rows of a request that fits its model, whatever becomes of it.
    pub fn offered(&self, name: &str, version: u64, rows: u32) {
        if let Some(model) = self.known(name, version) {
            model.offered_rows.inc_by(u64::from(rows));
        }
    }

    /// Counts an answered request. `code` is `ok` or the error's stable code.
    pub fn answered(&self, name: &str, version: u64, code: &'static str, seconds: f64) {
        if let Some(model) = self.known(name, version) {
            model.answered(code, seconds);
        }
    }

    /// Publishes everything that a ledger says. `committed + outside + free` is `total`.
    pub fn ledger(&self, stats: LedgerStats) {
        self.ledgers.publish(stats);
    }

    /// Publishes what the scheduler has promised to batches in flight of a device, and what it may promise.
    pub fn run_bytes(&self, device: DeviceId, reserved: ByteSize, budget: Option<ByteSize>) {
        self.ledgers.publish_run(device, reserved, budget);
    }

    /// Publishes what the sensors of all devices say.
    pub fn devices(&self, readings: Vec<DeviceReading>) {
        self.readings.publish(readings);
    }

    /// Publishes the scaling signal; that of each model has its own handle.
    pub fn signal(&self, signal: &Signal) {
        self.saturation_model_maximum.set(signal.model_maximum);
        self.saturation_pod.set(signal.pod);
        self.desired_replicas.set(signal.desired_replicas);
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

/// A collector that somebody else publishes into.
#[derive(Debug)]
struct Shared<C>(Arc<C>);

impl<C> Clone for Shared<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C: Collector> Collector for Shared<C> {
    fn desc(&self) -> Vec<&prometheus::core::Desc> {
        self.0.desc()
    }

    fn collect(&self) -> Vec<prometheus::proto::MetricFamily> {
        self.0.collect()
    }
}

/// Makes metrics under a prefix and registers them.
struct Built<'a> {
    registry: &'a Registry,
    prefix: &'static str,
}

impl Built<'_> {
    fn register<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("names and labels are constants");
        self.registry.register(Box::new(metric.clone())).expect("names are unique");
        metric
    }

    fn options(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).namespace(self.prefix)
    }

    fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::with_opts(self.options(name, help)))
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register(IntCounterVec::new(self.options(name, help), labels))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.register(IntGaugeVec::new(self.options(name, help), labels))
    }

    fn float_counters(&self, name: &str, help: &str, labels: &[&str]) -> CounterVec {
        self.register(CounterVec::new(self.options(name, help), labels))
    }

    fn float_gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.register(GaugeVec::new(self.options(name, help), labels))
    }

    fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
        let options = HistogramOpts::from(self.options(name, help)).buckets(buckets.to_vec());
        self.register(HistogramVec::new(options, labels))
    }
}

#[cfg(test)]
mod tests;
