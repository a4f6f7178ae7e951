//! The batcher: the thin loop that feeds the scheduler and carries out what it says, and the handle that HTTP holds.

use crate::model::{InferResponse, ValidRequest};
use tokio::sync::{mpsc, oneshot};

pub use crate::scheduler::Rejection;

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

/// One request on its way to the batcher, and where its answer goes.
#[derive(Debug)]
pub struct Job {
    /// The request.
    pub request: ValidRequest,
    /// The answer; closed as soon as nobody waits for it any more.
    pub reply: oneshot::Sender<Result<InferResponse, InferError>>,
}

/// What HTTP holds: the only way to have a request run.
#[derive(Clone, Debug)]
pub struct Batcher {
    jobs: mpsc::Sender<Job>,
}

impl Batcher {
    /// A handle, and the end at which its requests arrive; at most `capacity` of them wait between the two.
    #[must_use]
    pub fn channel(capacity: usize) -> (Self, mpsc::Receiver<Job>) {
        let (jobs, arrivals) = mpsc::channel(capacity);
        (Self { jobs }, arrivals)
    }

    /// Queues a request and waits for its answer. Dropping the future cancels the request.
    ///
    /// # Errors
    /// See [`InferError`].
    pub async fn infer(&self, request: ValidRequest) -> Result<InferResponse, InferError> {
        let (reply, answer) = oneshot::channel();
        self.jobs.try_send(Job { request, reply }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => InferError::Overloaded,
            mpsc::error::TrySendError::Closed(_) => InferError::Closed,
        })?;
        answer.await.unwrap_or(Err(InferError::Closed))
    }
}
