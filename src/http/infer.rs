//! `POST /v2/models/{model}[/versions/{version}]/infer`.

use super::binary::Framing;
use super::decode::Decoded;
use super::error::ApiError;
use super::inference::Inference;
use super::path::ModelPath;
use super::{AppState, Outcome, binary, body, coding, decode, encode};
use axum::extract::{Request, State};
use axum::response::Response;
use std::sync::Arc;

pub(super) async fn infer(
    State(state): State<Arc<AppState>>,
    path: Result<ModelPath, ApiError>,
    request: Request,
) -> Response {
    let mut outcome = Outcome::of(&state, &request);
    let answer = answer(&state, path, request, &mut outcome).await;
    outcome.response(answer)
}

async fn answer(
    state: &AppState,
    path: Result<ModelPath, ApiError>,
    request: Request,
    outcome: &mut Outcome,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    // First of all, so that the connection can go on after whatever error.
    let (body, _room) = body::read(&parts.headers, body, &state.limits, &state.bodies).await?;
    let mut inference = Inference::of(state, &path?, outcome)?;
    let Decoded { mut request, forms } = match binary::framing(&parts.headers, body.len())? {
        Framing::Json(json) => decode::decode(&body, json)?,
        Framing::Raw => binary::raw(&inference.model, body)?,
    };
    let id = std::mem::take(&mut request.id);
    let classes: Vec<u64> = forms.listed.iter().map(|form| form.classification).collect();
    let answer = inference.run(request, &classes).await?;
    let encoded = encode::encode(&inference.model, &id, answer, &forms)?;
    let compressed = match coding::wanted(&parts.headers).filter(|_| state.limits.compress_answers) {
        Some(coding) => coding::deflate(coding, &encoded.frames).await.map(|body| (coding, body)),
        None => None,
    };
    inference.written();
    Ok(encoded.respond(compressed))
}
