//! What surrounds every call: its span, the net under a handler that panics, and the gate for its messages.

use super::Grpc;
use super::intake::{Gate, watched};
use super::proto::grpc_inference_service_server::SERVICE_NAME;
use super::status::status;
use crate::http::{ApiError, AppState, Coding, LOAD_BODY_BYTES, SMALL_BODY_BYTES, admin_required, authorized, caught};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use std::sync::Arc;
use tracing::Instrument as _;

/// The start of the paths of reflection, whose calls last.
const REFLECTION: &str = "/grpc.reflection.";

/// The start of the paths of health checks, which bring no key.
const HEALTH: &str = "/grpc.health.";

/// The middleware around all services.
pub(super) async fn edge(State(grpc): State<Arc<Grpc>>, request: Request, next: Next) -> Response {
    // Trailers, and with them the status of a call, exist in HTTP/2 only as gRPC uses them.
    if request.version() < Version::HTTP_2 {
        let words = "this port speaks gRPC, which is HTTP/2; HTTP/1.1 is spoken on the port of server.address\n";
        return (StatusCode::HTTP_VERSION_NOT_SUPPORTED, words).into_response();
    }
    let call = Call::of(request.uri().path());
    if let Err(error) = call.allowed(&grpc.state, request.headers()) {
        return failed(&error);
    }
    let span = tracing::info_span!("call", path = request.uri().path(), trace_id = tracing::field::Empty);
    let limits = &grpc.state.limits;
    let gate = Gate {
        message_bytes: call.message_bytes().min(limits.body_bytes),
        message_timeout: limits.body_read_timeout,
        bodies: grpc.state.bodies.clone(),
        coding: request.headers().get("grpc-encoding").and_then(|name| Coding::of(name.to_str().ok()?)),
        inferences: matches!(call, Call::Infer | Call::StreamInfer),
        lasting: matches!(call, Call::StreamInfer | Call::Reflection).then(|| grpc.state.phase.clone()),
    };
    let request = request.map(|body| watched(body, gate));
    caught(next.run(request), || failed(&ApiError::Internal)).instrument(span).await
}

/// What is asked for, as far as it matters before a message is read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Infer,
    /// Takes any number of messages, for as long as its client likes.
    StreamInfer,
    /// Loading a model, or unloading one.
    Control,
    /// Lasts, too.
    Reflection,
    Health,
    Other,
}

impl Call {
    fn of(path: &str) -> Self {
        let inference = path.strip_prefix('/').and_then(|path| path.strip_prefix(SERVICE_NAME));
        match inference {
            Some("/ModelInfer") => Self::Infer,
            Some("/ModelStreamInfer") => Self::StreamInfer,
            Some("/RepositoryModelLoad" | "/RepositoryModelUnload") => Self::Control,
            None if path.starts_with(REFLECTION) => Self::Reflection,
            None if path.starts_with(HEALTH) => Self::Health,
            _ => Self::Other,
        }
    }

    /// Whether the client may do this. Health checks bring no key, and loading and unloading is asked for the admin token
    /// instead: strangers get no byte of theirs read.
    fn allowed(self, state: &AppState, headers: &HeaderMap) -> Result<(), ApiError> {
        match self {
            Self::Health => Ok(()),
            Self::Control => admin_required(state, headers),
            _ => authorized(&state.keys, headers),
        }
    }

    /// The most bytes of a message; only inferences bring tensors.
    fn message_bytes(self) -> usize {
        match self {
            Self::Infer | Self::StreamInfer => usize::MAX,
            Self::Control => LOAD_BODY_BYTES,
            Self::Reflection | Self::Health | Self::Other => SMALL_BODY_BYTES,
        }
    }
}

/// A failure before there is a call: headers and no more.
pub(super) fn failed(error: &ApiError) -> Response {
    let mut response = status(error).into_http::<Body>();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_known_by_their_paths() {
        for (path, call) in [
            ("/inference.GRPCInferenceService/ModelInfer", Call::Infer),
            ("/inference.GRPCInferenceService/ModelStreamInfer", Call::StreamInfer),
            ("/inference.GRPCInferenceService/RepositoryModelUnload", Call::Control),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Call::Reflection),
            ("/grpc.health.v1.Health/Watch", Call::Health),
            ("/inference.GRPCInferenceService/ModelReady", Call::Other),
            ("/other.Service/ModelInfer", Call::Other),
        ] {
            assert_eq!(Call::of(path), call, "{path}");
        }
    }
}
