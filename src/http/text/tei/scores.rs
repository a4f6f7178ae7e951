//! `/predict` and `/rerank`: models that score texts.

use super::{Manner, Named, Opened};
use crate::http::encode::{float32, integer, string};
use crate::http::error::ApiError;
use crate::http::text::answers::{list, object};
use crate::http::text::input::{Fields, Inputs, Pairs, Wanted};
use crate::http::text::{Ability, Asked, Work};
use crate::http::{AppState, Outcome};
use crate::model::text::vectors;
use crate::model::{ModelSpec, Scores, TextModel};
use crate::text::Pooling;
use crate::text::pooling::probabilities;
use axum::extract::{Request, State};
use axum::response::Response;
use std::sync::Arc;

/// Scores for a text.
const SCORES: Ability = Ability { has: |text| text.scores.is_some(), lack: "is not a classifier or reranker" };
/// One score for a query and a text.
const RANKS: Ability =
    Ability { has: |text| text.scores.as_ref().is_some_and(Scores::ranks), lack: "is not a reranker" };
route!(
    /// `POST /predict`: the classes of texts, or of pairs of texts.
    predict, SCORES, predicted
);
route!(
    /// `POST /rerank`: how well texts answer a query.
    rerank, RANKS, reranked
);

struct Predict {
    inputs: Pairs,
    manner: Manner,
    raw_scores: Option<bool>,
}

impl Wanted for Predict {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self {
            inputs: fields.required("inputs")?,
            manner: Manner::read(fields)?,
            raw_scores: fields.optional("raw_scores")?,
        })
    }
}

/// The scores of texts, or of pairs, as a request wants them.
async fn scored(
    work: &mut Work<'_>,
    (model, text): (&Arc<ModelSpec>, &Arc<TextModel>),
    asked: Asked,
    raw: bool,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let Some(output) = text.scores.as_ref().map(|scores| scores.output) else { return Err(ApiError::Internal) };
    let tokens = work.tokenize(model, text, asked).await?;
    let read = |tensor: &_, lengths: &[usize]| vectors(tensor, lengths, Pooling::None);
    let mut rows = work.run((model, text), &tokens, output, read).await?;
    if !raw {
        rows.iter_mut().for_each(|row| probabilities(row));
    }
    Ok(rows)
}

async fn predicted(opened: Opened<'_, Predict>) -> Result<Response, ApiError> {
    let Opened { mut work, wanted, model, text, _room } = opened;
    let Pairs(inputs) = wanted.inputs;
    let many = inputs.many;
    work.check(&inputs, "inputs")?;
    let asked = wanted.manner.asked(&text, inputs, "inputs")?;
    let rows = scored(&mut work, (&model, &text), asked, wanted.raw_scores.unwrap_or(false)).await?;
    let write = move || {
        let labels = text.scores.as_ref().map_or(&[][..], |scores| &scores.labels);
        let mut out = Vec::new();
        let one = |out: &mut Vec<u8>, row: &Vec<f32>| {
            list(out, &ranked(row), |out, at| {
                let label = labels.get(*at).map_or("", String::as_str);
                object(out, |entry| {
                    float32(entry.key("score"), row[*at]);
                    string(entry.key("label"), label);
                });
            });
        };
        match rows.first() {
            Some(row) if !many => one(&mut out, row),
            _ => list(&mut out, &rows, one),
        }
        out
    };
    work.answer(&model, write).await
}

/// The positions of scores, the highest first; equal ones in their order.
fn ranked(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order
}

struct Rerank {
    query: String,
    texts: Vec<String>,
    manner: Manner,
    raw_scores: Option<bool>,
    return_text: Option<bool>,
}

impl Wanted for Rerank {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self {
            query: fields.required("query")?,
            texts: fields.required("texts")?,
            manner: Manner::read(fields)?,
            raw_scores: fields.optional("raw_scores")?,
            return_text: fields.optional("return_text")?,
        })
    }
}

async fn reranked(opened: Opened<'_, Rerank>) -> Result<Response, ApiError> {
    let Opened { mut work, wanted, model, text, _room } = opened;
    if wanted.query.is_empty() {
        return Err(ApiError::Nothing { field: "query" });
    }
    let texts = wanted.return_text.unwrap_or(false).then(|| wanted.texts.clone());
    let inputs = Inputs::pairs(&wanted.query, wanted.texts);
    work.check(&inputs, "texts")?;
    let asked = wanted.manner.asked(&text, inputs, "texts")?;
    let rows = scored(&mut work, (&model, &text), asked, wanted.raw_scores.unwrap_or(false)).await?;
    let scores: Vec<f32> = rows.into_iter().filter_map(|row| row.first().copied()).collect();
    let write = move || {
        let mut out = Vec::new();
        list(&mut out, &ranked(&scores), |out, at| {
            object(out, |entry| {
                integer(entry.key("index"), *at);
                float32(entry.key("score"), scores[*at]);
                if let Some(texts) = &texts {
                    string(entry.key("text"), &texts[*at]);
                }
            });
        });
        out
    };
    work.answer(&model, write).await
}
