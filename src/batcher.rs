//! The batcher: the thin loop that feeds the scheduler and carries out what it says, and the handle that HTTP holds.

use crate::model::{InferResponse, ValidRequest};
use crate::scheduler::Rejection;

/// Why an inference has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InferError {
    /// The scheduler did not take it, or gave it up.
    #[error("not served: {0:?}")]
    Rejected(Rejection),
    /// Too many requests are inside the server.
    #[error("too many requests in flight")]
    Overloaded,
    /// The model failed on this request; the text is ONNX Runtime's, fit for the client.
    #[error("{0}")]
    Model(String),
    /// The batcher is gone (the process is ending).
    #[error("the server is shutting down")]
    Closed,
}

/// What HTTP holds: the only way to have a request run.
#[derive(Clone, Debug)]
pub struct Batcher {}

impl Batcher {
    /// Queues a request and waits for its answer. Dropping the future cancels the request.
    ///
    /// # Errors
    /// See [`InferError`].
    pub async fn infer(&self, request: ValidRequest) -> Result<InferResponse, InferError> {
        let _ = request;
        Err(InferError::Closed)
    }
}
