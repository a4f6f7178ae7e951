//! Routes that take texts: OpenAI's embeddings and those of Text Embeddings Inference (TEI).
//!
//! A request's texts become tokens on the threads of [`crate::text::Pool`]; those of the same padded length run together, all
//! parts at once, and the answer has the order of the request. What is long is read and written on those threads as well. A
//! failure is the same `ApiError` as anywhere; `form` brings it into the form that the clients of a route read.

mod answers;
pub(super) mod form;
mod input;
pub(super) mod openai;
pub(super) mod tei;

use super::error::ApiError;
use super::path::ModelPath;
use super::{AppState, JSON, Outcome, body};
use crate::batcher::InferError;
use crate::metrics::Stage;
use crate::model::text::vectors;
use crate::model::{ModelSpec, TextModel};
use crate::tensor::Tensor;
use crate::text::{Cut, Fault, Place, Pool, Tokens};
use crate::units::Instant;
use axum::body::Body;
use axum::extract::{Path, Request};
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use input::{Fields, Input, Inputs, Wanted};
use std::ops::Range;
use std::sync::Arc;

/// Parts of one request that wait or run at a time.
const MOST_PARTS: usize = 16;
/// A body up to this size is read where it arrives: handing it over would take longer.
const SMALL_BODY: usize = 4096;
/// Bytes of texts that a thread takes on at once, so that a large request does not keep small ones waiting.
const PIECE_BYTES: usize = 32 << 10;

/// What text routes need beside what all routes need.
#[derive(Clone, Debug)]
pub struct Texts {
    /// The threads.
    pub pool: Pool,
    /// The most texts in one request.
    pub max_inputs: usize,
    /// The longest text, in bytes.
    pub max_input_bytes: usize,
    /// The model that routes without a model mean; `None`: the only one that can do what is asked.
    pub model: Option<String>,
}

/// What a model must be able to do.
#[derive(Clone, Copy)]
struct Ability {
    /// Whether it can.
    has: fn(&TextModel) -> bool,
    /// What it lacks otherwise.
    lack: &'static str,
}

/// A vector for each text.
const EMBEDS: Ability = Ability { has: |text| text.vectors.is_some(), lack: "gives no vectors for texts" };

/// A request with texts, as long as it is inside.
struct Work<'a> {
    state: &'a AppState,
    outcome: &'a mut Outcome,
    place: Place,
}

/// Texts on their way to tokens.
struct Asked {
    inputs: Inputs,
    /// The field that they stand in.
    field: &'static str,
    prompt: String,
    cut: Cut,
}

impl<'a> Work<'a> {
    /// Reads a request; its body takes up room as long as the guard lives.
    async fn begin<T: Wanted>(
        state: &'a AppState,
        outcome: &'a mut Outcome,
        request: Request,
    ) -> Result<(Self, T, body::Room), ApiError> {
        let (parts, body) = request.into_parts();
        // First of all, so that the connection can go on after whatever error.
        let (body, room) = body::read(&parts.headers, body, &state.limits, &state.bodies).await?;
        let place = state.texts.pool.admit().map_err(|_| ApiError::TextsFull)?;
        let work = Self { state, outcome, place };
        let body = body.to_contiguous();
        let parse = move || T::read(&Fields::new(&body)?);
        let parsed = if room.bytes() <= SMALL_BODY as u64 { parse() } else { work.on_pool(parse).await? };
        Ok((work, parsed?, room))
    }

    /// Says that a stage has ended.
    fn spent(&self, model: &ModelSpec, stage: Stage, begun: Instant) {
        let ended = self.state.clock.now();
        (self.state.spent)(model, stage, ended.since(begun));
        if let Some(trace) = &self.outcome.trace {
            trace.stage(stage, begun, ended);
        }
    }

    /// Has work done by the threads.
    async fn on_pool<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        self.state.texts.pool.run(&self.place, work).await.map_err(|_| ApiError::Internal)
    }

    /// The model with this name, if it can do what is asked.
    fn model(&mut self, name: &str, ability: Ability) -> Result<(Arc<ModelSpec>, Arc<TextModel>), ApiError> {
        let model = ModelPath { model: name.to_owned(), version: None }.ready(self.state)?;
        self.outcome.model = Some(Arc::clone(&model));
        ability.of(model)
    }

    /// The model that a path names, or the one that is meant where it names none.
    fn meant(&mut self, named: tei::Named, ability: Ability) -> Result<(Arc<ModelSpec>, Arc<TextModel>), ApiError> {
        let (model, text) = meant(self.state, named, ability)?;
        self.outcome.model = Some(Arc::clone(&model));
        Ok((model, text))
    }

    /// Whether there are as many texts in a field, and they are as long, as may be.
    fn check(&self, inputs: &Inputs, field: &'static str) -> Result<(), ApiError> {
        let Texts { max_inputs, max_input_bytes, .. } = self.state.texts;
        let refuse = |message| Err(ApiError::Field { field, message });
        let list = &inputs.list;
        if list.is_empty() {
            return Err(ApiError::Nothing { field });
        }
        if list.len() > max_inputs {
            return refuse(format!("{field} has {} texts; send at most {max_inputs} in one request", list.len()));
        }
        if let Some(at) = list.iter().position(|input| input.bytes() > max_input_bytes) {
            let (name, bytes) = (inputs.name(field, at), list[at].bytes());
            return refuse(format!("{name} has {bytes} bytes; send at most {max_input_bytes} in one text"));
        }
        match list.iter().position(|input| input.bytes() == 0) {
            Some(at) => refuse(format!("{} is empty; send a text that says something", inputs.name(field, at))),
            None => Ok(()),
        }
    }

    /// The tokens of all texts, in their order.
    async fn tokenize(
        &mut self,
        model: &ModelSpec,
        text: &Arc<TextModel>,
        asked: Asked,
    ) -> Result<Vec<Tokens>, ApiError> {
        let begun = self.state.clock.now();
        let (asked, text) = (Arc::new(asked), Arc::clone(text));
        let ranges = pieces(&asked.inputs.list);
        let tokens = self.each(ranges, move |at| asked.tokens(&text, at)).await?;
        self.spent(model, Stage::Decode, begun);
        Ok(tokens)
    }

    /// One thing for each of the texts in these ranges, in their order. The threads take one range after the other, so that other
    /// requests get their turn.
    async fn each<T: Send + 'static>(
        &self,
        ranges: Vec<Range<usize>>,
        make: impl Fn(usize) -> Result<T, ApiError> + Send + Sync + 'static,
    ) -> Result<Vec<T>, ApiError> {
        let make = Arc::new(make);
        let range = |range: Range<usize>| {
            let make = Arc::clone(&make);
            self.on_pool(move || range.map(&*make).collect::<Result<Vec<T>, ApiError>>())
        };
        let mut done = stream::iter(ranges.into_iter().map(range)).buffered(self.state.texts.pool.threads());
        let mut all = Vec::new();
        while let Some(made) = done.try_next().await? {
            all.extend(made?);
        }
        Ok(all)
    }

    /// Runs the model on texts, and makes of its output one thing for each of them, in their order.
    async fn run<T: Send + Default + Clone + 'static>(
        &mut self,
        (model, text): (&Arc<ModelSpec>, &TextModel),
        tokens: &[Tokens],
        output: usize,
        read: impl Fn(&Tensor, &[usize]) -> Result<Vec<T>, String> + Copy + Send + 'static,
    ) -> Result<Vec<T>, ApiError> {
        let parts = text.parts(model, tokens, output, self.state.limits.request_rows)?;
        self.outcome.rows = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        (self.state.offered)(model, self.outcome.rows);
        let each = parts.into_iter().map(|part| {
            let lengths: Vec<usize> = part.rows.iter().map(|row| tokens[*row].ids.len()).collect();
            let work = &*self;
            async move {
                let mut answer = work.state.batcher.infer_in(part.request, work.outcome.trace.clone()).await?;
                let tensor = answer.outputs.pop().ok_or(ApiError::Internal)?.tensor;
                let read = work.on_pool(move || read(&tensor, &lengths)).await?;
                let read = read.map_err(|reason| ApiError::Infer(InferError::Model(reason)))?;
                Ok::<_, ApiError>((part.rows, read))
            }
        });
        let mut ordered = vec![T::default(); tokens.len()];
        let mut done = stream::iter(each).buffer_unordered(MOST_PARTS);
        while let Some((rows, values)) = done.try_next().await? {
            rows.into_iter().zip(values).for_each(|(row, value)| ordered[row] = value);
        }
        Ok(ordered)
    }

    /// A whole vector for each text, and how many tokens they all have. `dimensions` is what is wanted of a vector, which is
    /// only looked at.
    async fn embed(
        &mut self,
        (model, text): (&Arc<ModelSpec>, &Arc<TextModel>),
        asked: Asked,
        dimensions: Option<u64>,
    ) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
        let Some(head) = text.vectors.clone() else { return Err(ApiError::Internal) };
        // Before the model runs, if its graph says how long its vectors are.
        check_width(text, dimensions, head.width)?;
        let tokens = self.tokenize(model, text, asked).await?;
        let read = move |tensor: &_, lengths: &[usize]| vectors(tensor, lengths, head.pooling);
        let vectors = self.run((model, text), &tokens, head.output, read).await?;
        check_width(text, dimensions, vectors.first().map(Vec::len))?;
        Ok((vectors, tokens.iter().map(|tokens| tokens.ids.len()).sum()))
    }

    /// The answer, written by the threads.
    async fn answer(
        &self,
        model: &ModelSpec,
        write: impl FnOnce() -> Vec<u8> + Send + 'static,
    ) -> Result<Response, ApiError> {
        self.answer_or(model, move || Ok(write())).await
    }

    /// The same where that may fail.
    async fn answer_or(
        &self,
        model: &ModelSpec,
        write: impl FnOnce() -> Result<Vec<u8>, ApiError> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let begun = self.state.clock.now();
        let body = self.on_pool(write).await??;
        self.spent(model, Stage::Encode, begun);
        let mut response = Response::new(Body::from(body));
        response.headers_mut().insert(CONTENT_TYPE, JSON);
        Ok(response)
    }
}

impl Asked {
    fn tokens(&self, text: &TextModel, at: usize) -> Result<Tokens, ApiError> {
        let tokens = match &self.inputs.list[at] {
            Input::Text(input) if self.prompt.is_empty() => text.tokenizer.encode(input, None, self.cut),
            Input::Text(input) => text.tokenizer.encode(&[&*self.prompt, input].concat(), None, self.cut),
            Input::Ids(ids) => text.tokenizer.take(ids.clone(), self.cut),
            Input::Pair(one, other) => text.tokenizer.encode(one, Some(other), self.cut),
        };
        tokens.map_err(|fault| {
            let message = format!("{} {fault}", self.inputs.name(self.field, at));
            match fault {
                Fault::Failed(_) => ApiError::Tokenizer(message),
                _ => ApiError::Field { field: self.field, message },
            }
        })
    }
}

impl Ability {
    /// The model with what it does with texts, if it can do this.
    fn of(self, model: Arc<ModelSpec>) -> Result<(Arc<ModelSpec>, Arc<TextModel>), ApiError> {
        let lack = |lack| ApiError::Unable { model: model.name.clone(), lack };
        let Some(text) = model.text.clone() else {
            return Err(lack("takes no texts: it needs a tokenizer.json beside it, and the log says what else"));
        };
        if (self.has)(&text) { Ok((model, text)) } else { Err(lack(self.lack)) }
    }
}

/// The model that a path names; else that of `text.model`; else the only one that can do what is asked.
fn meant(state: &AppState, named: tei::Named, ability: Ability) -> Result<(Arc<ModelSpec>, Arc<TextModel>), ApiError> {
    let named = named.map_err(|_| ApiError::RouteNotFound)?.map(|Path(name)| name);
    if let Some(name) = named.or_else(|| state.texts.model.clone()) {
        return ability.of(ModelPath { model: name, version: None }.ready(state)?);
    }
    let table = state.models.load();
    let mut able: Vec<&Arc<ModelSpec>> = Vec::new();
    // The newest version of a name is its last.
    for model in table.ready().filter(|model| model.text.as_deref().is_some_and(ability.has)) {
        able.retain(|other| other.name != model.name);
        able.push(model);
    }
    match able.as_slice() {
        [only] => ability.of(Arc::clone(only)),
        [] => Err(ApiError::NoTextModel("no model here can do this; GET /v2/models lists the models".to_owned())),
        several => {
            let names: Vec<&str> = several.iter().map(|model| model.name.as_str()).collect();
            let first = names.first().copied().unwrap_or_default();
            Err(ApiError::NoTextModel(format!(
                "several models can do this ({}): name one in the path, as /tei/{first}/..., or by the key text.model",
                names.join(", ")
            )))
        }
    }
}

/// Whether a vector of so many elements can be had of one as long as `width`.
fn check_width(text: &TextModel, wanted: Option<u64>, width: Option<usize>) -> Result<(), ApiError> {
    let Some((wanted, width)) = wanted.zip(width) else { return Ok(()) };
    let refuse = |message| ApiError::Field { field: "dimensions", message: format!("dimensions {message}") };
    text.width(wanted, width).map(|_| ()).map_err(refuse)
}

/// Texts in pieces that a thread takes on at once.
fn pieces(inputs: &[Input]) -> Vec<Range<usize>> {
    let (mut pieces, mut start, mut bytes) = (Vec::new(), 0, 0);
    for (at, input) in inputs.iter().enumerate() {
        bytes += input.bytes();
        if bytes >= PIECE_BYTES {
            pieces.push(start..at + 1);
            (start, bytes) = (at + 1, 0);
        }
    }
    if start < inputs.len() {
        pieces.push(start..inputs.len());
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_texts_once_and_in_order() {
        let inputs =
            |sizes: &[usize]| -> Vec<Input> { sizes.iter().map(|size| Input::Text("a".repeat(*size))).collect() };
        for sizes in [&[][..], &[1], &[PIECE_BYTES], &[PIECE_BYTES - 1, 1, 1], &[5, PIECE_BYTES * 3, 0, 7], &[0, 0]] {
            let pieces = pieces(&inputs(sizes));
            let covered: Vec<usize> = pieces.iter().cloned().flatten().collect();
            assert_eq!(covered, (0..sizes.len()).collect::<Vec<_>>(), "{sizes:?}");
            for piece in pieces {
                let all_but_last: usize = sizes[piece.start..piece.end - 1].iter().sum();
                assert!(all_but_last < PIECE_BYTES, "{sizes:?}");
            }
        }
    }
}
