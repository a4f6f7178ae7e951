//! The handle that HTTP holds: one call, one answer.

use super::statistics::Statistics;
use crate::model::{InferResponse, ValidRequest};
use crate::scheduler::Rejection;
use crate::trace::Trace;
use crate::units::{ModelId, RequestId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// Questions for statistics that may be open at a time.
const MAX_QUESTIONS: usize = 16;

/// Why an inference has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InferError {
    /// The scheduler did not take it, or gave it up.
    #[error("not served: {0:?}")]
    Rejected(Rejection),
    /// Too many requests are inside the server.
    #[error("too many requests in flight")]
    Overloaded,
    /// The model failed on this request; the text is ONNX Runtime's.
    #[error("{0}")]
    Model(String),
    /// The batcher is gone (the process is ending).
    #[error("the server is shutting down")]
    Closed,
}

/// The way back to a waiting client.
pub(super) type Reply = oneshot::Sender<Result<InferResponse, InferError>>;

/// What the handle tells the loop.
#[derive(Debug)]
pub(super) enum Message {
    /// A request has come.
    Arrive(Arrival),
    /// Its client has gone.
    Cancel(RequestId),
    /// Somebody wants the statistics of all models.
    Statistics(oneshot::Sender<HashMap<ModelId, Statistics>>),
}

/// A request on its way in.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) id: RequestId,
    pub(super) request: ValidRequest,
    /// The trace that it is recorded in.
    pub(super) trace: Option<Trace>,
    pub(super) ticket: Ticket,
    pub(super) reply: Reply,
}

/// The right to have one request inside the server: it moves with the request and ends when the request is let go.
#[derive(Debug)]
pub struct Ticket {
    _permit: OwnedSemaphorePermit,
}

/// What HTTP holds: the only way to have a request run. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Batcher {
    messages: mpsc::Sender<Message>,
    in_flight: Arc<Semaphore>,
    questions: Arc<Semaphore>,
    next_id: Arc<AtomicU64>,
}

/// A request and its way back, where something else than the scheduler answers: the seam for tests of what lies above.
#[derive(Debug)]
pub struct Job {
    /// The request.
    pub request: ValidRequest,
    /// The answer; closed as soon as nobody waits for it any more.
    pub reply: oneshot::Sender<Result<InferResponse, InferError>>,
    _ticket: Ticket,
}

/// The receiving end of [`Batcher::channel`].
#[derive(Debug)]
pub struct Jobs {
    messages: mpsc::Receiver<Message>,
    /// What is answered to whoever asks for statistics.
    pub statistics: HashMap<ModelId, Statistics>,
}

impl Jobs {
    /// The next request; `None` when every handle is gone.
    pub async fn recv(&mut self) -> Option<Job> {
        loop {
            match self.messages.recv().await? {
                Message::Arrive(Arrival { request, reply, ticket, .. }) => {
                    return Some(Job { request, reply, _ticket: ticket });
                }
                Message::Statistics(answer) => drop(answer.send(self.statistics.clone())),
                Message::Cancel(_) => {}
            }
        }
    }
}

impl Batcher {
    /// A handle whose requests, at most `max_in_flight` at a time, arrive at the other end instead of a scheduler.
    #[must_use]
    pub fn channel(max_in_flight: usize) -> (Self, Jobs) {
        let (handle, messages) = Self::new(max_in_flight);
        (handle, Jobs { messages, statistics: HashMap::new() })
    }

    /// A handle and the receiving end of its channel, for at most `max_in_flight` requests at a time.
    pub(super) fn new(max_in_flight: usize) -> (Self, mpsc::Receiver<Message>) {
        // Each request sends at most two messages, and each has its place reserved before it is admitted.
        let (messages, receiver) = mpsc::channel(2 * max_in_flight + MAX_QUESTIONS);
        let in_flight = Arc::new(Semaphore::new(max_in_flight));
        let questions = Arc::new(Semaphore::new(MAX_QUESTIONS));
        (Self { messages, in_flight, questions, next_id: Arc::new(AtomicU64::new(1)) }, receiver)
    }

    /// Queues a request and waits for its answer. Dropping the future cancels the request.
    ///
    /// # Errors
    /// See [`InferError`].
    pub async fn infer(&self, request: ValidRequest) -> Result<InferResponse, InferError> {
        self.infer_in(request, None).await
    }

    /// As [`Self::infer`]; the way is recorded in a trace.
    ///
    /// # Errors
    /// See [`InferError`].
    pub async fn infer_in(&self, request: ValidRequest, trace: Option<Trace>) -> Result<InferResponse, InferError> {
        let trace = trace.filter(Trace::is_recorded);
        let permit = Arc::clone(&self.in_flight).try_acquire_owned().map_err(|_| InferError::Overloaded)?;
        let reserve = || self.messages.clone().try_reserve_owned();
        let full = |error: mpsc::error::TrySendError<_>| match error {
            mpsc::error::TrySendError::Full(_) => InferError::Overloaded,
            mpsc::error::TrySendError::Closed(_) => InferError::Closed,
        };
        let arrive = reserve().map_err(full)?;
        let cancel = reserve().map_err(full)?;
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let (reply, answer) = oneshot::channel();
        arrive.send(Message::Arrive(Arrival { id, request, trace, ticket: Ticket { _permit: permit }, reply }));
        let mut guard = CancelOnDrop { id, place: Some(cancel) };
        let answer = answer.await;
        guard.place = None;
        answer.unwrap_or(Err(InferError::Closed))
    }
}

impl Batcher {
    /// The statistics of every model that is loaded, old versions that still finish their requests included.
    ///
    /// # Errors
    /// [`InferError::Closed`] if the batcher is gone.
    pub async fn statistics(&self) -> Result<HashMap<ModelId, Statistics>, InferError> {
        let (reply, answer) = oneshot::channel();
        // The permit keeps the places of requests free of questions.
        let _permit = self.questions.acquire().await.map_err(|_| InferError::Closed)?;
        self.messages.send(Message::Statistics(reply)).await.map_err(|_| InferError::Closed)?;
        answer.await.map_err(|_| InferError::Closed)
    }
}

/// Tells the loop that a client has gone, unless it has had its answer.
struct CancelOnDrop {
    id: RequestId,
    place: Option<mpsc::OwnedPermit<Message>>,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            place.send(Message::Cancel(self.id));
        }
    }
}
