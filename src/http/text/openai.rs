//! OpenAI's `POST /v1/embeddings`.

use super::answers::{finished, list, numbers, object};
use super::input::{Fields, Inputs, Wanted};
use super::{Asked, EMBEDS, Work};
use crate::http::encode::{integer, string};
use crate::http::error::ApiError;
use crate::http::{AppState, Outcome};
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
    let mut outcome = Outcome::of(&state, &request);
    let answer = answer(&state, request, &mut outcome).await;
    outcome.response(answer)
}

async fn answer(state: &AppState, request: Request, outcome: &mut Outcome) -> Result<Response, ApiError> {
    let (mut work, asked, _room) = Work::begin::<Embeddings>(state, outcome, request).await?;
    let format = format(asked.encoding_format.as_deref())?;
    let (model, text) = work.model(&asked.model, EMBEDS)?;
    work.check(&asked.input, "input")?;
    let unknown = |message| ApiError::Field { field: "model", message };
    let prompt = text.prompt(None).map_err(unknown)?.to_owned();
    let cut = text.cut(None, None, false);
    let inputs = Asked { inputs: asked.input, field: "input", prompt, cut };
    let (vectors, tokens) = work.embed((&model, &text), inputs, asked.dimensions).await?;
    let dimensions = asked.dimensions.and_then(|wanted| usize::try_from(wanted).ok());
    let name = model.name.clone();
    work.answer(&model, move || write(&name, &finished(vectors, dimensions, text.normalize), format, tokens)).await
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

fn write(model: &str, vectors: &[Vec<f32>], format: Format, tokens: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(256 + vectors.iter().map(|vector| 64 + 11 * vector.len()).sum::<usize>());
    let mut index = 0..;
    object(&mut out, |entry| {
        string(entry.key("object"), "list");
        list(entry.key("data"), vectors, |out, vector| {
            object(out, |entry| {
                string(entry.key("object"), "embedding");
                integer(entry.key("index"), index.next().unwrap_or(0usize));
                match format {
                    Format::Float => numbers(entry.key("embedding"), vector),
                    Format::Base64 => {
                        let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                        string(entry.key("embedding"), &STANDARD.encode(bytes));
                    }
                }
            });
        });
        string(entry.key("model"), model);
        object(entry.key("usage"), |entry| {
            integer(entry.key("prompt_tokens"), tokens);
            integer(entry.key("total_tokens"), tokens);
        });
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_what_the_documentation_shows() {
        let text = |format| String::from_utf8(write("m", &[vec![0.5, -2.0, 1.0]], format, 8)).unwrap();
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
}
