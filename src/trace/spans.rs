//! Records as spans. Pure: what a span is called, what it belongs to and when it was.

use super::{Batch, Record, Request, Stretch, Tracer, Way};
use crate::metrics::Stage;
use crate::units::Instant;
use opentelemetry::InstrumentationScope;
use opentelemetry::trace::{Link, SpanContext, SpanId, SpanKind, Status, TraceFlags};
use opentelemetry_sdk::trace::{SpanData, SpanLinks};
use std::time::{Duration, SystemTime};

/// Links of one batch; requests beyond that are only counted.
const MOST_LINKS: usize = 1024;

/// What spans have in common.
pub(super) struct Frame<'a> {
    /// The date of the instant zero, since 1970.
    pub(super) origin: Duration,
    pub(super) scope: &'a InstrumentationScope,
    /// Makes ids for spans that nobody knows yet.
    pub(super) tracer: &'a Tracer,
}

impl Frame<'_> {
    /// The spans of a record.
    pub(super) fn spans(&self, record: Record, out: &mut Vec<SpanData>) {
        match record {
            Record::Request(request) => out.push(self.request(*request)),
            Record::Stage(Stretch { of, stage, from, to }) => out.push(self.stage(&of, stage, (from, to))),
            Record::Way(way) => self.way(*way, out),
            Record::Batch(batch) => out.push(self.batch(*batch)),
        }
    }

    fn request(&self, request: Request) -> SpanData {
        let Request { span, parent, begun, ended, name, attributes, failure } = request;
        let parent_span_id = parent.as_ref().map_or(SpanId::INVALID, SpanContext::span_id);
        SpanData {
            parent_span_id,
            parent_span_is_remote: parent.is_some(),
            span_kind: SpanKind::Server,
            name,
            attributes,
            status: status(failure),
            ..self.blank(span, (begun, ended))
        }
    }

    /// A span below that of a request.
    fn stage(&self, of: &SpanContext, stage: Stage, (from, to): (Instant, Instant)) -> SpanData {
        let state = of.trace_state().clone();
        let span = SpanContext::new(of.trace_id(), self.tracer.span_id(), TraceFlags::SAMPLED, false, state);
        SpanData { parent_span_id: of.span_id(), name: stage.name().into(), ..self.blank(span, (from, to)) }
    }

    fn way(&self, Way { of, arrived, dispatched, runs }: Way, out: &mut Vec<SpanData>) {
        out.push(self.stage(&of, Stage::Queue, (arrived, dispatched)));
        for run in runs {
            for (stage, begun, took) in run.begun() {
                let mut span = self.stage(&of, stage, (begun, begun + took));
                if stage == Stage::Compute {
                    span.links.links.push(Link::with_context(run.batch.clone()));
                }
                out.push(span);
            }
        }
    }

    fn batch(&self, batch: Batch) -> SpanData {
        let Batch { span, begun, ended, attributes, requests, failure } = batch;
        let mut links = SpanLinks::default();
        links.dropped_count = u32::try_from(requests.len().saturating_sub(MOST_LINKS)).unwrap_or(u32::MAX);
        links.links = requests.into_iter().take(MOST_LINKS).map(Link::with_context).collect();
        SpanData {
            name: "batch".into(),
            attributes,
            links,
            status: status(failure),
            ..self.blank(span, (begun, ended))
        }
    }

    fn blank(&self, span_context: SpanContext, (from, to): (Instant, Instant)) -> SpanData {
        let date = |at: Instant| SystemTime::UNIX_EPOCH + self.origin + Duration::from_nanos(at.0);
        SpanData {
            span_context,
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: "".into(),
            start_time: date(from),
            end_time: date(to.max(from)),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: Default::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        }
    }
}

fn status(failure: Option<&'static str>) -> Status {
    failure.map_or(Status::Unset, Status::error)
}
