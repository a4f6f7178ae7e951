//! Loading and unloading over gRPC. Whether the client may is known before: see `edge`.

use super::proto::model_repository_parameter::ParameterChoice;
use super::proto::{
    RepositoryModelLoadRequest, RepositoryModelLoadResponse, RepositoryModelUnloadRequest,
    RepositoryModelUnloadResponse,
};
use crate::http::{ApiError, AppState, controller};
use tonic::{Request, Response};

pub(super) async fn load(
    state: &AppState,
    request: Request<RepositoryModelLoadRequest>,
) -> Result<Response<RepositoryModelLoadResponse>, ApiError> {
    let message = request.into_inner();
    unnamed(&message.repository_name)?;
    let mut parameters = Vec::new();
    for (name, parameter) in &message.parameters {
        match &parameter.parameter_choice {
            Some(ParameterChoice::StringParam(text)) => parameters.push((name.as_str(), text.as_str())),
            // Files come as bytes, and are refused by their names.
            Some(ParameterChoice::BytesParam(_)) => parameters.push((name.as_str(), "")),
            _ => return Err(ApiError::invalid(format!("parameters.{name} must be a string"))),
        }
    }
    controller(state)?.load(&message.model_name, parameters).await?;
    Ok(Response::new(RepositoryModelLoadResponse {}))
}

pub(super) async fn unload(
    state: &AppState,
    request: Request<RepositoryModelUnloadRequest>,
) -> Result<Response<RepositoryModelUnloadResponse>, ApiError> {
    let message = request.into_inner();
    unnamed(&message.repository_name)?;
    // Nothing depends on another model here, so that `unload_dependents` means the same either way.
    controller(state)?.unload(&message.model_name).await?;
    Ok(Response::new(RepositoryModelUnloadResponse {}))
}

fn unnamed(repository: &str) -> Result<(), ApiError> {
    if repository.is_empty() { Ok(()) } else { Err(ApiError::Unsupported("a repository with a name")) }
}
