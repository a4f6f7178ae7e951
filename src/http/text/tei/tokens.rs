//! `/tokenize` and `/decode`: what a tokenizer does, without its model.

use super::{Named, Opened, TEXTS, prompt};
use crate::http::encode::{integer, string};
use crate::http::error::ApiError;
use crate::http::text::answers::{list, object};
use crate::http::text::input::{Fields, Input, Inputs, Wanted};
use crate::http::text::{Work, pieces};
use crate::http::{AppState, Outcome};
use crate::model::ModelSpec;
use crate::text::Piece;
use axum::extract::{Request, State};
use axum::response::Response;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most bytes of an answer: the tokens of the longest text that there may be by default fit.
const MOST_SHOWN: usize = 24 << 20;

route!(
    /// `POST /tokenize`: the tokens of texts.
    tokenize, TEXTS, tokenized
);
route!(
    /// `POST /decode`: the texts of tokens.
    decode, TEXTS, decoded
);

struct Tokenize {
    inputs: Inputs,
    add_special_tokens: Option<bool>,
    prompt: Option<String>,
}

impl Wanted for Tokenize {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self {
            inputs: fields.required("inputs")?,
            add_special_tokens: fields.optional("add_special_tokens")?,
            prompt: fields.optional("prompt_name")?,
        })
    }
}

async fn tokenized(opened: Opened<'_, Tokenize>) -> Result<Response, ApiError> {
    let Opened { work, wanted, model, text, _room } = opened;
    let inputs = wanted.inputs;
    work.check(&inputs, "inputs")?;
    let prompt = prompt(&text, wanted.prompt.as_deref())?;
    let special = wanted.add_special_tokens.unwrap_or(true);
    let ranges = pieces(&inputs.list);
    let show = move |at: usize| {
        let Input::Text(input) = &inputs.list[at] else {
            let message = "inputs are token ids already; send texts".to_owned();
            return Err(ApiError::Field { field: "inputs", message });
        };
        let tokens = text.tokenizer.pieces(&[&*prompt, input].concat(), special);
        let tokens = tokens.map_err(|fault| ApiError::Tokenizer(format!("{} {fault}", inputs.name("inputs", at))))?;
        let mut out = Vec::new();
        list(&mut out, &tokens, piece);
        Ok(out)
    };
    shown(&work, &model, (ranges, "inputs"), show).await
}

/// A list with what is shown of each text, which is made by the threads a few texts at a time. It is many times as long as the
/// texts, and no longer than [`MOST_SHOWN`].
async fn shown(
    work: &Work<'_>,
    model: &ModelSpec,
    (ranges, field): (Vec<Range<usize>>, &'static str),
    show: impl Fn(usize) -> Result<Vec<u8>, ApiError> + Send + Sync + 'static,
) -> Result<Response, ApiError> {
    let total = AtomicUsize::new(0);
    let bounded = move |at| {
        let one = show(at)?;
        if total.fetch_add(one.len(), Ordering::Relaxed) + one.len() > MOST_SHOWN {
            let message = format!("{field} would be answered with more than {MOST_SHOWN} bytes; send fewer at once");
            return Err(ApiError::Field { field, message });
        }
        Ok(one)
    };
    let each = work.each(ranges, bounded).await?;
    let write = move || {
        let mut out = Vec::with_capacity(each.iter().map(|one| one.len() + 1).sum::<usize>() + 2);
        list(&mut out, &each, |out, one| out.extend_from_slice(one));
        out
    };
    work.answer(model, write).await
}

fn piece(out: &mut Vec<u8>, piece: &Piece) {
    object(out, |entry| {
        integer(entry.key("id"), piece.id);
        string(entry.key("text"), &piece.text);
        entry.key("special").extend_from_slice(if piece.special { b"true" } else { b"false" });
        for (key, at) in [("start", piece.place.map(|place| place.0)), ("stop", piece.place.map(|place| place.1))] {
            match at {
                Some(at) => integer(entry.key(key), at),
                None => entry.key(key).extend_from_slice(b"null"),
            }
        }
    });
}

struct Decode {
    ids: Inputs,
    skip_special_tokens: Option<bool>,
}

impl Wanted for Decode {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self { ids: fields.required("ids")?, skip_special_tokens: fields.optional("skip_special_tokens")? })
    }
}

async fn decoded(opened: Opened<'_, Decode>) -> Result<Response, ApiError> {
    let Opened { work, wanted, model, text, _room } = opened;
    work.check(&wanted.ids, "ids")?;
    let skip = wanted.skip_special_tokens.unwrap_or(true);
    let ids = wanted.ids;
    let ranges = pieces(&ids.list);
    let show = move |at: usize| {
        let Input::Ids(tokens) = &ids.list[at] else {
            let message = "ids are texts already; send token ids".to_owned();
            return Err(ApiError::Field { field: "ids", message });
        };
        let decoded = text.tokenizer.decode(tokens, skip);
        let decoded = decoded.map_err(|fault| ApiError::Tokenizer(format!("{} {fault}", ids.name("ids", at))))?;
        let mut out = Vec::new();
        string(&mut out, &decoded);
        Ok(out)
    };
    shown(&work, &model, (ranges, "ids"), show).await
}
