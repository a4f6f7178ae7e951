//! What the loop records of requests that are in a trace. Where none is, it looks at one option and is done.

use super::pending::Pending;
use super::run::{Flight, Loop};
use crate::metrics::{Stage, limit_name};
use crate::runtime::batch::Stages;
use crate::runtime::{Completion, RunError};
use crate::trace::{Batch, KeyValue, Record, Run};
use crate::units::Instant;

impl Loop {
    /// Records a batch that has run if one of its requests is recorded, and remembers it with all of those.
    pub(super) fn trace_batch(&mut self, flight: &Flight, completion: &Completion) {
        let Some(tracer) = &self.tracer else { return };
        let (mut requests, mut span) = (Vec::new(), None);
        let mut last = None;
        for part in &flight.dispatch.parts {
            // Parts of one request stand together.
            if last.replace(part.request) == Some(part.request) {
                continue;
            }
            let Some(pending) = self.pending.get_mut(part.request) else { continue };
            let Some(trace) = &pending.trace else { continue };
            let batch = span.get_or_insert_with(|| tracer.batch());
            pending.runs.push(Run { batch: batch.clone(), stages: stages(completion.stages) });
            requests.push(trace.span().clone());
        }
        let Some(span) = span else { return };
        let failure = completion.result.as_ref().err().map(|error| match error {
            RunError::OutOfMemory { .. } => "out_of_memory",
            RunError::Model(_) => "failed",
            RunError::Lost(_) => "instance_lost",
        });
        let (begun, ended) = (flight.begun, self.clock.now());
        let attributes = self.attributes(flight, completion);
        tracer.record(Record::Batch(Box::new(Batch { span, begun, ended, attributes, requests, failure })));
    }

    fn attributes(&self, flight: &Flight, completion: &Completion) -> Vec<KeyValue> {
        let dispatch = &flight.dispatch;
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let mut attributes = vec![
            KeyValue::new("concertina.batch.rows", i64::from(dispatch.rows)),
            KeyValue::new("concertina.batch.padded_rows", i64::from(dispatch.padded_rows)),
            KeyValue::new("concertina.batch.limited_by", limit_name(dispatch.limited_by)),
            KeyValue::new("concertina.batch.predicted_bytes", signed(dispatch.bytes.0)),
            KeyValue::new("concertina.batch.bytes", signed(completion.bytes.0)),
            KeyValue::new("concertina.instance", i64::from(dispatch.instance.0)),
        ];
        if let Some(model) = self.models.get(&flight.model) {
            attributes.push(KeyValue::new("concertina.model.name", model.spec.name.clone()));
            attributes.push(KeyValue::new("concertina.model.version", signed(model.spec.version)));
        }
        attributes
    }
}

impl Pending {
    /// Records the way of a request that ends now.
    pub(super) fn trace_way(&mut self, now: Instant) {
        if let Some(trace) = &self.trace {
            trace.way(self.arrived, self.dispatched.unwrap_or(now), std::mem::take(&mut self.runs));
        }
    }
}

fn stages(Stages { gather, compute, scatter, begun, .. }: Stages) -> [(Stage, Instant, std::time::Duration); 3] {
    [(Stage::Gather, begun[0], gather), (Stage::Compute, begun[1], compute), (Stage::Scatter, begun[2], scatter)]
}
