//! `/tokenize` and `/decode`: what a tokenizer does, without its model.

use super::{Named, Opened, TEXTS, prompt};
use crate::http::encode::{integer, string};
use crate::http::error::ApiError;
use crate::http::text::answers::{list, object};
use crate::http::text::input::{Fields, Input, Inputs, Wanted};
use crate::http::{AppState, Outcome};
use crate::text::Piece;
use axum::extract::{Request, State};
use axum::response::Response;
use std::sync::Arc;

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
    let write = move || {
        let mut out = Vec::new();
        let mut each = Vec::new();
        for at in 0..inputs.list.len() {
            let Input::Text(input) = &inputs.list[at] else {
                let message = "inputs are token ids already; send texts".to_owned();
                return Err(ApiError::Field { field: "inputs", message });
            };
            let pieces = text.tokenizer.pieces(&[&*prompt, input].concat(), special);
            each.push(pieces.map_err(|fault| ApiError::Tokenizer(format!("{} {fault}", inputs.name("inputs", at))))?);
        }
        list(&mut out, &each, |out, pieces| list(out, pieces, piece));
        Ok(out)
    };
    work.answer_or(&model, write).await
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
    let write = move || {
        let mut texts = Vec::new();
        for at in 0..ids.list.len() {
            let Input::Ids(tokens) = &ids.list[at] else {
                let message = "ids are texts already; send token ids".to_owned();
                return Err(ApiError::Field { field: "ids", message });
            };
            let decoded = text.tokenizer.decode(tokens, skip);
            texts.push(decoded.map_err(|fault| ApiError::Tokenizer(format!("{} {fault}", ids.name("ids", at))))?);
        }
        let mut out = Vec::new();
        list(&mut out, &texts, |out, text| string(out, text));
        Ok(out)
    };
    work.answer_or(&model, write).await
}
