//! The schemas that the operations refer to.

use super::codes;
use crate::tensor::{DataType, MAX_RANK};
use serde_json::{Value, json};

mod text;

/// An object with these properties, all of them required.
fn object(properties: &Value) -> Value {
    let required: Vec<String> = properties.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default();
    json!({"type": "object", "properties": properties, "required": required})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn list(items: &Value) -> Value {
    json!({"type": "array", "items": items})
}

fn to(schema: &str) -> Value {
    json!({"$ref": super::reference(schema)})
}

fn uint() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": u64::MAX})
}

pub(super) fn all() -> Value {
    let mut schemas = json!({
        "Any": {},
        "Error": object(&json!({"error": text(), "code": {"type": "string", "enum": codes()}})),
        "Alive": object(&json!({"status": {"const": "alive"}})),
        "Live": object(&json!({"live": {"const": true}})),
        "Ready": object(&json!({"live": {"const": true}, "ready": {"const": true}})),
        "ModelReady": object(&json!({"name": text(), "ready": {"const": true}})),
        "NotReady": object(&json!({"ready": {"const": false}, "error": text(), "code": {"const": "unavailable"}})),
        "Index": list(&object(&json!({
            "name": text(),
            "version": text(),
            "state": {"enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
            "reason": text(),
        }))),
        "Control": {"type": "object", "properties": {"parameters": {"type": "object"}}},
        "LogSettings": {
            "type": "object",
            "description": "what is missing or null is not to be changed",
        },
        "Predict": {
            "type": "object",
            "description": "either instances, one for each row, or inputs, whole tensors by name",
            "properties": {"instances": list(&json!({})), "inputs": {}, "signature_name": text()},
        },
        "Predictions": {"type": "object", "properties": {"predictions": list(&json!({})), "outputs": {}}},
        "IndexRequest": {"type": "object", "properties": {"ready": {"type": "boolean"}}},
        "MemoryChange": {
            "type": "object",
            "additionalProperties": false,
            "properties": {"device": uint(), "limit": {"type": ["string", "integer"]}, "headroom": {"type": ["string", "integer"]}},
        },
    });
    for more in [descriptions(), inference(), text::openai(), text::tei()] {
        if let (Some(all), Value::Object(more)) = (schemas.as_object_mut(), more) {
            all.extend(more);
        }
    }
    schemas
}

/// What the server and its models say of themselves.
fn descriptions() -> Value {
    json!({
        "ServerMetadata": object(&json!({"name": text(), "version": text(), "extensions": list(&text())})),
        "Models": object(&json!({"models": list(&text())})),
        "DataType": {"type": "string", "enum": DataType::ALL.map(DataType::name)},
        "TensorMetadata": object(&json!({
            "name": text(),
            "datatype": to("DataType"),
            "shape": list(&json!({"type": "integer", "minimum": -1})),
        })),
        "ModelMetadata": object(&json!({
            "name": text(),
            "versions": list(&text()),
            "platform": text(),
            "inputs": list(&to("TensorMetadata")),
            "outputs": list(&to("TensorMetadata")),
        })),
        "ModelConfig": object(&json!({
            "name": text(),
            "max_batch_size": uint(),
            "input": list(&json!({"type": "object"})),
            "output": list(&json!({"type": "object"})),
        })),
        "Nothing": {"type": "array", "maxItems": 0},
        "Statistics": object(&json!({
            "model_stats": list(&object(&json!({
                "name": text(),
                "version": {"type": "string", "pattern": "^[0-9]+$"},
                "last_inference": uint(),
                "inference_count": uint(),
                "execution_count": uint(),
                "inference_stats": {"type": "object"},
                "batch_stats": list(&json!({"type": "object"})),
                "memory_usage": list(&json!({"type": "object"})),
            }))),
        })),
    })
}

/// Requests and answers of an inference.
fn inference() -> Value {
    let shape = json!({"type": "array", "items": uint(), "maxItems": MAX_RANK});
    json!({
        "Data": {
            "type": "array",
            "description": "elements in row-major order, flat or nested; NaN and infinities as the bare words",
            "items": {"anyOf": [{"type": ["number", "boolean", "string"]}, to("Data")]},
        },
        "InferInput": {
            "type": "object",
            "required": ["name", "shape", "datatype"],
            "properties": {
                "name": text(),
                "shape": shape,
                "datatype": to("DataType"),
                "data": to("Data"),
                "parameters": {"type": "object", "properties": {"binary_data_size": uint()}},
            },
        },
        "InferRequest": {
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "id": text(),
                "inputs": list(&to("InferInput")),
                "outputs": list(&json!({
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": text(),
                        "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
                    },
                })),
                "parameters": {
                    "type": "object",
                    "properties": {
                        "priority": uint(),
                        "timeout": uint(),
                        "binary_data_output": {"type": "boolean"},
                    },
                },
            },
        },
        "InferResponse": {
            "type": "object",
            "required": ["model_name", "model_version", "outputs"],
            "properties": {
                "id": text(),
                "model_name": text(),
                "model_version": {"type": "string", "pattern": "^[0-9]+$"},
                "outputs": list(&json!({
                    "type": "object",
                    "required": ["name", "datatype", "shape"],
                    "properties": {
                        "name": text(),
                        "datatype": to("DataType"),
                        "shape": shape,
                        "data": to("Data"),
                        "parameters": object(&json!({"binary_data_size": uint()})),
                    },
                })),
            },
        },
    })
}
