//! TensorFlow Serving's REST interface, against the examples of its documentation and its rules.

use crate::support::{App, Reply, app_answering, app_with_jobs, echo, echo_app, give_back, tensor};
use axum::body::Body;
use axum::http::Request;
use concertina::batcher::InferError;
use concertina::model::{Dim, InferResponse, ModelSpec, ModelState, OutputTensor, Table, TensorSpec, ValidRequest};
use concertina::tensor::{DataType, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

fn one(datatype: DataType) -> App {
    echo_app(vec![tensor("x", datatype)])
}

/// A model with a scalar for each row.
fn scalars(datatype: DataType) -> App {
    let spec = TensorSpec { name: "x".to_owned(), datatype, shape: vec![Dim::Symbol("batch".to_owned())] };
    app_answering(vec![echo("m", vec![spec])], give_back)
}

fn two() -> App {
    echo_app(vec![tensor("a", DataType::Int32), tensor("b", DataType::Bytes)])
}

async fn post(app: &App, path: &str, body: &str) -> Reply {
    app.send(Request::post(path).body(Body::from(body.to_owned())).unwrap()).await
}

async fn predict(app: &App, body: &str) -> Value {
    let reply = post(app, "/v1/models/m:predict", body).await;
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    reply.json()
}

#[tokio::test]
async fn rows_and_columns_answer_in_their_own_form() {
    let app = one(DataType::Fp32);
    for (body, answer) in [
        (r#"{"instances":[[1,2.5],[-3,1e2]]}"#, r#"{"predictions":[[1.0,2.5],[-3.0,100.0]]}"#),
        (r#"{"instances":[{"x":[1,2]}],"signature_name":"serving_default"}"#, r#"{"predictions":[[1.0,2.0]]}"#),
        (r#"{"inputs":[[1,2],[3,4]]}"#, r#"{"outputs":[[1.0,2.0],[3.0,4.0]]}"#),
        (r#"{"inputs":{"x":[[1,2]],"unknown":5},"signature_name":""}"#, r#"{"outputs":[[1.0,2.0]]}"#),
        (r#"{"instances":[[],[]]}"#, r#"{"predictions":[[],[]]}"#),
        (r#"{"instances":[[NaN,-Infinity]]}"#, r#"{"predictions":[[NaN,-Infinity]]}"#),
    ] {
        let reply = post(&app, "/v1/models/m:predict", body).await;
        assert_eq!((reply.status.as_u16(), reply.text()), (200, answer), "{body}");
        assert_eq!(reply.header("content-type"), Some("application/json"));
        assert_eq!(reply.outcome.unwrap().failure, None);
    }
    assert_eq!(predict(&scalars(DataType::Int64), r#"{"instances":[5,-6]}"#).await, json!({"predictions": [5, -6]}));
}

#[tokio::test]
async fn several_inputs_and_outputs_go_by_name() {
    let app = two();
    let answer = predict(&app, r#"{"instances":[{"a":[1],"b":["p"]},{"b":[{"b64":"cQ=="}],"a":[2]}]}"#).await;
    assert_eq!(answer, json!({"predictions": [{"a": [1], "b": ["p"]}, {"a": [2], "b": ["q"]}]}));
    let answer = predict(&app, r#"{"inputs":{"a":[[1],[2]],"b":[["p"],["q"]]}}"#).await;
    assert_eq!(answer, json!({"outputs": {"a": [[1], [2]], "b": [["p"], ["q"]]}}));
}

#[tokio::test]
async fn bytes_are_strings_or_base64() {
    let app = scalars(DataType::Bytes);
    for body in [
        r#"{"instances":["hé",{"b64":"aMOp"},{"x":"hé"},{"x":{"b64":"aMOp"}}]}"#,
        r#"{"inputs":["hé",{"b64":"aMOp"},"hé","hé"]}"#,
    ] {
        let answer = predict(&app, body).await;
        let list = answer.get("predictions").or(answer.get("outputs")).unwrap();
        assert_eq!(*list, json!(vec!["hé"; 4]), "{body}");
    }
    // What is no text has only one form in JSON; names that end in _bytes always have it.
    assert_eq!(predict(&app, r#"{"instances":[{"b64":"/w=="}]}"#).await, json!({"predictions": [{"b64": "/w=="}]}));
    let shape = vec![Dim::Symbol("batch".to_owned())];
    let spec = TensorSpec { name: "image_bytes".to_owned(), datatype: DataType::Bytes, shape };
    let answer = predict(&echo_app(vec![spec]), r#"{"instances":["abc"]}"#).await;
    assert_eq!(answer, json!({"predictions": [{"b64": "YWJj"}]}));
}

#[tokio::test]
async fn every_datatype_comes_back() {
    for datatype in DataType::ALL {
        let (row, answer) = match datatype {
            DataType::Bool => ("[true,false]", json!([true, false])),
            DataType::Bytes => (r#"["a",""]"#, json!(["a", ""])),
            DataType::Fp16 | DataType::Bf16 | DataType::Fp32 | DataType::Fp64 => ("[1,-0.5]", json!([1.0, -0.5])),
            _ => ("[7,0]", json!([7, 0])),
        };
        let answered = predict(&one(datatype), &format!(r#"{{"instances":[{row}]}}"#)).await;
        assert_eq!(answered, json!({"predictions": [answer]}), "{datatype}");
    }
}

#[tokio::test]
async fn wrong_requests_name_the_field() {
    let deep = format!(r#"{{"instances":{}1{}}}"#, "[".repeat(40), "]".repeat(40));
    let table = [
        (one(DataType::Int32), "{}", "needs instances (rows) or inputs (columns)"),
        (one(DataType::Int32), "[]", "the request must be an object"),
        (one(DataType::Int32), r#"{"instances":[[1]],"inputs":[[1]]}"#, "either instances (rows) or inputs (columns)"),
        (one(DataType::Int32), r#"{"instances":[]}"#, "instances is empty"),
        (one(DataType::Int32), r#"{"instances":5}"#, "instances must be an array"),
        (
            one(DataType::Int32),
            r#"{"instances":[[1],[1,2]]}"#,
            "instances[1]: input 'x' has shape [2] here and [1] before",
        ),
        (one(DataType::Int32), r#"{"inputs":[[1],[1,2]]}"#, "inputs: a list holds values of shapes [1] and [2]"),
        (one(DataType::Int32), r#"{"instances":[[1,[2]]]}"#, "instances[0]: a list holds values of shapes"),
        (one(DataType::Int32), r#"{"instances":[[1.5]]}"#, "instances[0] must be made of elements that are an integer"),
        (one(DataType::Int32), r#"{"instances":[["1"]]}"#, "instances[0] must be made of elements that are an integer"),
        (one(DataType::Uint8), r#"{"instances":[{"x":[256]}]}"#, "instances[0].x must be made of"),
        (one(DataType::Int32), r#"{"instances":[{"y":[1]}]}"#, "instances[0]: model 'm' has no input 'y'"),
        (one(DataType::Int32), r#"{"instances":[{"b64":"AA=="}]}"#, "has no input 'b64'"),
        (one(DataType::Int32), r#"{"instances":[{"x":[1],"x":[1]}]}"#, "input 'x' is given twice"),
        (one(DataType::Int32), r#"{"instances":[[[1]]]}"#, "has shape [1, 1, 1], but model 'm' expects [-1, -1]"),
        (one(DataType::Int32), &deep, "more than 32 dimensions"),
        (one(DataType::Int32), r#"{"instances":[[1]"#, "malformed JSON"),
        (one(DataType::Int32), r#"{"instances":[[1]],"signature_name":"other"}"#, "signature_name must be"),
        (two(), r#"{"instances":[{"a":[1]}]}"#, "instances[0]: input 'b' is missing"),
        (two(), r#"{"instances":[[1]]}"#, "instances[0] must be an object with the inputs 'a', 'b'"),
        (two(), r#"{"inputs":{"a":[[1]]}}"#, "inputs: 'b' is missing"),
        (two(), r#"{"inputs":{"a":[[1]],"b":[["x"],["y"]]}}"#, "make them equal"),
        (scalars(DataType::Bytes), r#"{"instances":[{"b64":"%"}]}"#, "instances[0].b64 is not base64"),
        (scalars(DataType::Bytes), r#"{"instances":[5]}"#, "must be made of strings"),
        (one(DataType::Bytes), r#"{"instances":[[{"c":"AA=="}]]}"#, "must be made of strings"),
    ];
    for (app, body, expected) in table {
        let reply = post(&app, "/v1/models/m:predict", body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert!(reply.error().0.contains(expected), "{body}: {} lacks {expected:?}", reply.text());
    }
}

#[tokio::test]
async fn outputs_without_common_rows_need_columns() {
    fn answer(request: &ValidRequest) -> Result<InferResponse, InferError> {
        let tensor = |index, shape: &[usize]| {
            let data = vec![0; shape.iter().product()].into();
            OutputTensor { index, tensor: Tensor { datatype: DataType::Uint8, shape: shape.into(), data } }
        };
        let _ = request;
        Ok(InferResponse { outputs: vec![tensor(0, &[2]), tensor(1, &[3])] })
    }
    let mut model = echo("m", vec![tensor("x", DataType::Uint8)]);
    model.outputs = vec![tensor("y", DataType::Uint8), tensor("z", DataType::Uint8)];
    let app = app_answering(vec![model], answer);
    let reply = post(&app, "/v1/models/m:predict", r#"{"instances":[[1]]}"#).await;
    assert_eq!((reply.status.as_u16(), reply.error().0.contains("send inputs instead of instances")), (400, true));
    assert_eq!(predict(&app, r#"{"inputs":[[1]]}"#).await, json!({"outputs": {"y": [0, 0], "z": [0, 0, 0]}}));
}

fn versions() -> App {
    let spec = |version| {
        let mut spec = echo("m", vec![tensor("x", DataType::Int32)]);
        (spec.version, spec.id.0) = (version, version as u32);
        spec.settings.version_labels = BTreeMap::from([("stable".to_owned(), 1)]);
        spec
    };
    app_answering(vec![spec(1), spec(2)], give_back)
}

#[tokio::test]
async fn models_versions_and_labels_are_found() {
    let app = versions();
    let body = r#"{"instances":[[1]]}"#;
    for (path, version) in [
        ("/v1/models/m:predict", 2),
        ("/v1/models/m/versions/1:predict", 1),
        ("/v1/models/m/versions/2:predict", 2),
        ("/v1/models/m/labels/stable:predict", 1),
    ] {
        let reply = post(&app, path, body).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        assert_eq!(reply.outcome.unwrap().model.unwrap().version, version, "{path}");
    }
    for (path, status, code) in [
        ("/v1/models/n:predict", 404, "model_not_found"),
        ("/v1/models/m/versions/3:predict", 404, "model_not_found"),
        ("/v1/models/m/versions/x:predict", 404, "not_found"),
        ("/v1/models/m/labels/canary:predict", 404, "model_not_found"),
        ("/v1/models/m:guess", 404, "not_found"),
        ("/v1/models/m:classify", 501, "unsupported"),
        ("/v1/models/m:regress", 501, "unsupported"),
        ("/v1/models/m", 405, "method_not_allowed"),
    ] {
        let reply = post(&app, path, body).await;
        assert_eq!((reply.status.as_u16(), &*reply.error().1), (status, code), "{path}");
    }
}

#[tokio::test]
async fn status_and_lists_speak_to_all_who_ask_there() {
    let app = versions();
    let version = |number: u64, state: &str| json!({"version": number.to_string(), "state": state, "status": {"error_code": "OK", "error_message": ""}});
    let status = app.get("/v1/models/m").await.json();
    assert_eq!(status["model_version_status"], json!([version(2, "AVAILABLE"), version(1, "AVAILABLE")]));
    assert_eq!([&status["name"], &status["id"]], [&json!("m"), &json!("m")]);
    assert_eq!((&status["ready"], &status["object"]), (&json!(true), &json!("model")));
    for path in ["/v1/models/m/versions/1", "/v1/models/m/labels/stable"] {
        assert_eq!(app.get(path).await.json()["model_version_status"], json!([version(1, "AVAILABLE")]), "{path}");
    }
    let list = app.get("/v1/models").await.json();
    assert_eq!(
        (&list["models"], &list["object"], &list["data"][0]["id"]),
        (&json!(["m"]), &json!("list"), &json!("m"))
    );
    let failed = ModelState::Unavailable { reason: "bad file".to_owned(), failed: true };
    let models = BTreeMap::from([("m".to_owned(), BTreeMap::from([(1, failed), (2, ModelState::Loading)]))]);
    app.models.store(Arc::new(Table { models, scanned: true, ..Table::default() }));
    let reply = app.get("/v1/models/m").await;
    assert_eq!(reply.status, 503);
    let bad =
        json!({"version": "1", "state": "END", "status": {"error_code": "UNAVAILABLE", "error_message": "bad file"}});
    assert_eq!(reply.json()["model_version_status"], json!([version(2, "LOADING"), bad]));
    assert_eq!((&reply.json()["ready"], reply.header("retry-after").is_some()), (&json!(false), true));
    for path in ["/v1/models/n", "/v1/models/m/versions/7"] {
        assert_eq!(app.get(path).await.error().1, "model_not_found", "{path}");
    }
}

#[tokio::test]
async fn metadata_has_the_signature() {
    let spec: ModelSpec = echo("m", vec![tensor("x", DataType::Fp16)]);
    let app = app_with_jobs(vec![spec], 1).0;
    for path in ["/v1/models/m/metadata", "/v1/models/m/versions/1/metadata"] {
        let metadata = app.get(path).await.json();
        assert_eq!(metadata["model_spec"], json!({"name": "m", "signature_name": "", "version": "1"}));
        let signature = &metadata["metadata"]["signature_def"]["signature_def"]["serving_default"];
        assert_eq!(signature["method_name"], "tensorflow/serving/predict");
        let dim = json!({"size": "-1", "name": ""});
        let tensor =
            json!({"name": "x", "dtype": "DT_HALF", "tensor_shape": {"dim": [dim, dim], "unknown_rank": false}});
        assert_eq!((&signature["inputs"]["x"], &signature["outputs"]["x"]), (&tensor, &tensor));
    }
}
