//! The task that makes spans of records and sends them, so that nobody else waits for a collector.

use super::spans::Frame;
use super::{Recorded, Settings};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::sleep_until;

/// Spans that are sent at once.
const MOST_SPANS: usize = 512;
/// How long the first of them waits for others.
const DELAY: Duration = Duration::from_secs(1);
/// When the system's clock has moved by more, spans follow it.
const DRIFT: Duration = Duration::from_millis(10);

/// Sends what tracers have recorded.
#[derive(Debug)]
pub struct Exporter<E> {
    recorded: Recorded,
    exporter: E,
    scope: InstrumentationScope,
    origin: Duration,
    failing: bool,
}

/// An exporter to the collector of these settings. `OTEL_EXPORTER_OTLP_HEADERS`, `_TIMEOUT` and `_COMPRESSION` and
/// `OTEL_RESOURCE_ATTRIBUTES` hold as well. To be made inside the runtime.
///
/// # Errors
/// If the address cannot be one.
pub fn exporter(
    settings: &Settings,
    endpoint: &str,
    recorded: Recorded,
) -> Result<Exporter<opentelemetry_otlp::SpanExporter>, ExporterBuildError> {
    let mut exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    exporter.set_resource(
        &Resource::builder().with_attribute(version).with_service_name(settings.service_name.clone()).build(),
    );
    Ok(Exporter::new(exporter, recorded))
}

impl<E: SpanExporter> Exporter<E> {
    /// Sends by this.
    #[must_use]
    pub fn new(exporter: E, recorded: Recorded) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        let scope = InstrumentationScope::builder("concertina").with_version(version).build();
        let origin = recorded.tracer.0.clock.origin();
        Self { recorded, exporter, scope, origin, failing: false }
    }

    /// Sends until told to stop, and then what is left.
    pub async fn run(mut self, mut stop: oneshot::Receiver<()>) {
        let clock = self.recorded.tracer.0.clock;
        let mut stopping = false;
        loop {
            let mut spans = Vec::new();
            let mut full = None;
            while spans.len() < MOST_SPANS {
                tokio::select! {
                    biased;
                    _ = &mut stop, if !stopping => {
                        stopping = true;
                        self.recorded.records.close();
                    }
                    record = self.recorded.records.recv() => match record {
                        Some(record) => {
                            self.frame().spans(record, &mut spans);
                            full.get_or_insert_with(|| clock.to_tokio(clock.now() + DELAY));
                        }
                        None => break,
                    },
                    () = until(full), if !stopping => break,
                }
            }
            if spans.is_empty() {
                return;
            }
            self.send(spans).await;
        }
    }

    fn frame(&self) -> Frame<'_> {
        Frame { origin: self.origin, scope: &self.scope, tracer: &self.recorded.tracer }
    }

    async fn send(&mut self, spans: Vec<SpanData>) {
        let count = spans.len();
        let sent = self.exporter.export(spans).await;
        let inner = &self.recorded.tracer.0;
        inner.room.add_permits(count);
        match &sent {
            Ok(()) => inner.counts.exported.inc_by(count as u64),
            Err(_) => inner.counts.failed.inc_by(count as u64),
        }
        // One line for each change: a collector may be away for long.
        match &sent {
            Err(error) if !self.failing => tracing::warn!(%error, "spans cannot be sent to tracing.endpoint"),
            Ok(()) if self.failing => tracing::info!("spans can be sent again"),
            _ => {}
        }
        self.failing = sent.is_err();
        let origin = inner.clock.origin();
        if origin.abs_diff(self.origin) > DRIFT {
            self.origin = origin;
        }
    }
}

/// Waits until then, or for ever.
async fn until(then: Option<tokio::time::Instant>) {
    match then {
        Some(then) => sleep_until(then).await,
        None => std::future::pending().await,
    }
}
