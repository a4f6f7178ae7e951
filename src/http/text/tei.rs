//! The routes of Text Embeddings Inference (TEI). They name no model: below `/tei/{model}` they mean that one, and at the root
//! the one of `text.model`, or the only one that can do what is asked.

use super::answers::{finished, list, numbers, rows};
use super::input::{Fields, Input, Inputs, Wanted};
use super::{Ability, Asked, EMBEDS, Work};
use crate::http::body::Room;
use crate::http::encode::float32;
use crate::http::error::ApiError;
use crate::http::status::json_response;
use crate::http::{AppState, Outcome};
use crate::model::text::token_vectors;
use crate::model::{ModelSpec, TextModel};
use crate::text::Keep;
use crate::text::pooling::cosine;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// A vector for each token.
const TOKENS: Ability = Ability { has: |text| text.tokens.is_some(), lack: "gives no vectors for tokens" };
/// Nothing but a tokenizer.
const TEXTS: Ability = Ability { has: |_| true, lack: "" };

/// The most vectors in an answer of `/embed_all`: 32 texts of 512 tokens. With 1024 elements each that is about 200 MB of text.
const MOST_VECTORS: usize = 16_384;

/// The model that a path names.
pub(in crate::http) type Named = Result<Option<Path<String>>, PathRejection>;

/// What requests may say of how texts are treated.
#[derive(Debug, Default)]
struct Manner {
    truncate: Option<bool>,
    keep: Option<Keep>,
    prompt: Option<String>,
}

impl Manner {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let field = "truncation_direction";
        let keep = match fields.optional::<String>(field)?.as_deref() {
            None => None,
            Some("right" | "Right") => Some(Keep::Start),
            Some("left" | "Left") => Some(Keep::End),
            Some(other) => {
                let message = format!("{field} '{other}' is neither 'left' nor 'right'");
                return Err(ApiError::Field { field, message });
            }
        };
        Ok(Self { truncate: fields.optional("truncate")?, keep, prompt: fields.optional("prompt_name")? })
    }

    /// Texts on their way. What does not fit is cut unless somebody says otherwise, as TEI does.
    fn asked(&self, text: &TextModel, inputs: Inputs, field: &'static str) -> Result<Asked, ApiError> {
        let prompt = prompt(text, self.prompt.as_deref())?;
        Ok(Asked { inputs, field, prompt, cut: text.cut(self.truncate, self.keep, true) })
    }
}

/// What is put before texts; `name` is what a request says.
fn prompt(text: &TextModel, name: Option<&str>) -> Result<String, ApiError> {
    let field = "prompt_name";
    let unknown = |message| ApiError::Field { field, message: format!("{field}: {message}") };
    text.prompt(name).map(str::to_owned).map_err(unknown)
}

/// A request that was read, and the model that it means.
struct Opened<'a, T> {
    work: Work<'a>,
    wanted: T,
    model: Arc<ModelSpec>,
    text: Arc<TextModel>,
    /// What the body takes up, until there is an answer.
    _room: Room,
}

impl<'a, T: Wanted> Opened<'a, T> {
    async fn open(
        state: &'a AppState,
        outcome: &'a mut Outcome,
        (named, request): (Named, Request),
        ability: Ability,
    ) -> Result<Self, ApiError> {
        let (mut work, wanted, room) = Work::begin::<T>(state, outcome, request).await?;
        let (model, text) = work.meant(named, ability)?;
        Ok(Self { work, wanted, model, text, _room: room })
    }
}

/// A route whose model must have an ability, and whose answer is `task`'s.
macro_rules! route {
    ($(#[$doc:meta])* $name:ident, $ability:expr, $task:ident) => {
        $(#[$doc])*
        pub(in crate::http) async fn $name(State(state): State<Arc<AppState>>, named: Named, request: Request) -> Response {
            let mut outcome = Outcome::of(&state, &request);
            let answer = async {
                let opened = crate::http::text::tei::Opened::open(&state, &mut outcome, (named, request), $ability);
                $task(opened.await?).await
            };
            let answer = answer.await;
            outcome.response(answer)
        }
    };
}

mod scores;
mod tokens;

pub(in crate::http) use scores::{predict, rerank};
pub(in crate::http) use tokens::{decode, tokenize};

route!(
    /// `POST /embed`: a vector for each text.
    embed, EMBEDS, embedded
);
route!(
    /// `POST /embed_all`: a vector for each token of each text.
    embed_all, TOKENS, all_embedded
);
route!(
    /// `POST /similarity`: how near texts are to another.
    similarity, EMBEDS, compared
);

struct Embed {
    inputs: Inputs,
    manner: Manner,
    normalize: Option<bool>,
    dimensions: Option<u64>,
}

impl Wanted for Embed {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self {
            inputs: fields.required("inputs")?,
            manner: Manner::read(fields)?,
            normalize: fields.optional("normalize")?,
            dimensions: fields.optional("dimensions")?,
        })
    }
}

async fn embedded(opened: Opened<'_, Embed>) -> Result<Response, ApiError> {
    let Opened { mut work, wanted, model, text, _room } = opened;
    work.check(&wanted.inputs, "inputs")?;
    let asked = wanted.manner.asked(&text, wanted.inputs, "inputs")?;
    let (vectors, _) = work.embed((&model, &text), asked, wanted.dimensions).await?;
    let dimensions = wanted.dimensions.and_then(|wanted| usize::try_from(wanted).ok());
    let normalize = wanted.normalize.unwrap_or(text.normalize);
    work.answer(&model, move || rows(&finished(vectors, dimensions, normalize))).await
}

async fn all_embedded(opened: Opened<'_, Embed>) -> Result<Response, ApiError> {
    let Opened { mut work, wanted, model, text, _room } = opened;
    let Some(output) = text.tokens else { return Err(ApiError::Internal) };
    work.check(&wanted.inputs, "inputs")?;
    let asked = wanted.manner.asked(&text, wanted.inputs, "inputs")?;
    let tokens = work.tokenize(&model, &text, asked).await?;
    let all: usize = tokens.iter().map(|tokens| tokens.ids.len()).sum();
    if all > MOST_VECTORS {
        let message =
            format!("inputs have {all} tokens, each of which has a vector; send at most {MOST_VECTORS} at once");
        return Err(ApiError::Field { field: "inputs", message });
    }
    let each = work.run((&model, &text), &tokens, output, token_vectors).await?;
    let write = move || {
        let mut out = Vec::new();
        list(&mut out, &each, |out, vectors| list(out, vectors, |out, vector| numbers(out, vector)));
        out
    };
    work.answer(&model, write).await
}

struct Compare {
    source: String,
    sentences: Vec<String>,
    manner: Manner,
}

impl Wanted for Compare {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let field = "inputs";
        let inputs =
            fields.within(field, |inputs| Ok((inputs.required("source_sentence")?, inputs.required("sentences")?)))?;
        let missing = || ApiError::Field { field, message: format!("{field} is missing; the body must have it") };
        let (source, sentences) = inputs.ok_or_else(missing)?;
        let manner = fields.within("parameters", Manner::read)?.unwrap_or_default();
        Ok(Self { source, sentences, manner })
    }
}

async fn compared(opened: Opened<'_, Compare>) -> Result<Response, ApiError> {
    let Opened { mut work, wanted, model, text, _room } = opened;
    let source = Inputs { list: vec![Input::Text(wanted.source)], many: false };
    work.check(&source, "source_sentence")?;
    let mut inputs = Inputs::texts(wanted.sentences);
    work.check(&inputs, "sentences")?;
    // The sentence that the others are compared with comes last, so that errors count those from zero.
    inputs.list.extend(source.list);
    let asked = wanted.manner.asked(&text, inputs, "sentences")?;
    let (mut vectors, _) = work.embed((&model, &text), asked, None).await?;
    let source = vectors.pop().ok_or(ApiError::Internal)?;
    let write = move || {
        let mut out = Vec::new();
        list(&mut out, &vectors, |out, sentence| float32(out, cosine(&source, sentence)));
        out
    };
    work.answer(&model, write).await
}

/// `GET /info`: what a model is, in TEI's words.
pub(in crate::http) async fn info(State(state): State<Arc<AppState>>, named: Named) -> Result<Response, ApiError> {
    let (model, text) = super::meant(&state, named, TEXTS)?;
    let labels = |labels: &[String]| {
        let ids: Value = labels.iter().enumerate().map(|(id, label)| (id.to_string(), json!(label))).collect();
        let names: Value = labels.iter().enumerate().map(|(id, label)| (label.clone(), json!(id))).collect();
        json!({"id2label": ids, "label2id": names})
    };
    let kind = match (&text.vectors, &text.scores) {
        (_, Some(scores)) if scores.ranks() => json!({"reranker": labels(&scores.labels)}),
        (_, Some(scores)) => json!({"classifier": labels(&scores.labels)}),
        (Some(vectors), None) => json!({"embedding": {"pooling": vectors.pooling.word()}}),
        (None, None) => Value::Null,
    };
    let output = text.vectors.as_ref().map(|head| head.output).or(text.scores.as_ref().map(|head| head.output));
    let dtype = output.map(|output| match model.outputs[output].datatype {
        crate::tensor::DataType::Fp16 => "float16",
        crate::tensor::DataType::Bf16 => "bfloat16",
        crate::tensor::DataType::Fp64 => "float64",
        _ => "float32",
    });
    Ok(json_response(&json!({
        "model_id": model.name,
        "model_sha": null,
        "model_dtype": dtype,
        "served_model_name": model.name,
        "model_type": kind,
        "max_concurrent_requests": state.texts.pool.requests(),
        "max_input_length": text.max_tokens,
        "max_batch_tokens": u64::from(model.max_batch_size) * text.max_tokens as u64,
        "max_batch_requests": model.max_batch_size,
        "max_client_batch_size": state.texts.max_inputs,
        "auto_truncate": text.truncates(true),
        "tokenization_workers": state.texts.pool.threads(),
        "version": env!("CARGO_PKG_VERSION"),
        "sha": null,
        "docker_label": null,
    })))
}
