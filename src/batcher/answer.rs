//! The way back of a request: rows are collected, and what comes of it is said and counted.

use super::handle::InferError;
use super::run::Loop;
use crate::metrics::RequestTimes;
use crate::runtime::batch::Stages;
use crate::scheduler::{Part, Rejection};
use crate::units::RequestId;

impl Loop {
    pub(super) fn deliver(&mut self, parts: &[Part], outputs: Vec<Vec<crate::tensor::Tensor>>, stages: Stages) {
        for (part, outputs) in parts.iter().zip(outputs) {
            if let Some(pending) = self.pending.get_mut(part.request) {
                pending.add(part.start, outputs, stages);
            }
        }
    }

    pub(super) fn remember_fault(&mut self, parts: &[Part], text: &str) {
        for part in parts {
            if let Some(pending) = self.pending.get_mut(part.request) {
                pending.fault = Some(text.to_owned());
            }
        }
    }

    pub(super) fn finish(&mut self, id: RequestId) {
        let mut pending = self.pending.remove(id).expect("the scheduler finishes only what is pending");
        self.count_answer(&mut pending);
        let times = RequestTimes {
            total: self.clock.now().since(pending.arrived),
            queue: pending.dispatched.unwrap_or(pending.arrived).since(pending.arrived),
            batches: pending.batches,
        };
        if let Some(model) = self.models.get(&pending.request.model.id) {
            model.metrics.triton.succeeded(pending.request.rows, times);
        }
        if let Err(error) = pending.finish() {
            tracing::error!(request = %id, %error, "the parts of an answer do not fit together");
        }
    }

    pub(super) fn reject(&mut self, id: RequestId, rejection: Rejection) {
        let mut pending = self.pending.remove(id).expect("the scheduler rejects only what is pending");
        self.count_failure(&mut pending);
        if let Some(model) = self.models.get(&pending.request.model.id) {
            model.metrics.rejected(&rejection);
        }
        let error = match (rejection, &pending.fault) {
            (Rejection::Failed, Some(text)) => InferError::Model(text.clone()),
            (rejection, _) => InferError::Rejected(rejection),
        };
        pending.fail(error);
    }
}
