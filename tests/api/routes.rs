//! Everything but inference: routes, methods, health, metadata, ids.

use crate::support::{App, app_with_jobs, echo, echo_app, tensor};
use axum::body::Body;
use axum::http::Request;
use concertina::http::Phase;
use concertina::model::{Dim, ModelSpec, ModelState, Table};
use concertina::tensor::DataType;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;

fn fp32() -> Vec<concertina::model::TensorSpec> {
    vec![tensor("x", DataType::Fp32)]
}

fn app(specs: Vec<ModelSpec>) -> App {
    app_with_jobs(specs, 1).0
}

/// Replaces the table by one in which model `m` has these states.
fn publish(app: &App, states: Vec<(u64, ModelState)>) {
    let models = BTreeMap::from([("m".to_owned(), states.into_iter().collect())]);
    app.models.store(Arc::new(Table { models, scanned: true, ..Table::default() }));
}

#[tokio::test]
async fn unknown_routes_and_methods_are_told_apart() {
    let app = app(vec![echo("m", fp32())]);
    for path in ["/nothing", "/v2/health/live/", "/v2/models/m/", "/v2/models/m/infer/", "/v1", "/health", "/ping"] {
        let reply = app.get(path).await;
        assert_eq!(reply.status, 404, "{path}");
        assert_eq!(reply.json(), json!({"error": "Not Found", "code": "not_found"}));
    }
    for (method, path, allow) in [
        ("GET", "/v2/models/m/infer", "POST"),
        ("PUT", "/v2/models/m/infer", "POST"),
        ("POST", "/v2/health/live", "GET,HEAD"),
        ("DELETE", "/v2/models/m", "GET,HEAD"),
        ("GET", "/v2/repository/index", "POST"),
        ("GET", "/v1/models/m:predict", "POST"),
        ("HEAD", "/v1/models/m/labels/stable:predict", "POST"),
        ("DELETE", "/v1/models/m:predict", "POST"),
        ("POST", "/v1/models/m", "GET,HEAD"),
        ("PUT", "/v1/models/m/versions/1", "GET,HEAD"),
    ] {
        let reply = app.request(method, path).await;
        assert_eq!(reply.status, 405, "{method} {path}");
        if method != "HEAD" {
            assert_eq!(reply.json(), json!({"error": "Method Not Allowed", "code": "method_not_allowed"}));
        }
        assert_eq!(reply.header("allow"), Some(allow), "{method} {path}");
    }
}

#[tokio::test]
async fn a_path_that_is_no_text_names_nothing() {
    let app = app(vec![echo("m", fp32())]);
    for (method, path) in [
        ("GET", "/v2/models/%FF"),
        ("GET", "/v2/models/m/versions/%FF/ready"),
        ("POST", "/v2/models/%FF/infer"),
        ("GET", "/v1/models/%FF"),
        ("PUT", "/v1/models/%FF"),
        ("GET", "/v1/models/m/labels/%FF/metadata"),
        ("POST", "/v1/models/%FF:predict"),
        ("GET", "/v2/systemsharedmemory/region/%FF/status"),
        ("POST", "/v2/repository/models/%FF/load"),
        ("POST", "/v2/repository/models/%FF/unload"),
    ] {
        let reply = app.request(method, path).await;
        assert_eq!((reply.status.as_u16(), &*reply.error().1), (404, "not_found"), "{method} {path}");
    }
}

#[tokio::test]
async fn head_is_get_without_the_body() {
    let app = app(vec![echo("m", fp32())]);
    for path in ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/m", "/v2/models/m/ready"] {
        let (head, get) = (app.request("HEAD", path).await, app.get(path).await);
        assert_eq!((head.status.as_u16(), head.body.len()), (200, 0), "{path}");
        assert_eq!(head.header("content-length"), Some(&*get.body.len().to_string()));
    }
}

#[tokio::test]
async fn versions_in_the_path() {
    let mut second = echo("m", fp32());
    second.version = 2;
    let app = app(vec![echo("m", fp32()), second]);
    for (path, status) in [
        ("/v2/models/m/versions/1", 200),
        ("/v2/models/m/versions/002", 200),
        ("/v2/models/m/versions/3", 404),
        ("/v2/models/m/versions/v1", 404),
        ("/v2/models/m/versions//ready", 404),
        ("/v2/models/m/versions/-1", 404),
        ("/v2/models/m/versions/99999999999999999999", 400),
        ("/v2/models/n", 404),
        ("/v2/models/n/versions/1", 404),
        ("/v2/models/%ff", 404),
    ] {
        let reply = app.get(path).await;
        assert_eq!(reply.status, status, "{path}: {}", reply.text());
    }
    assert_eq!(app.get("/v2/models/m").await.json()["versions"], json!(["1", "2"]));
    assert_eq!(app.get("/v2/models/n").await.error().1, "model_not_found");
    assert_eq!(app.get("/v2/models/m/versions/3").await.error().1, "model_not_found");
}

#[tokio::test]
async fn names_are_decoded_once() {
    let app = app(vec![echo("a/b %", fp32())]);
    assert_eq!(app.get("/v2/models/a%2Fb%20%25").await.json()["name"], "a/b %");
    assert_eq!(app.get("/v2/models/a%252Fb%20%25").await.status, 404);
}

#[tokio::test]
async fn metadata_shows_the_batch_and_config_does_not() {
    let app = app(vec![echo("m", vec![tensor("x", DataType::Fp32), tensor("s", DataType::Bytes)])]);
    for path in ["/v2", "/v2/"] {
        let server = app.get(path).await.json();
        assert_eq!(server["name"], "concertina");
        assert!(server["version"].is_string() && server["extensions"].is_array());
    }
    assert_eq!(app.get("/").await.json(), json!({"status": "alive"}));
    assert_eq!(app.get("/v2/models").await.json(), json!({"models": ["m"]}));
    let metadata = app.get("/v2/models/m").await.json();
    let tensors = json!([
        {"name": "x", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "s", "datatype": "BYTES", "shape": [-1, -1]},
    ]);
    let expected = json!({
        "name": "m", "versions": ["1"], "platform": "onnxruntime_onnx", "inputs": tensors, "outputs": tensors,
    });
    assert_eq!(metadata, expected);
    let config = app.get("/v2/models/m/versions/1/config").await.json();
    assert_eq!(config["max_batch_size"], 8);
    assert_eq!(config["input"][0]["dims"], json!([-1]));
    assert_eq!(config["output"][1]["data_type"], "TYPE_STRING");
    assert_eq!(config["dynamic_batching"]["max_queue_delay_microseconds"], 2000);
    for absent in ["sequence_batching", "ensemble_scheduling"] {
        assert!(config.get(absent).is_none());
    }
}

#[tokio::test]
async fn a_batch_that_is_not_the_first_dimension_is_not_published_as_one() {
    let mut spec = echo("m", fp32());
    spec.batch_axis = Some(1);
    spec.inputs[0].shape = vec![Dim::Fixed(3), Dim::Any];
    let config = app(vec![spec]).get("/v2/models/m/config").await.json();
    assert_eq!((&config["max_batch_size"], &config["input"][0]["dims"]), (&json!(0), &json!([3, -1])));
    assert!(config.get("dynamic_batching").is_none());
}

#[tokio::test]
async fn ready_follows_models_and_phase_while_live_stays() {
    let app = app(vec![echo("m", fp32())]);
    let spec = Arc::new(echo("m", fp32()));
    assert_eq!(app.get("/v2/health/ready").await.json(), json!({"live": true, "ready": true}));
    let reason = |word: &str| word.to_owned();
    let states = [
        (ModelState::Ready(spec), 200, 200),
        (ModelState::Loading, 503, 503),
        (ModelState::Unhealthy { reason: reason("lost") }, 503, 503),
        (ModelState::Unavailable { reason: reason("bad file"), failed: true }, 503, 503),
        (ModelState::Unavailable { reason: reason("unloaded"), failed: false }, 200, 503),
    ];
    for (state, server, model) in states {
        publish(&app, vec![(1, state.clone())]);
        assert_eq!(app.get("/v2/health/ready").await.status, server, "{state:?}");
        let reply = app.get("/v2/models/m/ready").await;
        assert_eq!(reply.status, model, "{state:?}");
        assert_eq!((&reply.json()["name"], &reply.json()["ready"]), (&json!("m"), &json!(model == 200)));
        assert_eq!(reply.header("retry-after").is_some(), model == 503);
        assert_eq!(app.get("/v2/models/m/config").await.status, model);
        assert_eq!(app.get("/v2/health/live").await.json(), json!({"live": true}));
    }
    assert_eq!(app.get("/v2/models/n/ready").await.status, 404);
    app.models.store(Arc::default());
    let reply = app.get("/v2/health/ready").await;
    assert_eq!((reply.status.as_u16(), &reply.json()["ready"]), (503, &json!(false)));
    app.models.store(Arc::new(Table { scanned: true, ..Table::default() }));
    assert_eq!(app.get("/v2/health/ready").await.status, 200, "an empty repository is ready");
    app.phase.send_replace(Phase::Announced);
    let reply = app.get("/v2/health/ready").await;
    assert_eq!((reply.status.as_u16(), reply.error().0.as_str()), (503, "the server is draining"));
    assert_eq!(app.get("/v2/health/live").await.status, 200);
}

#[tokio::test]
async fn everything_is_served_while_the_end_is_announced() {
    let app = echo_app(fp32());
    app.phase.send_replace(Phase::Announced);
    let body = r#"{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1]}]}"#;
    assert_eq!(app.infer(body).await.status, 200);
}

#[tokio::test]
async fn the_repository_index_lists_states_and_reasons() {
    let app = app(vec![]);
    let spec = Arc::new(echo("m", fp32()));
    let failed = ModelState::Unavailable { reason: "bad file".to_owned(), failed: true };
    publish(&app, vec![(1, ModelState::Ready(spec)), (2, ModelState::Loading), (3, failed)]);
    let index = async |body: &'static str| {
        app.send(Request::post("/v2/repository/index").body(Body::from(body)).unwrap()).await
    };
    let ready = json!({"name": "m", "version": "1", "state": "READY", "reason": ""});
    let loading = json!({"name": "m", "version": "2", "state": "LOADING", "reason": ""});
    let unavailable = json!({"name": "m", "version": "3", "state": "UNAVAILABLE", "reason": "bad file"});
    let all = json!([ready, loading, unavailable]);
    for (body, expected) in
        [("", &all), ("{}", &all), (r#"{"ready":false}"#, &all), (r#"{"ready":true}"#, &json!([ready]))]
    {
        assert_eq!(index(body).await.json(), *expected, "{body}");
    }
    for body in [r#"{"ready":1}"#, "[]", "{"] {
        assert_eq!(index(body).await.status, 400, "{body}");
    }
}

#[tokio::test]
async fn metrics_are_text() {
    let reply = app(vec![]).get("/metrics").await;
    assert_eq!(reply.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert_eq!(reply.text(), "up 1\n");
}

#[tokio::test]
async fn request_ids_are_taken_over_or_made() {
    let app = app(vec![]);
    let id_for = async |given: &[u8]| {
        let request = Request::get("/nothing").header("x-request-id", given).body(Body::empty()).unwrap();
        app.send(request).await.header("x-request-id").unwrap().to_owned()
    };
    let longest = "a".repeat(128);
    for given in ["abc-1/2:3", longest.as_str()] {
        assert_eq!(id_for(given.as_bytes()).await, given);
    }
    let mut made = vec![app.get("/").await.header("x-request-id").unwrap().to_owned()];
    for given in [b"".as_slice(), b"two words", b"caf\xc3\xa9", "a".repeat(129).as_bytes()] {
        made.push(id_for(given).await);
    }
    assert!(made.iter().all(|id| id.len() >= 17 && id.is_ascii()), "{made:?}");
    made.sort();
    made.dedup();
    assert_eq!(made.len(), 5, "ids repeat");
}
