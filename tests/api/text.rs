//! Routes that take texts. The model that answers here gives for each text the mean of its token ids and their number, so that
//! every expectation is plain arithmetic; words are ids from 10 on, between 1 and 2 (tests/text/tokenizer.json).

use crate::support::{App, Reply, app_answering, app_with, app_with_jobs, echo, tensor};
use axum::body::Body;
use axum::http::Request;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use concertina::batcher::InferError;
use concertina::http::ApiKeys;
use concertina::model::text::Ends;
use concertina::model::{Dim, InferResponse, ModelSpec, OutputTensor, Settings, TensorSpec, TextModel, ValidRequest};
use concertina::tensor::{DataType, Tensor};
use concertina::text::{Folder, Tokenizer};
use serde_json::{Value, json};
use std::sync::Arc;

const WORDS: &str = include_str!("../text/tokenizer.json");

pub(crate) fn matrix(name: &str, datatype: DataType, second: Dim) -> TensorSpec {
    TensorSpec { name: name.to_owned(), datatype, shape: vec![Dim::Symbol("batch".to_owned()), second] }
}

/// A model of this name with texts; `settings` is its model.toml, `output` the name and the width of its one output.
pub(crate) fn model(name: &str, settings: &str, output: (&str, usize), folder: &Folder) -> ModelSpec {
    let input = |name| matrix(name, DataType::Int64, Dim::Symbol("sequence".to_owned()));
    let inputs = vec![input("input_ids"), input("attention_mask")];
    let outputs = vec![matrix(output.0, DataType::Fp32, Dim::Fixed(output.1))];
    text_model(name, settings, inputs, outputs, folder)
}

/// The same with these inputs and outputs.
pub(crate) fn text_model(
    name: &str,
    settings: &str,
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
    folder: &Folder,
) -> ModelSpec {
    let settings = Settings::from_toml(settings, "model.toml", &Settings::default_keys()).unwrap();
    let mut spec = ModelSpec { inputs, outputs, settings, ..echo(name, Vec::new()) };
    let ends = Ends { inputs: &spec.inputs, outputs: &spec.outputs, batch_axis: Some(0), settings: &spec.settings };
    let text = TextModel::derive(ends, folder, Tokenizer::from_bytes(WORDS.as_bytes()).unwrap()).unwrap();
    spec.text = Some(Arc::new(text));
    spec
}

/// The usual one: at most 12 tokens.
pub(crate) fn embedder(settings: &str) -> ModelSpec {
    let folder = Folder { max_tokens: Some(12), ..Folder::default() };
    model("m", settings, ("sentence_embedding", 2), &folder)
}

fn integers(tensor: &Tensor) -> Vec<i64> {
    let data = tensor.data.to_contiguous();
    data.chunks(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// For each row the mean of the ids that the mask lets through, and how many those are.
pub(crate) fn mean_and_count(request: &ValidRequest) -> Result<InferResponse, InferError> {
    let [ids, mask] = [&request.inputs[0], &request.inputs[1]];
    let (length, width) = (ids.shape[1], request.model.outputs[0].wire_shape()[1] as usize);
    let (ids, mask) = (integers(ids), integers(mask));
    let mut data = Vec::new();
    for (ids, mask) in ids.chunks(length).zip(mask.chunks(length)) {
        let count = mask.iter().sum::<i64>() as f32;
        let sum: i64 = ids.iter().zip(mask).map(|(id, mask)| id * mask).sum();
        let row = [sum as f32 / count, count, 0.0];
        row[..width].iter().for_each(|value| data.extend_from_slice(&value.to_le_bytes()));
    }
    let shape = [request.rows as usize, width].as_slice().into();
    let tensor = Tensor { datatype: DataType::Fp32, shape, data: data.into() };
    Ok(InferResponse { outputs: vec![OutputTensor { index: 0, tensor }] })
}

fn app(settings: &str) -> App {
    app_answering(vec![embedder(settings), echo("tensors", vec![tensor("x", DataType::Uint8)])], mean_and_count)
}

pub(crate) async fn post(app: &App, path: &str, body: &Value) -> Reply {
    app.send(Request::post(path).body(Body::from(body.to_string())).unwrap()).await
}

/// The vectors that `/v1/embeddings` answers, as they are.
async fn vectors(app: &App, input: Value) -> Vec<[f64; 2]> {
    let reply = post(app, "/v1/embeddings", &json!({"input": input, "model": "m"})).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let json = reply.json();
    let list = json["data"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let row = |(at, entry): (usize, &Value)| {
        assert_eq!((&entry["index"], &entry["object"]), (&json!(at), &json!("embedding")));
        let pair = entry["embedding"].as_array().unwrap();
        assert_eq!(pair.len(), 2);
        [number(&pair[0]), number(&pair[1])]
    };
    list.iter().enumerate().map(row).collect()
}

const RAW: &str = "[text]\nnormalize = false";

#[tokio::test]
async fn every_form_of_input_has_its_vectors_in_order() {
    let app = app(RAW);
    // [1, 10, 11, 2]
    assert_eq!(vectors(&app, json!("a b")).await, [[6.0, 4.0]]);
    assert_eq!(vectors(&app, json!(["a b", "d"])).await, [[6.0, 4.0], [16.0 / 3.0, 3.0]].map(|row| row.map(rounded)));
    // Ids are taken as they are: nothing is put around them.
    assert_eq!(vectors(&app, json!([10, 12])).await, [[11.0, 2.0]]);
    assert_eq!(vectors(&app, json!([[10], [12, 14], [13]])).await, [[10.0, 1.0], [13.0, 2.0], [13.0, 1.0]]);
    // Of different lengths, so that they run in two parts.
    let long = "a a a a a a a a a a";
    let got = vectors(&app, json!([long, "a b", long, "b b"])).await;
    let ones = rounded(103.0 / 12.0);
    assert_eq!(got, [[ones, 12.0], [6.0, 4.0], [ones, 12.0], [rounded(25.0 / 4.0), 4.0]]);
}

/// A float as JSON has it: the shortest text that means it.
fn rounded(value: f64) -> f64 {
    (value as f32).to_string().parse().unwrap()
}

#[tokio::test]
async fn usage_counts_tokens_and_vectors_have_unit_length_unless_told_otherwise() {
    let app = app("");
    let json = post(&app, "/v1/embeddings", &json!({"input": ["a b", "d"], "model": "m"})).await.json();
    assert_eq!(json["usage"], json!({"prompt_tokens": 7, "total_tokens": 7}));
    assert_eq!((&json["object"], &json["model"]), (&json!("list"), &json!("m")));
    for entry in json["data"].as_array().unwrap() {
        let pair: Vec<f64> = entry["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        assert!((pair[0].hypot(pair[1]) - 1.0).abs() < 1e-6, "{pair:?}");
    }
    // Aliases, unknown keys, and what the answer leaves for whoever counts.
    for path in ["/openai/v1/embeddings", "/embeddings"] {
        let reply = post(&app, path, &json!({"input": "a", "model": "m", "user": "me", "new": {}})).await;
        assert_eq!(reply.status, 200, "{path}");
        let outcome = reply.outcome.unwrap();
        assert_eq!((outcome.rows, outcome.failure, outcome.model.unwrap().name.as_str()), (1, None, "m"));
    }
}

#[tokio::test]
async fn base64_holds_the_same_floats() {
    let request = |format: &str| json!({"input": ["a b", "c"], "model": "m", "encoding_format": format});
    let app = app("");
    let floats = post(&app, "/v1/embeddings", &request("float")).await.json();
    let packed = post(&app, "/v1/embeddings", &request("base64")).await.json();
    for (at, entry) in packed["data"].as_array().unwrap().iter().enumerate() {
        let bytes = STANDARD.decode(entry["embedding"].as_str().unwrap()).unwrap();
        let values: Vec<f32> = bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let plain = floats["data"][at]["embedding"].as_array().unwrap();
        let plain: Vec<f32> = plain.iter().map(|value| value.as_f64().unwrap() as f32).collect();
        assert_eq!(values, plain);
    }
}

#[tokio::test]
async fn fewer_dimensions_are_the_first_ones_at_unit_length() {
    let ask = |dimensions: i64| json!({"input": "a b", "model": "m", "dimensions": dimensions});
    let short = post(&app(""), "/v1/embeddings", &ask(1)).await.json();
    assert_eq!(short["data"][0]["embedding"], json!([1.0]));
    for dimensions in [0, 3] {
        let reply = post(&app(""), "/v1/embeddings", &ask(dimensions)).await;
        let error = refused(&reply, 400);
        assert_eq!(error["param"], "dimensions");
        assert!(error["message"].as_str().unwrap().contains("from 1 to 2"), "{error}");
    }
}

/// The error of OpenAI's form.
fn refused(reply: &Reply, status: u16) -> Value {
    assert_eq!(reply.status.as_u16(), status, "{}", reply.text());
    let error = reply.json()["error"].clone();
    assert!(error["message"].is_string() && error["type"].is_string() && error["code"].is_string(), "{error}");
    error
}

#[tokio::test]
async fn faults_name_the_field_and_what_to_do() {
    let app = app("");
    let long = "a ".repeat(11);
    let many = vec!["a"; 101];
    for (body, status, param, part) in [
        (json!({"input": "", "model": "m"}), 400, "input", "input is empty"),
        (json!({"input": [], "model": "m"}), 400, "input", "input is empty; send at least one"),
        (json!({"input": ["a", ""], "model": "m"}), 400, "input", "input[1] is empty"),
        (json!({"input": [[10], []], "model": "m"}), 400, "input", "input[1] is empty"),
        (json!({"input": [10, 99], "model": "m"}), 400, "input", "token id 99"),
        (json!({"input": many, "model": "m"}), 400, "input", "at most 100"),
        (json!({"input": "a".repeat(1001), "model": "m"}), 400, "input", "has 1001 bytes; send at most 1000"),
        (
            json!({"input": ["a", long], "model": "m"}),
            400,
            "input",
            "input[1] has 13 tokens, and the model takes at most 12",
        ),
        (json!({"input": "a", "model": "m", "encoding_format": "int8"}), 400, "encoding_format", "neither 'float'"),
        (json!({"input": "a", "model": "x"}), 404, "model", "GET /v2/models"),
        (json!({"input": "a", "model": "tensors"}), 400, "model", "takes no texts"),
    ] {
        let reply = post(&app, "/v1/embeddings", &body).await;
        let error = refused(&reply, status);
        assert_eq!(error["param"], param, "{body}");
        assert!(error["message"].as_str().unwrap().contains(part), "{body}: {error}");
    }
    for (body, param, part) in [
        (json!({"model": "m"}), json!("input"), "input is missing"),
        (json!({"input": null, "model": "m"}), json!("input"), "input is missing"),
        (json!({"input": "a"}), json!("model"), "model is missing"),
        (json!({"input": ["a", 1], "model": "m"}), json!("input"), "input: the list mixes kinds"),
        (json!({"input": "a", "model": 5}), json!("model"), "model: invalid type"),
        (json!({"input": "a", "model": "m", "dimensions": -1}), json!("dimensions"), "dimensions: invalid value"),
        (json!({"input": "a", "model": "m", "dimensions": "2"}), json!("dimensions"), "expected a whole number"),
        (json!({"input": [["a"]], "model": "m"}), json!("input"), "expected a token id"),
        (json!([]), Value::Null, "not a JSON object"),
    ] {
        let error = refused(&post(&app, "/v1/embeddings", &body).await, 400);
        assert_eq!(error["param"], param, "{body}");
        assert!(error["message"].as_str().unwrap().contains(part), "{body}: {error}");
    }
}

#[tokio::test]
async fn an_error_repeats_no_more_than_a_part_of_what_was_sent() {
    let long = "é".repeat(100_000);
    for body in [json!({"input": "a", "model": long}), json!({"input": "a", "model": "m", "encoding_format": long})] {
        let reply = post(&app(""), "/v1/embeddings", &body).await;
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!((reply.status.is_client_error(), message.chars().count()), (true, 1001), "{}", reply.status);
        assert!(message.ends_with("é…"), "{message}");
    }
}

#[tokio::test]
async fn long_texts_are_cut_where_the_model_says_so() {
    let app = app("[text]\nnormalize = false\ntruncate = true\ntruncation_direction = \"left\"");
    let text = ["a a a", &"b ".repeat(10)].join(" ");
    assert_eq!(vectors(&app, json!(text)).await, [[rounded(113.0 / 12.0), 12.0]]);
}

#[tokio::test]
async fn the_default_prompt_comes_first() {
    let app = app("[text]\nnormalize = false\ndefault_prompt = \"q\"\n[text.prompts]\nq = \"d \"");
    // [1, 13, 10, 2]
    assert_eq!(vectors(&app, json!("a")).await, [[6.5, 4.0]]);
}

#[tokio::test]
async fn errors_of_what_surrounds_the_route_have_its_form_too() {
    let app = app_with(|state| {
        let keys: ApiKeys = ["key"].into_iter().collect();
        state.keys = Some(Arc::new(arc_swap::ArcSwap::from_pointee(keys)));
    });
    let error = refused(&post(&app, "/v1/embeddings", &json!({"input": "a", "model": "m"})).await, 401);
    assert_eq!(error["code"], "unauthorized");
    let app = self::app("");
    let error = refused(&app.get("/v1/embeddings").await, 405);
    assert_eq!(error["code"], "method_not_allowed");
    let error =
        refused(&app.send(Request::post("/v1/embeddings").body(Body::from(vec![b' '; 2 << 20])).unwrap()).await, 413);
    assert_eq!(error["code"], "body_too_large");
}

#[tokio::test]
async fn what_fails_behind_the_route_fails_the_whole_request_in_its_form() {
    fn fails(_: &ValidRequest) -> Result<InferResponse, InferError> {
        Err(InferError::Model("on purpose".to_owned()))
    }
    fn not_a_number(request: &ValidRequest) -> Result<InferResponse, InferError> {
        let mut answer = mean_and_count(request)?;
        answer.outputs[0].tensor.data = vec![0xff; answer.outputs[0].tensor.data.len()].into();
        Ok(answer)
    }
    for (answer, part) in [(fails as crate::support::Answer, "on purpose"), (not_a_number, "not a number")] {
        let app = app_answering(vec![embedder("")], answer);
        let reply = post(&app, "/v1/embeddings", &json!({"input": ["a", "b"], "model": "m"})).await;
        let error = refused(&reply, 500);
        assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &json!("device_error")));
        assert!(error["message"].as_str().unwrap().contains(part), "{error}");
        assert!(reply.outcome.unwrap().failure.is_some());
    }
}

#[tokio::test]
async fn a_request_whose_client_goes_is_cancelled_behind_the_route() {
    let (app, mut jobs) = app_with_jobs(vec![embedder("")], 4);
    let body = json!({"input": "a", "model": "m"}).to_string();
    let request = Request::post("/v1/embeddings").body(Body::from(body)).unwrap();
    let asking = tokio::spawn(async move { app.send(request).await });
    let job = jobs.recv().await.unwrap();
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    assert!(job.reply.is_closed());
}

#[tokio::test]
async fn no_more_requests_with_texts_are_inside_than_may_be() {
    // The tests' server takes 16.
    let (app, mut jobs) = app_with_jobs(vec![embedder("")], 64);
    let app = Arc::new(app);
    let ask = |app: Arc<App>| async move { post(&app, "/v1/embeddings", &json!({"input": "a", "model": "m"})).await };
    let asking: Vec<_> = (0..16).map(|_| tokio::spawn(ask(Arc::clone(&app)))).collect();
    let mut inside = Vec::new();
    for _ in 0..16 {
        inside.push(jobs.recv().await.unwrap());
    }
    let reply = ask(Arc::clone(&app)).await;
    assert_eq!(refused(&reply, 503)["code"], "overloaded");
    assert!(reply.header("retry-after").is_some());
    for job in inside {
        let _gone = job.reply.send(mean_and_count(&job.request));
    }
    for asked in asking {
        assert_eq!(asked.await.unwrap().status, 200);
    }
}
