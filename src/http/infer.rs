//! `POST /v2/models/{model}[/versions/{version}]/infer`.

use super::binary::Framing;
use super::decode::Decoded;
use super::error::ApiError;
use super::path::ModelPath;
use super::{AppState, Outcome, binary, body, coding, decode, encode};
use crate::metrics::Stage;
use crate::model::{ValidRequest, classify};
use axum::extract::{Request, State};
use axum::response::Response;
use std::sync::Arc;

pub(super) async fn infer(
    State(state): State<Arc<AppState>>,
    path: Result<ModelPath, ApiError>,
    request: Request,
) -> Response {
    let mut outcome = Outcome::default();
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
    let model = path?.ready(state)?;
    outcome.model = Some(Arc::clone(&model));
    let begun = state.clock.now();
    let Decoded { mut request, forms } = match binary::framing(&parts.headers, body.len())? {
        Framing::Json(json) => decode::decode(&body, json)?,
        Framing::Raw => binary::raw(&model, body)?,
    };
    let id = std::mem::take(&mut request.id);
    let request = ValidRequest::new(Arc::clone(&model), request, state.limits.request_rows)?;
    for (_, &output) in forms.listed.iter().zip(&request.outputs).filter(|(form, _)| form.classification > 0) {
        classify::check(&model.outputs[output])?;
    }
    outcome.rows = request.rows;
    (state.offered)(&model, request.rows);
    (state.spent)(&model, Stage::Decode, state.clock.now().since(begun));
    let mut answer = state.batcher.infer(request).await?;
    let begun = state.clock.now();
    for (form, output) in forms.listed.iter().zip(&mut answer.outputs).filter(|(form, _)| form.classification > 0) {
        output.tensor = classify::classify(&model, output.index, &output.tensor, form.classification)?;
    }
    let encoded = encode::encode(&model, &id, answer, &forms)?;
    let compressed = match coding::wanted(&parts.headers).filter(|_| state.limits.compress_answers) {
        Some(coding) => coding::deflate(coding, &encoded.frames).await.map(|body| (coding, body)),
        None => None,
    };
    (state.spent)(&model, Stage::Encode, state.clock.now().since(begun));
    Ok(encoded.respond(compressed))
}
