//! gRPC: the inference service, health and reflection, as another skin over what the HTTP routes use.
//!
//! A call passes `edge` (who may, span, panic to INTERNAL), its messages are put together by `intake` within limits (`bounds`), then
//! its method here. Of an inference,
//! `decode` makes an [`InferRequest`](crate::model::InferRequest) of the message, with typed contents read by `contents`; from
//! there its way is that of HTTP. Failures are the same, and `status` gives each its gRPC code. What the routes answer as JSON is
//! answered here from that JSON, so that both always say the same.
//!
//! The services are served by the accept loop of HTTP, on a port of their own.

mod bounds;
mod contents;
mod decode;
mod edge;
mod health;
mod infer;
mod intake;
mod logging;
pub mod proto;
mod repository;
mod status;

pub use contents::Contents;

use crate::http::{self, ApiError, AppState, ModelPath, Outcome, SHARED_MEMORY};
use crate::trace::{TRACE_RESPONSE_NAME, Trace};
use axum::Router;
use axum::http::HeaderMap;
use futures_util::stream::BoxStream;
use infer::Taken;
use proto::grpc_inference_service_server::{GrpcInferenceService, GrpcInferenceServiceServer};
use proto::*;
use serde::de::DeserializeOwned;
use serde_json::Value;
use status::status;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use tonic::codec::CompressionEncoding;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::pb::health_server::HealthServer;

/// To be called with the outcome of an inference when it ends; dropped if its client has gone.
pub type Ended = Box<dyn FnOnce(&Outcome) + Send>;

/// Everything that the services need.
pub struct Grpc {
    /// What the HTTP routes need, too.
    pub state: Arc<AppState>,
    /// How many requests of one stream run at a time; more are not read before.
    pub stream_requests: NonZeroUsize,
    /// Called at the start of each inference.
    pub begins: Box<dyn Fn() -> Ended + Send + Sync>,
}

impl fmt::Debug for Grpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grpc").field("state", &self.state).finish_non_exhaustive()
    }
}

/// The router with all services.
///
/// # Panics
/// If the descriptors that were generated with the services cannot be read.
pub fn router(grpc: Grpc) -> Router {
    let grpc = Arc::new(grpc);
    let inference = GrpcInferenceServiceServer::new(Service(Arc::clone(&grpc)))
        .max_decoding_message_size(grpc.state.limits.body_bytes)
        .max_encoding_message_size(usize::MAX)
        // Answers are not compressed: every client says that it can read that, and tensors of floats hardly shrink.
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate);
    let health = HealthServer::new(health::Checks(Arc::clone(&grpc)));
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    Router::new()
        .route_service("/inference.GRPCInferenceService/{method}", inference)
        .route_service("/grpc.health.v1.Health/{method}", health)
        .route_service("/grpc.reflection.v1.ServerReflection/{method}", reflection().build_v1().expect("descriptors"))
        .route_service(
            "/grpc.reflection.v1alpha.ServerReflection/{method}",
            reflection().build_v1alpha().expect("descriptors"),
        )
        .fallback(async || edge::failed(&ApiError::Unsupported("this service")))
        .layer(axum::middleware::from_fn_with_state(grpc, edge::edge))
}

/// The model that a message names; no version is the newest one.
fn path(model: String, version: &str) -> Result<ModelPath, ApiError> {
    if model.is_empty() {
        return Err(ApiError::invalid("the name of the model is missing; add it"));
    }
    let version = match version {
        "" => None,
        digits => Some(http::version(digits).map_err(|_| {
            ApiError::invalid(format!("the version must be decimal digits or nothing; '{digits}' is not"))
        })?),
    };
    Ok(ModelPath { model, version })
}

/// A message from the JSON that HTTP answers with.
fn message<T: DeserializeOwned>(json: Value) -> Result<Response<T>, Status> {
    let message = serde_json::from_value(json).map_err(|error| {
        tracing::error!(%error, "an answer does not fit its message");
        status(&ApiError::Internal)
    });
    message.map(Response::new)
}

fn refused<T>(error: &ApiError) -> Result<Response<T>, Status> {
    Err(status(error))
}

/// An answer that says which trace it is in, as the log does.
fn with_trace<T>(mut answer: Result<Response<T>, Status>, trace: &Trace) -> Result<Response<T>, Status> {
    let metadata = match &mut answer {
        Ok(response) => response.metadata_mut(),
        Err(status) => status.metadata_mut(),
    };
    if let Ok(value) = trace.header().as_bytes().try_into() {
        metadata.insert(TRACE_RESPONSE_NAME, value);
    }
    answer
}

/// The inference service.
struct Service(Arc<Grpc>);

/// Nothing is registered, so nothing is found by its name.
fn no_region(name: String) -> Result<(), Status> {
    if name.is_empty() { Ok(()) } else { Err(status(&ApiError::SharedMemory(name))) }
}

#[tonic::async_trait]
impl GrpcInferenceService for Service {
    async fn server_live(&self, _: Request<ServerLiveRequest>) -> Result<Response<ServerLiveResponse>, Status> {
        Ok(Response::new(ServerLiveResponse { live: true }))
    }

    async fn server_ready(&self, _: Request<ServerReadyRequest>) -> Result<Response<ServerReadyResponse>, Status> {
        Ok(Response::new(ServerReadyResponse { ready: http::not_ready(&self.0.state).is_none() }))
    }

    async fn model_ready(&self, request: Request<ModelReadyRequest>) -> Result<Response<ModelReadyResponse>, Status> {
        let ModelReadyRequest { name, version } = request.into_inner();
        match path(name, &version).and_then(|path| path.ready(&self.0.state)) {
            Ok(_) => Ok(Response::new(ModelReadyResponse { ready: true })),
            Err(ApiError::ModelNotReady { .. }) => Ok(Response::new(ModelReadyResponse { ready: false })),
            Err(error) => refused(&error),
        }
    }

    async fn server_metadata(
        &self,
        _: Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        message(http::server_metadata())
    }

    async fn model_metadata(
        &self,
        request: Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        let ModelMetadataRequest { name, version } = request.into_inner();
        let metadata = path(name, &version).and_then(|path| http::model_metadata(&self.0.state, &path));
        message(metadata.map_err(|error| status(&error))?)
    }

    async fn model_infer(&self, request: Request<ModelInferRequest>) -> Result<Response<ModelInferResponse>, Status> {
        let budget = request.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok());
        let budget = decode::budget(budget);
        let traced = infer::traced(&self.0, request.metadata().as_ref(), "ModelInfer");
        let said = traced.as_ref().map(|traced| traced.trace().clone());
        let answer = infer::infer(&self.0, Taken::new(&self.0, request.into_inner()), budget, traced).await;
        let answer = answer.map(Response::new).map_err(|error| status(&error));
        match said {
            Some(trace) => with_trace(answer, &trace),
            None => answer,
        }
    }

    type ModelStreamInferStream = BoxStream<'static, Result<ModelStreamInferResponse, Status>>;

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<ModelInferRequest>>,
    ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
        let headers =
            if self.0.state.tracer.is_some() { request.metadata().as_ref().clone() } else { HeaderMap::new() };
        Ok(Response::new(infer::stream(Arc::clone(&self.0), headers, request.into_inner())))
    }

    async fn model_config(
        &self,
        request: Request<ModelConfigRequest>,
    ) -> Result<Response<ModelConfigResponse>, Status> {
        let ModelConfigRequest { name, version } = request.into_inner();
        let config = path(name, &version).and_then(|path| http::model_config(&self.0.state, &path));
        let config = message(config.map_err(|error| status(&error))?)?.into_inner();
        Ok(Response::new(ModelConfigResponse { config: Some(config) }))
    }

    async fn model_statistics(
        &self,
        request: Request<ModelStatisticsRequest>,
    ) -> Result<Response<ModelStatisticsResponse>, Status> {
        let ModelStatisticsRequest { name, version } = request.into_inner();
        let path = if name.is_empty() { Ok(None) } else { path(name, &version).map(Some) };
        let path = path.map_err(|error| status(&error))?;
        let statistics = http::statistics_of(&self.0.state, path.as_ref()).await;
        message(statistics.map_err(|error| status(&error))?)
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Result<Response<RepositoryIndexResponse>, Status> {
        let index = http::index_of(&self.0.state, request.into_inner().ready);
        message(serde_json::json!({ "models": index }))
    }

    async fn repository_model_load(
        &self,
        request: Request<RepositoryModelLoadRequest>,
    ) -> Result<Response<RepositoryModelLoadResponse>, Status> {
        repository::load(&self.0.state, request).await.map_err(|error| status(&error))
    }

    async fn repository_model_unload(
        &self,
        request: Request<RepositoryModelUnloadRequest>,
    ) -> Result<Response<RepositoryModelUnloadResponse>, Status> {
        repository::unload(&self.0.state, request).await.map_err(|error| status(&error))
    }

    async fn system_shared_memory_status(
        &self,
        request: Request<SystemSharedMemoryStatusRequest>,
    ) -> Result<Response<SystemSharedMemoryStatusResponse>, Status> {
        no_region(request.into_inner().name).map(|()| Response::new(Default::default()))
    }

    async fn system_shared_memory_register(
        &self,
        _: Request<SystemSharedMemoryRegisterRequest>,
    ) -> Result<Response<SystemSharedMemoryRegisterResponse>, Status> {
        refused(&SHARED_MEMORY)
    }

    async fn system_shared_memory_unregister(
        &self,
        _: Request<SystemSharedMemoryUnregisterRequest>,
    ) -> Result<Response<SystemSharedMemoryUnregisterResponse>, Status> {
        refused(&SHARED_MEMORY)
    }

    async fn cuda_shared_memory_status(
        &self,
        request: Request<CudaSharedMemoryStatusRequest>,
    ) -> Result<Response<CudaSharedMemoryStatusResponse>, Status> {
        no_region(request.into_inner().name).map(|()| Response::new(Default::default()))
    }

    async fn cuda_shared_memory_register(
        &self,
        _: Request<CudaSharedMemoryRegisterRequest>,
    ) -> Result<Response<CudaSharedMemoryRegisterResponse>, Status> {
        refused(&SHARED_MEMORY)
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<CudaSharedMemoryUnregisterRequest>,
    ) -> Result<Response<CudaSharedMemoryUnregisterResponse>, Status> {
        refused(&SHARED_MEMORY)
    }

    async fn trace_setting(&self, _: Request<TraceSettingRequest>) -> Result<Response<TraceSettingResponse>, Status> {
        refused(&ApiError::Unsupported("tracing by request"))
    }

    async fn log_settings(
        &self,
        request: Request<LogSettingsRequest>,
    ) -> Result<Response<LogSettingsResponse>, Status> {
        logging::settings(&self.0.state, request.into_inner()).map(Response::new).map_err(|error| status(&error))
    }
}
