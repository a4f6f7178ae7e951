//! One inference, and a stream of them.

use super::proto::grpc_inference_service_server::SERVICE_NAME;
use super::proto::infer_parameter::ParameterChoice;
use super::proto::model_infer_response::InferOutputTensor;
use super::proto::{InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use super::status::status;
use super::{Grpc, decode, path};
use crate::batcher::{InferError, Rejection};
use crate::http::{ApiError, Inference, Outcome, Room, Traced};
use crate::model::{InferResponse, ModelSpec};
use axum::http::HeaderMap;
use futures_util::stream::{BoxStream, StreamExt as _};
use prost::Message as _;
use std::sync::Arc;
use std::time::Duration;
use tonic::{Code, Status, Streaming};

/// Whether an answer is the last one to its request; in a stream, clients of models with several answers look for it.
const FINAL: &str = "triton_final_response";

/// A request that counts among the bodies from now on, until it is answered. To be made of a message in the moment in which it
/// comes: what was arriving has counted until then.
pub(super) struct Taken {
    message: ModelInferRequest,
    room: Result<Room, ApiError>,
}

impl Taken {
    pub(super) fn new(grpc: &Grpc, message: ModelInferRequest) -> Self {
        let room = grpc.state.bodies.admit(message.encoded_len() as u64);
        Self { message, room }
    }
}

/// The span of a request by this method, whose call has come with these headers; `None`: nobody records it.
pub(super) fn traced(grpc: &Grpc, headers: &HeaderMap, method: &'static str) -> Option<Traced> {
    let tracer = grpc.state.tracer.as_ref()?;
    let trace = tracer.begin(headers);
    tracing::Span::current().record("trace_id", tracing::field::display(trace.id()));
    Some(Traced::call(trace, SERVICE_NAME, method))
}

/// Answers one request and counts it. `budget` is how long the client waits at all.
pub(super) async fn infer(
    grpc: &Grpc,
    request: Taken,
    budget: Option<Duration>,
    traced: Option<Traced>,
) -> Result<ModelInferResponse, ApiError> {
    let ended = (grpc.begins)();
    let trace = traced.as_ref().map(|traced| traced.trace().clone());
    let mut outcome = Outcome { trace, ..Outcome::default() };
    let answer = answer(grpc, request, budget, &mut outcome);
    let result = match budget {
        None => answer.await,
        Some(budget) => tokio::time::timeout(budget, answer)
            .await
            .unwrap_or(Err(InferError::Rejected(Rejection::DeadlineExceeded).into())),
    };
    outcome.failure = result.as_ref().err().map(ApiError::code);
    ended(&outcome);
    if let Some(traced) = traced {
        let code = result.as_ref().err().map_or(Code::Ok, |error| status(error).code());
        traced.called(&outcome, code);
    }
    result
}

async fn answer(
    grpc: &Grpc,
    Taken { mut message, room }: Taken,
    budget: Option<Duration>,
    outcome: &mut Outcome,
) -> Result<ModelInferResponse, ApiError> {
    let state = &grpc.state;
    let mut room = room?;
    let path = path(std::mem::take(&mut message.model_name), &message.model_version)?;
    let mut inference = Inference::of(state, &path, outcome)?;
    let (mut request, classes) = decode::request(message, budget, |bytes| room.grow(bytes))?;
    let id = std::mem::take(&mut request.id);
    let answer = inference.run(request, &classes).await?;
    let response = encode(&inference.model, id, answer);
    inference.written();
    response
}

/// The answer with raw contents, as Triton sends it whatever the form of the request.
fn encode(model: &ModelSpec, id: String, answer: InferResponse) -> Result<ModelInferResponse, ApiError> {
    let mut response = ModelInferResponse {
        model_name: model.name.clone(),
        model_version: model.version.to_string(),
        id,
        ..ModelInferResponse::default()
    };
    for output in answer.outputs {
        let name = model.outputs.get(output.index).map(|spec| spec.name.clone()).ok_or(ApiError::Internal)?;
        let tensor = output.tensor;
        let shape = tensor.shape.iter().map(|&size| i64::try_from(size));
        response.outputs.push(InferOutputTensor {
            name,
            datatype: tensor.datatype.name().to_owned(),
            shape: shape.collect::<Result<_, _>>().map_err(|_| ApiError::Internal)?,
            ..InferOutputTensor::default()
        });
        response.raw_output_contents.push(tensor.data.to_contiguous());
    }
    Ok(response)
}

/// Answers the requests of a stream in their order, some of them at a time. What is wrong with one of them is said in its
/// place, and the stream goes on; only what makes the stream itself unreadable ends it.
pub(super) fn stream(
    grpc: Arc<Grpc>,
    headers: HeaderMap,
    requests: Streaming<ModelInferRequest>,
) -> BoxStream<'static, Result<ModelStreamInferResponse, Status>> {
    let at_once = grpc.stream_requests.get();
    requests
        .map(move |message| {
            let grpc = Arc::clone(&grpc);
            let id = message.as_ref().map(|message| message.id.clone()).unwrap_or_default();
            let request =
                message.map(|message| (Taken::new(&grpc, message), traced(&grpc, &headers, "ModelStreamInfer")));
            async move {
                let (request, traced) = request?;
                Ok(in_place(&grpc, request, traced, id).await)
            }
        })
        .buffered(at_once)
        .boxed()
}

async fn in_place(grpc: &Grpc, request: Taken, traced: Option<Traced>, id: String) -> ModelStreamInferResponse {
    let (mut response, error_message) = match infer(grpc, request, None, traced).await {
        Ok(response) => (response, String::new()),
        Err(error) => {
            let words = status(&error).message().to_owned();
            (ModelInferResponse { id, ..ModelInferResponse::default() }, words)
        }
    };
    let last = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
    response.parameters.insert(FINAL.to_owned(), last);
    ModelStreamInferResponse { error_message, infer_response: Some(response) }
}
