//! OpenAI's `POST /v1/embeddings`.

use super::input::{Fields, Inputs, Wanted};
use super::{Asked, EMBEDS, Work};
use crate::http::encode::{float32, integer, string};
use crate::http::error::ApiError;
use crate::http::{AppState, Outcome};
use crate::model::text::vectors;
use crate::text::Tokens;
use crate::text::pooling::normalise;
use axum::extract::{Request, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::sync::Arc;

/// What a client sends; keys that mean nothing here are ignored.
#[derive(Debug)]
struct Embeddings {
    input: Inputs,
    model: String,
    encoding_format: Option<String>,
    dimensions: Option<u64>,
}

impl Wanted for Embeddings {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self {
            input: fields.required("input")?,
            model: fields.required("model")?,
            encoding_format: fields.optional("encoding_format")?,
            dimensions: fields.optional("dimensions")?,
        })
    }
}

/// How the numbers of a vector are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Float,
    Base64,
}

pub(in crate::http) async fn embeddings(State(state): State<Arc<AppState>>, request: Request) -> Response {
    let mut outcome = Outcome::default();
    let answer = answer(&state, request, &mut outcome).await;
    outcome.response(answer)
}

async fn answer(state: &AppState, request: Request, outcome: &mut Outcome) -> Result<Response, ApiError> {
    let (mut work, asked, _room) = Work::begin::<Embeddings>(state, outcome, request).await?;
    let format = format(asked.encoding_format.as_deref())?;
    let (model, text) = work.model(&asked.model, EMBEDS)?;
    let Some(head) = text.vectors.clone() else { return Err(ApiError::Internal) };
    let many = asked.input.many;
    let inputs = work.checked(asked.input, "input")?;
    if let Some(at) = inputs.iter().position(|input| input.bytes() == 0) {
        let message = format!("{} is empty; send a text that says something", super::name("input", many, at));
        return Err(ApiError::Field { field: "input", message });
    }
    let unknown = |message| ApiError::Field { field: "model", message };
    let prompt = text.prompt(None).map_err(unknown)?.to_owned();
    let cut = text.cut(None, None, false);
    // Before the model runs, if its graph says how long its vectors are.
    check_width(asked.dimensions, &text, head.width)?;
    let tokens = work.tokenize(&model, &text, Asked { inputs, field: "input", many, prompt, cut }).await?;
    let pooling = head.pooling;
    let read = move |tensor: &_, lengths: &[usize]| vectors(tensor, lengths, pooling);
    let vectors = work.run((&model, &text), &tokens, head.output, read).await?;
    check_width(asked.dimensions, &text, vectors.first().map(Vec::len))?;
    let dimensions = asked.dimensions.and_then(|wanted| usize::try_from(wanted).ok());
    let normalize = text.normalize;
    let name = model.name.clone();
    work.answer(&model, move || write(&name, finished(vectors, dimensions, normalize), format, total(&tokens))).await
}

fn format(given: Option<&str>) -> Result<Format, ApiError> {
    match given {
        None | Some("float") => Ok(Format::Float),
        Some("base64") => Ok(Format::Base64),
        Some(other) => Err(ApiError::Field {
            field: "encoding_format",
            message: format!("encoding_format '{other}' is neither 'float' nor 'base64'"),
        }),
    }
}

fn check_width(wanted: Option<u64>, text: &crate::model::TextModel, width: Option<usize>) -> Result<(), ApiError> {
    let Some((wanted, width)) = wanted.zip(width) else { return Ok(()) };
    let refuse = |message| ApiError::Field { field: "dimensions", message: format!("dimensions {message}") };
    text.width(wanted, width).map(|_| ()).map_err(refuse)
}

/// Vectors as they leave: the first elements of each, if fewer were asked for, at unit length.
pub(super) fn finished(mut vectors: Vec<Vec<f32>>, dimensions: Option<usize>, normalize: bool) -> Vec<Vec<f32>> {
    for vector in &mut vectors {
        vector.truncate(dimensions.unwrap_or(usize::MAX));
        if normalize {
            normalise(vector);
        }
    }
    vectors
}

fn total(tokens: &[Tokens]) -> usize {
    tokens.iter().map(|tokens| tokens.ids.len()).sum()
}

fn write(model: &str, vectors: Vec<Vec<f32>>, format: Format, tokens: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(256 + vectors.iter().map(|vector| 64 + 11 * vector.len()).sum::<usize>());
    out.extend_from_slice(b"{\"object\":\"list\",\"data\":[");
    for (index, vector) in vectors.into_iter().enumerate() {
        out.extend_from_slice(if index == 0 { b"" } else { b"," });
        out.extend_from_slice(b"{\"object\":\"embedding\",\"index\":");
        integer(&mut out, index);
        out.extend_from_slice(b",\"embedding\":");
        match format {
            Format::Float => list(&mut out, &vector),
            Format::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                string(&mut out, &STANDARD.encode(bytes));
            }
        }
        out.push(b'}');
    }
    out.extend_from_slice(b"],\"model\":");
    string(&mut out, model);
    out.extend_from_slice(b",\"usage\":{\"prompt_tokens\":");
    integer(&mut out, tokens);
    out.extend_from_slice(b",\"total_tokens\":");
    integer(&mut out, tokens);
    out.extend_from_slice(b"}}");
    out
}

/// Numbers as a JSON list.
pub(super) fn list(out: &mut Vec<u8>, values: &[f32]) {
    out.push(b'[');
    for (at, value) in values.iter().enumerate() {
        out.extend_from_slice(if at == 0 { b"" } else { b"," });
        float32(out, *value);
    }
    out.push(b']');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_what_the_documentation_shows() {
        let vectors = || vec![vec![0.5, -2.0, 1.0]];
        let text = |format| String::from_utf8(write("m", vectors(), format, 8)).unwrap();
        let around = |embedding: &str| {
            format!(
                "{{\"object\":\"list\",\"data\":[{{\"object\":\"embedding\",\"index\":0,\"embedding\":{embedding}}}],\
                 \"model\":\"m\",\"usage\":{{\"prompt_tokens\":8,\"total_tokens\":8}}}}"
            )
        };
        assert_eq!(text(Format::Float), around("[0.5,-2.0,1.0]"));
        // Worked out by hand: three little-endian floats.
        assert_eq!(text(Format::Base64), around("\"AAAAPwAAAMAAAIA/\""));
    }

    #[test]
    fn shorter_vectors_are_cut_and_then_brought_to_unit_length() {
        assert_eq!(finished(vec![vec![3.0, 4.0, 12.0]], Some(2), true), [[0.6, 0.8]]);
        assert_eq!(finished(vec![vec![3.0, 4.0, 12.0]], Some(2), false), [[3.0, 4.0]]);
        assert_eq!(finished(vec![vec![3.0, 4.0]], None, true), [[0.6, 0.8]]);
    }
}
