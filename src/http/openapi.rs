//! `/openapi.json`: every route, what it takes and what it answers. A test compares paths and methods with those of the router.

use super::AppState;
use super::error::Code;
use super::status::json_response;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::sync::Arc;

mod schemas;

/// One method of one path.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    /// The schema of the body that it takes.
    body: Option<&'static str>,
    answer: Answer,
    /// What it may refuse with, beside what every route may.
    errors: &'static [u16],
}

impl Operation {
    /// The schema of what it refuses with.
    fn error(&self) -> &'static str {
        super::text::form::schema(self.path)
    }
}

/// What an operation answers if all is well.
#[derive(Clone, Copy)]
enum Answer {
    /// JSON of this schema.
    Json(&'static str),
    /// The outputs of an inference: JSON, or JSON with binary tensors behind it.
    Tensors,
    /// JSON of this schema, or a page for those who read HTML.
    JsonOrPage(&'static str),
    /// Text of this media type.
    Text(&'static str),
    /// JSON of this schema if not, with 503.
    JsonOrNot(&'static str, &'static str),
}

const fn get(path: &'static str, answer: Answer, errors: &'static [u16], summary: &'static str) -> Operation {
    Operation { method: "get", path, summary, body: None, answer, errors }
}

const fn post(
    path: &'static str,
    body: &'static str,
    answer: Answer,
    errors: &'static [u16],
    summary: &'static str,
) -> Operation {
    Operation { method: "post", path, summary, body: Some(body), answer, errors }
}

/// A post that takes no body.
const fn ask(path: &'static str, answer: Answer, errors: &'static [u16], summary: &'static str) -> Operation {
    Operation { method: "post", path, summary, body: None, answer, errors }
}

/// What any route may refuse with: that there is no key.
const ALWAYS: [u16; 1] = [401];
const MODEL: &[u16] = &[400, 404, 503];
const INFER: &[u16] = &[400, 404, 408, 413, 415, 500, 501, 503, 504];
const TEI: &[u16] = &[400, 404, 408, 413, 415, 422, 424, 429, 500, 503, 504];
const TEXT: &[u16] = &[400, 404, 408, 413, 415, 500, 503, 504];
const CONTROL: &[u16] = &[400, 403, 404, 408, 413, 415, 500, 503];
const LOGGING: &[u16] = &[400, 408, 413, 415, 501, 503];
/// Of extensions that the server does not have.
const NEVER: &[u16] = &[501];
/// Bodies that may be missing.
const MAY_BE_EMPTY: [&str; 2] = ["Control", "IndexRequest"];
const BODY: &[u16] = &[400, 408, 413, 415, 503];

use Answer::{Json, JsonOrNot, JsonOrPage, Tensors, Text};

const OPERATIONS: &[Operation] = &[
    get("/", JsonOrPage("Alive"), &[], "Whether anybody answers; for a browser, a page that shows the server at work"),
    get("/metrics", Text("text/plain"), &[], "Metrics in the text format of Prometheus"),
    get("/openapi.json", Json("Any"), &[], "This document"),
    get("/v2", Json("ServerMetadata"), &[], "The server, and the extensions that work"),
    get("/v2/", Json("ServerMetadata"), &[], "The same"),
    get("/v2/health/live", Json("Live"), &[], "Whether the process lives; also while loading and draining"),
    get("/v2/health/ready", JsonOrNot("Ready", "NotReady"), &[], "Whether every model serves"),
    get("/v2/models", Json("Models"), &[], "The names of all models"),
    get("/v2/models/{model}", Json("ModelMetadata"), MODEL, "Inputs, outputs and versions of a model"),
    get("/v2/models/{model}/versions/{version}", Json("ModelMetadata"), MODEL, "The same of one version"),
    get("/v2/models/{model}/ready", JsonOrNot("ModelReady", "NotReady"), &[400, 404], "Whether a model serves"),
    get(
        "/v2/models/{model}/versions/{version}/ready",
        JsonOrNot("ModelReady", "NotReady"),
        &[400, 404],
        "Whether one version serves",
    ),
    get("/v2/models/{model}/config", Json("ModelConfig"), MODEL, "The configuration in Triton's words"),
    get("/v2/models/{model}/versions/{version}/config", Json("ModelConfig"), MODEL, "The same of one version"),
    post("/v2/models/{model}/infer", "InferRequest", Tensors, INFER, "Run a model on tensors"),
    post("/v2/models/{model}/versions/{version}/infer", "InferRequest", Tensors, INFER, "Run one version"),
    get("/v2/models/stats", Json("Statistics"), &[503], "The statistics of all models"),
    get("/v2/models/{model}/stats", Json("Statistics"), MODEL, "The statistics of every version that serves"),
    get("/v2/models/{model}/versions/{version}/stats", Json("Statistics"), MODEL, "The statistics of one version"),
    post("/v2/repository/models/{model}/load", "Control", Json("Any"), CONTROL, "Load a model, or load it anew"),
    post("/v2/repository/models/{model}/unload", "Control", Json("Any"), CONTROL, "Unload a model"),
    ask("/v2/repository/{repository}/index", Json("Any"), NEVER, "There is one repository, without a name"),
    ask("/v2/repository/{repository}/models/{model}/load", Json("Any"), NEVER, "The same"),
    ask("/v2/repository/{repository}/models/{model}/unload", Json("Any"), NEVER, "The same"),
    get("/v2/trace/setting", Json("Any"), NEVER, "There are no traces by request"),
    ask("/v2/trace/setting", Json("Any"), NEVER, "The same"),
    get("/v2/models/{model}/trace/setting", Json("Any"), NEVER, "The same"),
    ask("/v2/models/{model}/trace/setting", Json("Any"), NEVER, "The same"),
    get("/v2/logging", Json("LogSettings"), &[], "What is logged"),
    post("/v2/logging", "LogSettings", Json("LogSettings"), LOGGING, "The same, if nothing changes by it"),
    get("/v2/systemsharedmemory/status", Json("Nothing"), &[], "There is no shared memory"),
    get("/v2/systemsharedmemory/region/{region}/status", Json("Any"), &[404], "The same"),
    ask("/v2/systemsharedmemory/region/{region}/register", Json("Any"), NEVER, "The same"),
    ask("/v2/systemsharedmemory/region/{region}/unregister", Json("Any"), NEVER, "The same"),
    ask("/v2/systemsharedmemory/unregister", Json("Any"), NEVER, "The same"),
    get("/v2/cudasharedmemory/status", Json("Nothing"), &[], "The same"),
    get("/v2/cudasharedmemory/region/{region}/status", Json("Any"), &[404], "The same"),
    ask("/v2/cudasharedmemory/region/{region}/register", Json("Any"), NEVER, "The same"),
    ask("/v2/cudasharedmemory/region/{region}/unregister", Json("Any"), NEVER, "The same"),
    ask("/v2/cudasharedmemory/unregister", Json("Any"), NEVER, "The same"),
    get("/v1/models", Json("Any"), &[], "The models, in the words of OpenAI and KServe"),
    get("/v1/models/{model}", Json("Any"), MODEL, "TensorFlow Serving: the status of a model"),
    get("/v1/models/{model}/metadata", Json("Any"), MODEL, "TensorFlow Serving: the metadata of a model"),
    post("/v1/models/{model}:predict", "Predict", Json("Predictions"), INFER, "TensorFlow Serving: run a model"),
    get("/v1/models/{model}/versions/{version}", Json("Any"), MODEL, "TensorFlow Serving: the status of one version"),
    get(
        "/v1/models/{model}/versions/{version}/metadata",
        Json("Any"),
        MODEL,
        "TensorFlow Serving: the metadata of one version",
    ),
    post(
        "/v1/models/{model}/versions/{version}:predict",
        "Predict",
        Json("Predictions"),
        INFER,
        "TensorFlow Serving: run one version",
    ),
    get(
        "/v1/models/{model}/labels/{label}",
        Json("Any"),
        MODEL,
        "TensorFlow Serving: the status of the version with this label",
    ),
    get(
        "/v1/models/{model}/labels/{label}/metadata",
        Json("Any"),
        MODEL,
        "TensorFlow Serving: the metadata of the version with this label",
    ),
    post(
        "/v1/models/{model}/labels/{label}:predict",
        "Predict",
        Json("Predictions"),
        INFER,
        "TensorFlow Serving: run the version with this label",
    ),
    post("/v1/embeddings", "Embeddings", Json("EmbeddingList"), TEXT, "OpenAI: vectors for texts"),
    post("/openai/v1/embeddings", "Embeddings", Json("EmbeddingList"), TEXT, "The same, where KServe has it"),
    post("/embeddings", "Embeddings", Json("EmbeddingList"), TEXT, "The same, where Text Embeddings Inference has it"),
    post("/embed", "Embed", Json("Numbers"), TEI, "Text Embeddings Inference: a vector for each text"),
    post("/embed_all", "Embed", Json("Any"), TEI, "Text Embeddings Inference: a vector for each token of each text"),
    post(
        "/predict",
        "PredictTexts",
        Json("Any"),
        TEI,
        "Text Embeddings Inference: the classes of texts, or of pairs of them",
    ),
    post("/rerank", "Rerank", Json("Ranks"), TEI, "Text Embeddings Inference: how well texts answer a query"),
    post(
        "/similarity",
        "Similarity",
        Json("Similarities"),
        TEI,
        "Text Embeddings Inference: how near texts are to another",
    ),
    post("/tokenize", "Tokenize", Json("Any"), TEI, "Text Embeddings Inference: the tokens of texts"),
    post("/decode", "Decode", Json("Any"), TEI, "Text Embeddings Inference: the texts of tokens"),
    get("/info", Json("TeiInfo"), &[400, 404, 424, 503], "Text Embeddings Inference: what the model is"),
    post("/tei/{model}/embed", "Embed", Json("Numbers"), TEI, "The same by this model"),
    post("/tei/{model}/embed_all", "Embed", Json("Any"), TEI, "The same by this model"),
    post("/tei/{model}/predict", "PredictTexts", Json("Any"), TEI, "The same by this model"),
    post("/tei/{model}/rerank", "Rerank", Json("Ranks"), TEI, "The same by this model"),
    post("/tei/{model}/similarity", "Similarity", Json("Similarities"), TEI, "The same by this model"),
    post("/tei/{model}/tokenize", "Tokenize", Json("Any"), TEI, "The same by this model"),
    post("/tei/{model}/decode", "Decode", Json("Any"), TEI, "The same by this model"),
    get("/tei/{model}/info", Json("TeiInfo"), &[400, 404, 424, 503], "The same of this model"),
    post("/v2/repository/index", "IndexRequest", Json("Index"), BODY, "Every version with its state"),
];

/// The routes that exist only if there is an admin token.
const ADMIN: &[Operation] = &[
    get("/admin/memory", Json("Any"), &[], "Every number of the memory"),
    post("/admin/memory", "MemoryChange", Json("Any"), BODY, "Change the limits of the memory"),
];

pub(super) async fn document(State(state): State<Arc<AppState>>) -> Response {
    json_response(&build(state.keys.is_some(), state.admin.is_some()))
}

fn build(keys: bool, admin: bool) -> Value {
    let mut paths = Map::new();
    for operation in OPERATIONS.iter().chain(ADMIN.iter().filter(|_| admin)) {
        let path = paths.entry(operation.path).or_insert_with(|| json!({ "parameters": parameters(operation.path) }));
        let scheme = if operation.path.starts_with("/admin/") || guarded(operation.path) {
            Some("adminToken")
        } else {
            Some("apiKey").filter(|_| keys && !super::access::open(operation.path))
        };
        path[operation.method] = describe(operation, scheme);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": env!("CARGO_PKG_NAME"),
            "version": env!("CARGO_PKG_VERSION"),
            "description": env!("CARGO_PKG_DESCRIPTION"),
            "license": {"name": env!("CARGO_PKG_LICENSE"), "identifier": env!("CARGO_PKG_LICENSE")},
        },
        "paths": paths,
        "components": {
            "schemas": schemas::all(),
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer"},
                "adminToken": {"type": "http", "scheme": "bearer"},
            },
        },
    })
}

/// Whether loading or unloading is asked for, which takes the admin token.
fn guarded(path: &str) -> bool {
    path.starts_with("/v2/repository/models/")
}

/// The parameters that the braces of a path name.
fn parameters(path: &str) -> Vec<Value> {
    let names = path.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(name, _)| name);
    let schema = |name: &str| match name {
        "version" => json!({"type": "string", "pattern": "^[0-9]+$"}),
        _ => json!({"type": "string", "minLength": 1}),
    };
    names.map(|name| json!({"name": name, "in": "path", "required": true, "schema": schema(name)})).collect()
}

fn describe(operation: &Operation, scheme: Option<&str>) -> Value {
    let mut responses = Map::new();
    let content = |kind: &str, schema: &str| json!({ (kind): {"schema": {"$ref": reference(schema)}} });
    let good = match operation.answer {
        Json(schema) | JsonOrNot(schema, _) => content("application/json", schema),
        JsonOrPage(schema) => json!({
            "application/json": {"schema": {"$ref": reference(schema)}},
            "text/html": {"schema": {"type": "string"}},
        }),
        Text(kind) => json!({ (kind): {"schema": {"type": "string"}} }),
        Tensors => json!({
            "application/json": {"schema": {"$ref": reference("InferResponse")}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        }),
    };
    responses.insert("200".to_owned(), json!({"description": "as wished", "content": good}));
    if let JsonOrNot(_, schema) = operation.answer {
        let not = json!({"description": "not now", "content": content("application/json", schema)});
        responses.insert("503".to_owned(), not);
    }
    for status in operation.errors.iter().chain(&ALWAYS) {
        let refusal = json!({
            "description": "the body says what is wrong and what to do",
            "content": content("application/json", operation.error()),
        });
        responses.entry(status.to_string()).or_insert(refusal);
    }
    let mut described = json!({"summary": operation.summary, "responses": responses});
    if let Some(schema) = operation.body {
        let mut content = content("application/json", schema);
        if matches!(operation.answer, Tensors) {
            content["application/octet-stream"] = json!({"schema": {"type": "string", "format": "binary"}});
        }
        described["requestBody"] = json!({"required": !MAY_BE_EMPTY.contains(&schema), "content": content});
    }
    if matches!(operation.answer, Tensors) {
        let length = json!({"type": "integer", "minimum": 0});
        described["parameters"] = json!([
            {"name": "Inference-Header-Content-Length", "in": "header", "schema": length,
             "description": "the bytes of JSON in front of binary tensors"},
        ]);
    }
    if let Some(scheme) = scheme {
        described["security"] = json!([{ (scheme): [] }]);
    }
    described
}

fn reference(schema: &str) -> String {
    format!("#/components/schemas/{schema}")
}

/// The words of all failures.
fn codes() -> Vec<&'static str> {
    Code::ALL.iter().map(|code| code.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reference_leads_somewhere_and_every_schema_is_used() {
        let document = build(true, true);
        let text = document.to_string();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let referred: Vec<&str> =
            text.split("#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        for name in &referred {
            assert!(schemas.contains_key(*name), "{name}");
        }
        for name in schemas.keys() {
            assert!(referred.contains(&name.as_str()), "{name} is not used");
        }
    }

    #[test]
    fn parameters_are_those_of_the_path() {
        let names: Vec<Value> = parameters("/a/{model}/b/{version}").into_iter().map(|it| it["name"].clone()).collect();
        assert_eq!(names, ["model", "version"]);
        assert!(parameters("/a").is_empty());
    }
}
