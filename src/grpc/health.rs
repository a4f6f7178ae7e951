//! The standard health service: the server under the empty name and under that of its service, each model under its own.

use super::Grpc;
use super::proto::grpc_inference_service_server::SERVICE_NAME;
use crate::http::{self, ModelPath, Phase};
use futures_util::stream::{BoxStream, StreamExt as _, unfold};
use std::sync::Arc;
use std::time::Duration;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// How often a watched state is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Looks at the models and the phase when it is asked: there is no second record of them that could be out of date.
pub(super) struct Checks(pub(super) Arc<Grpc>);

impl Checks {
    /// `None`: there is nothing of this name.
    fn state(&self, name: &str) -> Option<ServingStatus> {
        let state = &self.0.state;
        let serving = |good| if good { ServingStatus::Serving } else { ServingStatus::NotServing };
        if name.is_empty() || name == SERVICE_NAME {
            return Some(serving(http::not_ready(state).is_none()));
        }
        let path = ModelPath { model: name.to_owned(), version: None };
        match path.ready(state) {
            Ok(_) => Some(serving(*state.phase.borrow() == Phase::Serving)),
            Err(http::ApiError::ModelNotReady { .. }) => Some(ServingStatus::NotServing),
            Err(_) => None,
        }
    }
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for Checks {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let name = request.into_inner().service;
        match self.state(&name) {
            Some(status) => Ok(Response::new(answer(status))),
            None => Err(Status::not_found(format!("there is no service and no model '{name}'"))),
        }
    }

    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let watch = (Self(Arc::clone(&self.0)), request.into_inner().service, None, self.0.state.phase.clone());
        let changes = unfold(watch, |(checks, name, last, mut phase)| async move {
            loop {
                let now = checks.state(&name).unwrap_or(ServingStatus::ServiceUnknown);
                if last != Some(now) {
                    return Some((Ok(answer(now)), (checks, name, Some(now), phase)));
                }
                if *phase.borrow() == Phase::Closing {
                    return None;
                }
                // A phase whose sender is gone changes no more, and the time still passes.
                let changed = async {
                    if phase.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
            }
        });
        Ok(Response::new(changes.boxed()))
    }
}
