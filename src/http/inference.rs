//! What every protocol does with a request between reading it and writing its answer.

use super::error::ApiError;
use super::path::ModelPath;
use super::{AppState, Outcome};
use crate::metrics::Stage;
use crate::model::{InferRequest, InferResponse, ModelSpec, OutputTensor, ValidRequest, classify};
use crate::units::Instant;
use std::sync::Arc;

/// An output with more elements is ranked beside the threads that serve all connections.
const RANKED_HERE: usize = 16 << 10;

/// An inference whose model is known: from now on it is counted under the model's name.
pub(crate) struct Inference<'a> {
    state: &'a AppState,
    outcome: &'a mut Outcome,
    /// The model that is asked.
    pub(crate) model: Arc<ModelSpec>,
    /// When the present stage began.
    begun: Instant,
}

impl<'a> Inference<'a> {
    /// To be called before the request is read.
    pub(crate) fn of(state: &'a AppState, path: &ModelPath, outcome: &'a mut Outcome) -> Result<Self, ApiError> {
        let model = path.ready(state)?;
        outcome.model = Some(Arc::clone(&model));
        Ok(Self { state, outcome, model, begun: state.clock.now() })
    }

    /// Runs what has been read. `classes` says of each output of the request how many of its largest elements are wanted in its
    /// place, 0 being the tensor; of those that it leaves out the tensor is.
    pub(crate) async fn run(&mut self, request: InferRequest, classes: &[u64]) -> Result<InferResponse, ApiError> {
        let Self { state, model, .. } = self;
        let request = ValidRequest::new(Arc::clone(model), request, state.limits.request_rows)?;
        for (&output, _) in request.outputs.iter().zip(classes).filter(|(_, most)| **most > 0) {
            classify::check(&model.outputs[output])?;
        }
        self.outcome.rows = request.rows;
        (state.offered)(model, request.rows);
        let read = state.clock.now();
        (state.spent)(model, Stage::Decode, read.since(self.begun));
        let trace = self.outcome.trace.clone();
        if let Some(trace) = &trace {
            trace.stage(Stage::Decode, self.begun, read);
        }
        let mut answer = state.batcher.infer_in(request, trace).await?;
        self.begun = state.clock.now();
        for (output, &most) in answer.outputs.iter_mut().zip(classes).filter(|(_, most)| **most > 0) {
            rank(model, output, most).await?;
        }
        Ok(answer)
    }

    /// To be called when the answer is written.
    pub(crate) fn written(self) {
        let Self { state, model, begun, outcome } = self;
        let written = state.clock.now();
        (state.spent)(&model, Stage::Encode, written.since(begun));
        if let Some(trace) = &outcome.trace {
            trace.stage(Stage::Encode, begun, written);
        }
    }
}

/// Puts the largest elements of an output in its place. A client that goes meanwhile leaves no more behind than that.
async fn rank(model: &Arc<ModelSpec>, output: &mut OutputTensor, most: u64) -> Result<(), ApiError> {
    let index = output.index;
    output.tensor = if crate::tensor::element_count(&output.tensor.shape).is_some_and(|count| count <= RANKED_HERE) {
        classify::classify(model, index, &output.tensor, most)?
    } else {
        let (model, tensor) = (Arc::clone(model), output.tensor.clone());
        let ranked = tokio::task::spawn_blocking(move || classify::classify(&model, index, &tensor, most)).await;
        ranked.map_err(|_| ApiError::Internal)??
    };
    Ok(())
}
