//! Tracing: the spans of requests and batches, on their way to an OpenTelemetry collector (OTLP over gRPC).
//!
//! Nothing is instrumented for it: whoever has the instants for the metrics hands them over as a [`Record`], and what becomes of
//! it happens in a task of its own. A request's span is its trace's only one that a client knows; below it lie its stages (decode,
//! queue, then gather, compute and scatter for each batch that it had rows in, encode). A batch belongs to many requests, so it
//! is a trace of its own that links to the spans of all of them, as their compute spans link to it.
//!
//! While tracing is off there is no [`Tracer`], and that is all that anybody looks at. While it is on, nobody waits for it: what does
//! not fit into `tracing.max_queue_spans` is dropped and counted.

mod context;
mod export;
mod spans;

pub use export::{Exporter, exporter};
pub use opentelemetry::KeyValue;
pub use opentelemetry::trace::SpanContext;

use crate::clock::Clock;
use crate::metrics::{SpanCounts, Stage};
use crate::units::Instant;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanId, SpanKind, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use opentelemetry_sdk::trace::{
    IdGenerator as _, RandomIdGenerator, Sampler as Decider, SamplingDecision, ShouldSample as _,
};
use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};

/// What an answer says of its trace, in the form of `traceparent` (W3C Trace Context, draft of level 2).
pub const TRACE_RESPONSE: HeaderName = HeaderName::from_static(TRACE_RESPONSE_NAME);
/// Its name.
pub const TRACE_RESPONSE_NAME: &str = "traceresponse";
/// The header that names a request's parent.
pub const TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");
/// The header that goes with it.
pub const TRACE_STATE: HeaderName = HeaderName::from_static("tracestate");

/// Whom to believe about what is recorded, in the words of `OTEL_TRACES_SAMPLER`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampler {
    /// Everything.
    AlwaysOn,
    /// Nothing.
    AlwaysOff,
    /// A part of all traces.
    Ratio,
    /// The parent; everything that has none.
    ParentOrOn,
    /// The parent; nothing that has none.
    ParentOrOff,
    /// The parent; a part of the traces that begin here.
    ParentOrRatio,
}

/// How tracing is set.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Where the collector is; `None`: tracing is off.
    pub endpoint: Option<String>,
    /// What the server is called in traces.
    pub service_name: String,
    /// Whom to believe about what is recorded.
    pub sampler: Sampler,
    /// The part of the traces, where it is a part.
    pub ratio: f64,
    /// Spans that may wait for the collector.
    pub max_queue_spans: NonZeroUsize,
}

impl Settings {
    fn decider(&self) -> Decider {
        let parent = |root: Decider| Decider::ParentBased(Box::new(root));
        match self.sampler {
            Sampler::AlwaysOn => Decider::AlwaysOn,
            Sampler::AlwaysOff => Decider::AlwaysOff,
            Sampler::Ratio => Decider::TraceIdRatioBased(self.ratio),
            Sampler::ParentOrOn => parent(Decider::AlwaysOn),
            Sampler::ParentOrOff => parent(Decider::AlwaysOff),
            Sampler::ParentOrRatio => parent(Decider::TraceIdRatioBased(self.ratio)),
        }
    }
}

/// What has happened, of which spans are made.
#[derive(Debug)]
pub enum Record {
    /// A request was answered, or its client has gone.
    Request(Box<Request>),
    /// A stage of a request that is not the batcher's.
    Stage(Stretch),
    /// A request's way through the batcher has ended.
    Way(Box<Way>),
    /// A batch has run.
    Batch(Box<Batch>),
}

/// A request, from its head to its answer.
#[derive(Debug)]
pub struct Request {
    span: SpanContext,
    parent: Option<SpanContext>,
    begun: Instant,
    ended: Instant,
    name: Cow<'static, str>,
    attributes: Vec<KeyValue>,
    failure: Option<&'static str>,
}

/// A stage of a request and when it was.
#[derive(Debug)]
pub struct Stretch {
    of: SpanContext,
    stage: Stage,
    from: Instant,
    to: Instant,
}

/// A request's way through the batcher.
#[derive(Debug)]
pub struct Way {
    of: SpanContext,
    arrived: Instant,
    /// When its first row went to a worker, or it was given up.
    dispatched: Instant,
    runs: Vec<Run>,
}

/// A request's part in a batch.
#[derive(Clone, Debug)]
pub struct Run {
    /// The batch.
    pub batch: SpanContext,
    /// Its stages, as far as it came: when each began and how long it took.
    pub stages: [(Stage, Instant, Duration); 3],
}

impl Run {
    /// What a batch did not come to has no beginning.
    fn begun(&self) -> impl Iterator<Item = (Stage, Instant, Duration)> + '_ {
        self.stages.iter().copied().filter(|(_, begun, _)| *begun > Instant::default())
    }
}

/// A batch, from its dispatch to its end.
#[derive(Debug)]
pub struct Batch {
    /// Its span.
    pub span: SpanContext,
    /// When it was dispatched.
    pub begun: Instant,
    /// When it was taken back.
    pub ended: Instant,
    /// What is said of it.
    pub attributes: Vec<KeyValue>,
    /// The requests that are in it and are recorded.
    pub requests: Vec<SpanContext>,
    /// Why it has no outputs.
    pub failure: Option<&'static str>,
}

impl Record {
    /// How many spans it makes.
    fn spans(&self) -> usize {
        match self {
            Self::Request(_) | Self::Stage(_) | Self::Batch(_) => 1,
            Self::Way(way) => 1 + way.runs.iter().map(|run| run.begun().count()).sum::<usize>(),
        }
    }
}

/// Takes records; cheap to clone.
#[derive(Clone, Debug)]
pub struct Tracer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    clock: Clock,
    ids: RandomIdGenerator,
    decider: Decider,
    /// The spans that may still wait.
    room: Semaphore,
    records: mpsc::Sender<Record>,
    counts: SpanCounts,
}

/// What tracers have recorded, for an [`Exporter`].
#[derive(Debug)]
pub struct Recorded {
    records: mpsc::Receiver<Record>,
    tracer: Tracer,
}

impl Tracer {
    /// A tracer and the other end of its queue.
    #[must_use]
    pub fn new(settings: &Settings, clock: Clock, counts: SpanCounts) -> (Self, Recorded) {
        let most = settings.max_queue_spans.get();
        // No record makes less than one span, so the channel is never full before the room is taken.
        let (sender, records) = mpsc::channel(most);
        let (ids, decider, room) = (RandomIdGenerator::default(), settings.decider(), Semaphore::new(most));
        let tracer = Self(Arc::new(Inner { clock, ids, decider, room, records: sender, counts }));
        (tracer.clone(), Recorded { records, tracer })
    }

    /// The trace of a request that has come with these headers just now.
    #[must_use]
    pub fn begin(&self, headers: &HeaderMap) -> Trace {
        let parent = context::parent(headers);
        let inner = &*self.0;
        let trace_id = parent.as_ref().map_or_else(|| inner.ids.new_trace_id(), SpanContext::trace_id);
        let known = parent.clone().map(|parent| opentelemetry::Context::new().with_remote_span_context(parent));
        let asked = inner.decider.should_sample(known.as_ref(), trace_id, "", &SpanKind::Server, &[], &[]);
        let sampled = asked.decision == SamplingDecision::RecordAndSample;
        let flags = if sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
        let state = parent.as_ref().map(|parent| parent.trace_state().clone()).unwrap_or_default();
        let span = SpanContext::new(trace_id, inner.ids.new_span_id(), flags, false, state);
        Trace(Arc::new(Held { tracer: self.clone(), span, parent, begun: inner.clock.now() }))
    }

    /// The span of a batch: the only one of its trace.
    #[must_use]
    pub fn batch(&self) -> SpanContext {
        let ids = &self.0.ids;
        let (trace, span) = (ids.new_trace_id(), ids.new_span_id());
        SpanContext::new(trace, span, TraceFlags::SAMPLED, false, TraceState::default())
    }

    /// Takes a record, or drops it and counts that: nobody waits here.
    pub fn record(&self, record: Record) {
        let Inner { room, records, counts, .. } = &*self.0;
        let spans = record.spans();
        let permits = u32::try_from(spans).ok().and_then(|spans| room.try_acquire_many(spans).ok());
        let Some(permits) = permits else { return counts.dropped.inc_by(spans as u64) };
        if records.try_send(record).is_ok() {
            // Given back when it has been sent.
            permits.forget();
        } else {
            counts.dropped.inc_by(spans as u64);
        }
    }

    fn span_id(&self) -> SpanId {
        self.0.ids.new_span_id()
    }
}

/// The trace that a request belongs to, and its span; cheap to clone.
#[derive(Clone, Debug)]
pub struct Trace(Arc<Held>);

#[derive(Debug)]
struct Held {
    tracer: Tracer,
    span: SpanContext,
    parent: Option<SpanContext>,
    begun: Instant,
}

impl Trace {
    /// The trace's id.
    #[must_use]
    pub fn id(&self) -> TraceId {
        self.0.span.trace_id()
    }

    /// The request's span.
    #[must_use]
    pub fn span(&self) -> &SpanContext {
        &self.0.span
    }

    /// Whether anything of it is recorded.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.0.span.is_sampled()
    }

    /// What the answer says of it.
    #[must_use]
    pub fn header(&self) -> HeaderValue {
        context::header(&self.0.span)
    }

    /// Records a stage.
    pub fn stage(&self, stage: Stage, from: Instant, to: Instant) {
        if self.is_recorded() {
            self.0.tracer.record(Record::Stage(Stretch { of: self.0.span.clone(), stage, from, to }));
        }
    }

    /// Records the way through the batcher; `dispatched` is when the wait ended.
    pub fn way(&self, arrived: Instant, dispatched: Instant, runs: Vec<Run>) {
        if self.is_recorded() {
            self.0.tracer.record(Record::Way(Box::new(Way { of: self.0.span.clone(), arrived, dispatched, runs })));
        }
    }

    /// Records the request itself, which ends now.
    pub fn end(&self, name: Cow<'static, str>, attributes: Vec<KeyValue>, failure: Option<&'static str>) {
        if self.is_recorded() {
            let (span, parent) = (self.0.span.clone(), self.0.parent.clone());
            let ended = self.0.tracer.0.clock.now();
            let request = Request { span, parent, begun: self.0.begun, ended, name, attributes, failure };
            self.0.tracer.record(Record::Request(Box::new(request)));
        }
    }
}

#[cfg(test)]
mod tests;
