//! What surrounds every call: its span, the net under a handler that panics, and the gate for its messages.

use super::Grpc;
use super::intake::{Gate, Intake};
use super::proto::grpc_inference_service_server::SERVICE_NAME;
use super::status::status;
use crate::http::{ApiError, authorized, caught};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode, Version};
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
    if !open(request.uri().path())
        && let Err(error) = authorized(&grpc.state.keys, request.headers())
    {
        return failed(&error);
    }
    let span = tracing::info_span!("call", path = request.uri().path());
    let lasting = lasting(request.uri().path());
    let limits = &grpc.state.limits;
    let gate = Gate {
        message_bytes: limits.body_bytes,
        message_timeout: limits.body_read_timeout,
        bodies: grpc.state.bodies.clone(),
        lasting: lasting.then(|| grpc.state.phase.clone()),
    };
    let request = request.map(|body| Body::new(Intake::new(body, gate)));
    caught(next.run(request), || failed(&ApiError::Internal)).instrument(span).await
}

/// What needs no key: health checks, and what the admin token guards is asked for that instead.
fn open(path: &str) -> bool {
    path.starts_with(HEALTH) || path.ends_with("/RepositoryModelLoad") || path.ends_with("/RepositoryModelUnload")
}

/// Whether a call takes any number of messages, for as long as its client likes.
fn lasting(path: &str) -> bool {
    let inference = path.strip_prefix('/').and_then(|path| path.strip_prefix(SERVICE_NAME));
    inference == Some("/ModelStreamInfer") || path.starts_with(REFLECTION)
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
    fn only_calls_of_many_messages_last() {
        assert!(lasting("/inference.GRPCInferenceService/ModelStreamInfer"));
        assert!(lasting("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"));
        assert!(!lasting("/inference.GRPCInferenceService/ModelInfer"));
        assert!(!lasting("/grpc.health.v1.Health/Watch"));
    }
}
