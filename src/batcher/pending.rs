//! Requests inside the server: their tensors, the parts of their answers, and the way back.

use super::handle::{Arrival, InferError, Reply, Ticket};
use crate::model::{InferResponse, OutputTensor, ValidRequest};
use crate::runtime::batch::Stages;
use crate::scheduler::Rejection;
use crate::tensor::Tensor;
use crate::tensor::rows::{self, ConcatError};
use crate::trace::{Run, Trace};
use crate::units::{Instant, RequestId, Rows};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// When to come back if there was no memory for an answer of several parts.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// One request that has no answer yet.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) request: Arc<ValidRequest>,
    pub(super) arrived: Instant,
    /// When its first row went to a worker.
    pub(super) dispatched: Option<Instant>,
    /// What the model said when a batch with this request failed.
    pub(super) fault: Option<String>,
    /// Gathering, computing and scattering, of all batches that it had rows in.
    pub(super) batches: [Duration; 3],
    /// The trace that it is recorded in.
    pub(super) trace: Option<Trace>,
    /// Its parts in batches, if it is recorded.
    pub(super) runs: Vec<Run>,
    parts: Vec<(Rows, Vec<Tensor>)>,
    reply: Reply,
    _ticket: Ticket,
}

impl Pending {
    /// Adds the outputs of the rows that begin at `start`, from a batch that took so long.
    pub(super) fn add(&mut self, start: Rows, outputs: Vec<Tensor>, stages: Stages) {
        let Stages { gather, compute, scatter, .. } = stages;
        self.batches.iter_mut().zip([gather, compute, scatter]).for_each(|(sum, time)| *sum += time);
        self.parts.push((start, outputs));
    }

    /// Sends the answer: all parts are there. Returns what was sent, for the metrics.
    pub(super) fn finish(mut self) -> Result<(), InferError> {
        self.parts.sort_by_key(|(start, _)| *start);
        let answer = join(&self.request, std::mem::take(&mut self.parts));
        let outcome = answer.as_ref().map(|_| ()).map_err(Clone::clone);
        // A client that has gone meanwhile does not want it any more.
        let _ = self.reply.send(answer);
        outcome
    }

    /// Sends the reason why there is no answer.
    pub(super) fn fail(self, error: InferError) {
        let _ = self.reply.send(Err(error));
    }
}

fn join(request: &ValidRequest, parts: Vec<(Rows, Vec<Tensor>)>) -> Result<InferResponse, InferError> {
    let mut columns: Vec<Vec<Tensor>> = request.outputs.iter().map(|_| Vec::with_capacity(parts.len())).collect();
    for (_, outputs) in parts {
        columns.iter_mut().zip(outputs).for_each(|(column, tensor)| column.push(tensor));
    }
    let axis = request.model.batch_axis;
    let outputs = request.outputs.iter().zip(columns).map(|(&index, column)| {
        rows::concat(column, axis).map(|tensor| OutputTensor { index, tensor }).map_err(|error| match error {
            ConcatError::Differ(text) => {
                InferError::Model(format!("output '{}': {text}", request.model.outputs[index].name))
            }
            ConcatError::NoMemory { .. } => {
                InferError::Rejected(Rejection::MemoryExhausted { retry_after: RETRY_AFTER })
            }
        })
    });
    Ok(InferResponse { outputs: outputs.collect::<Result<_, _>>()? })
}

/// All requests inside the server.
#[derive(Debug, Default)]
pub(super) struct PendingTable {
    by_id: HashMap<RequestId, Pending>,
}

impl PendingTable {
    pub(super) fn insert(&mut self, arrival: Arrival, now: Instant) {
        let Arrival { id, request, trace, ticket, reply } = arrival;
        let pending = Pending {
            request: Arc::new(request),
            arrived: now,
            dispatched: None,
            fault: None,
            batches: Default::default(),
            trace,
            runs: Vec::new(),
            parts: Vec::new(),
            reply,
            _ticket: ticket,
        };
        self.by_id.insert(id, pending);
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut Pending> {
        self.by_id.get_mut(&id)
    }

    pub(super) fn remove(&mut self, id: RequestId) -> Option<Pending> {
        self.by_id.remove(&id)
    }

    /// Everything, in order of arrival.
    pub(super) fn take(&mut self) -> Vec<(RequestId, Pending)> {
        let mut all: Vec<_> = self.by_id.drain().collect();
        all.sort_by_key(|(id, _)| *id);
        all
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }
}
