//! The schemas of the routes that take texts.

use super::{codes, list, object, text, to, uint};
use serde_json::{Value, json};

pub(super) fn all() -> Value {
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
