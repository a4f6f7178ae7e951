//! gRPC through its router, without a socket: what calls answer, refuse and leave behind.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod calls;
mod limits;
#[path = "../api/support.rs"]
#[allow(dead_code, reason = "the tests of HTTP use the rest")]
mod support;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Version};
use concertina::batcher::Jobs;
use concertina::grpc::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use concertina::grpc::proto::model_infer_request::InferInputTensor;
use concertina::grpc::proto::{InferParameter, ModelInferRequest, infer_parameter::ParameterChoice};
use concertina::grpc::{Grpc, router};
use concertina::http::{AppState, Code, Outcome};
use concertina::model::{ModelSpec, ModelState, Table};
use concertina::tensor::DataType;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use support::{Answer, Assembled, echo, give_back, state, tensor};
use tower::ServiceExt as _;
use tower::util::BoxCloneSyncService;

type Service = BoxCloneSyncService<Request<tonic::body::Body>, axum::response::Response, std::convert::Infallible>;
pub(crate) type Client = GrpcInferenceServiceClient<Service>;

/// A server without a socket.
pub(crate) struct Calls {
    pub(crate) router: Router,
    pub(crate) server: Assembled,
    /// How each inference ended, in order.
    pub(crate) outcomes: Arc<Mutex<Vec<Outcome>>>,
}

/// A server, whose requests arrive at the other end.
pub(crate) fn calls(specs: Vec<ModelSpec>, capacity: usize) -> (Calls, Jobs) {
    calls_with(specs, capacity, |_| {})
}

/// The same, with this change to what the services need.
pub(crate) fn calls_with(specs: Vec<ModelSpec>, capacity: usize, change: impl FnOnce(&mut AppState)) -> (Calls, Jobs) {
    let (mut state, server, jobs) = state(specs, capacity, None);
    change(&mut state);
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&outcomes);
    let begins = move || -> concertina::grpc::Ended {
        let seen = Arc::clone(&seen);
        Box::new(move |outcome| seen.lock().unwrap().push(outcome.clone()))
    };
    let stream_requests = NonZeroUsize::new(4).unwrap();
    let router = router(Grpc { state: Arc::new(state), stream_requests, begins: Box::new(begins) });
    (Calls { router, server, outcomes }, jobs)
}

/// A server with model `m`, whose requests are answered by `answer`.
pub(crate) fn answering(datatype: DataType, answer: Answer) -> Calls {
    let (calls, mut jobs) = calls(vec![echo("m", vec![tensor("x", datatype)])], 16);
    tokio::spawn(async move {
        while let Some(job) = jobs.recv().await {
            let _gone = job.reply.send(answer(&job.request));
        }
    });
    calls
}

impl Calls {
    pub(crate) fn service(&self) -> Service {
        let router = self.router.clone().map_request(|request: Request<tonic::body::Body>| {
            let (mut parts, body) = request.into_parts();
            // A client speaks in a version only once it has a connection.
            parts.version = Version::HTTP_2;
            Request::from_parts(parts, Body::new(body))
        });
        BoxCloneSyncService::new(router)
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.service())
    }

    pub(crate) fn failures(&self) -> Vec<Option<Code>> {
        self.outcomes.lock().unwrap().iter().map(|outcome| outcome.failure).collect()
    }
}

/// A request to model `m` whose input has these raw bytes.
pub(crate) fn raw(datatype: DataType, shape: &[i64], bytes: &[u8]) -> ModelInferRequest {
    let input = InferInputTensor {
        name: "x".to_owned(),
        datatype: datatype.name().to_owned(),
        shape: shape.to_vec(),
        ..InferInputTensor::default()
    };
    ModelInferRequest {
        model_name: "m".to_owned(),
        inputs: vec![input],
        raw_input_contents: vec![bytes.to_vec().into()],
        ..ModelInferRequest::default()
    }
}

pub(crate) fn parameter(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}

/// Puts another state in place of that of version 1 of model `m`.
pub(crate) fn set_state(calls: &Calls, state: ModelState) {
    let mut table = Table::clone(&calls.server.models.load());
    table.models.get_mut("m").unwrap().insert(1, state);
    calls.server.models.store(Arc::new(table));
}

pub(crate) fn echo_calls(datatype: DataType) -> Calls {
    answering(datatype, give_back)
}
