//! The schemas of the routes that take texts.

use super::{codes, list, object, text, to, uint};
use serde_json::{Value, json};

/// Those of OpenAI's routes.
pub(super) fn openai() -> Value {
    json!({
        "OpenAiError": object(&json!({"error": object(&json!({
            "message": text(),
            "type": {"enum": ["invalid_request_error", "server_error"]},
            "param": {"type": ["string", "null"]},
            "code": {"type": "string", "enum": codes()},
        }))})),
        "Embeddings": {
            "type": "object",
            "required": ["input", "model"],
            "properties": {
                "input": to("Texts"),
                "model": text(),
                "encoding_format": {"enum": ["float", "base64"]},
                "dimensions": {"type": "integer", "minimum": 1},
            },
        },
        "EmbeddingList": object(&json!({
            "object": {"const": "list"},
            "data": list(&object(&json!({
                "object": {"const": "embedding"},
                "index": uint(),
                "embedding": {"anyOf": [list(&json!({"type": "number"})), text()]},
            }))),
            "model": text(),
            "usage": object(&json!({"prompt_tokens": uint(), "total_tokens": uint()})),
        })),
        "Texts": {
            "description": "a text, a list of texts, a list of token ids, or a list of such lists",
            "anyOf": [text(), list(&text()), list(&uint()), list(&list(&uint()))],
        },
    })
}

/// Those of TEI's routes.
pub(super) fn tei() -> Value {
    json!({
        "TeiError": object(&json!({
            "error": text(),
            "error_type": {"enum": ["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]},
        })),
        "Embed": with_manner(&["inputs"], &json!({
            "inputs": to("Texts"),
            "normalize": {"type": "boolean"},
            "dimensions": {"type": "integer", "minimum": 1},
        })),
        "Numbers": list(&list(&json!({"type": "number"}))),
        "PredictTexts": with_manner(&["inputs"], &json!({
            "inputs": {"description": "a text, a pair of texts, or a list of lists of one or two texts"},
            "raw_scores": {"type": "boolean"},
        })),
        "Rerank": with_manner(&["query", "texts"], &json!({
            "query": text(),
            "texts": list(&text()),
            "raw_scores": {"type": "boolean"},
            "return_text": {"type": "boolean"},
        })),
        "Ranks": list(&json!({
            "type": "object",
            "required": ["index", "score"],
            "properties": {"index": uint(), "score": {"type": "number"}, "text": text()},
        })),
        "Similarity": {
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "inputs": object(&json!({"source_sentence": text(), "sentences": list(&text())})),
                "parameters": with_manner(&[], &json!({})),
            },
        },
        "Similarities": list(&json!({"type": "number"})),
        "Tokenize": {
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "inputs": {"anyOf": [text(), list(&text())]},
                "add_special_tokens": {"type": "boolean"},
                "prompt_name": text(),
            },
        },
        "Decode": {
            "type": "object",
            "required": ["ids"],
            "properties": {
                "ids": {"anyOf": [list(&uint()), list(&list(&uint()))]},
                "skip_special_tokens": {"type": "boolean"},
            },
        },
        "TeiInfo": {"type": "object", "required": ["model_id", "model_type", "max_input_length", "version"]},
    })
}

/// An object of these properties and of those that say how texts are treated.
fn with_manner(required: &[&str], properties: &Value) -> Value {
    let mut all = json!({
        "truncate": {"type": ["boolean", "null"]},
        "truncation_direction": {"enum": ["left", "right", "Left", "Right"]},
        "prompt_name": {"type": ["string", "null"]},
    });
    if let (Some(all), Some(more)) = (all.as_object_mut(), properties.as_object()) {
        all.extend(more.clone());
    }
    json!({"type": "object", "required": required, "properties": all})
}
