//! Statistics, classification, and the answers of extensions that are not there.

use crate::support::{App, app_answering, app_with_jobs, echo, echo_app, give_back, tensor};
use axum::body::Body;
use axum::http::Request;
use concertina::batcher::{StageTotals, Statistics, Total};
use concertina::model::Labels;
use concertina::tensor::DataType;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;

async fn post(app: &App, path: &str, body: &str) -> crate::support::Reply {
    app.send(Request::post(path).body(Body::from(body.to_owned())).unwrap()).await
}

fn total(count: u64, nanos: u64) -> Total {
    Total { count, time: Duration::from_nanos(nanos) }
}

#[tokio::test]
async fn statistics_have_every_field_that_clients_read() {
    let mut second = echo("m", vec![tensor("x", DataType::Fp32)]);
    (second.version, second.id.0) = (2, 9);
    let (app, mut jobs) = app_with_jobs(vec![echo("m", vec![tensor("x", DataType::Fp32)]), second], 4);
    let stages = StageTotals { input: total(3, 30), infer: total(3, 300), output: total(3, 3) };
    let statistics = Statistics {
        last_inference: Some(Duration::from_millis(1_767_000_000_123)),
        rows: 40,
        batches: 9,
        success: total(3, 500),
        fail: total(1, 7),
        queue: total(3, 167),
        compute: stages,
        by_rows: BTreeMap::from([(4, stages)]),
    };
    jobs.statistics = [(concertina::units::ModelId(9), statistics)].into();
    tokio::spawn(async move { while jobs.recv().await.is_some() {} });
    let counted = json!({
        "name": "m", "version": "2", "last_inference": 1_767_000_000_123u64, "inference_count": 40, "execution_count": 9,
        "inference_stats": {
            "success": {"count": 3, "ns": 500}, "fail": {"count": 1, "ns": 7}, "queue": {"count": 3, "ns": 167},
            "compute_input": {"count": 3, "ns": 30}, "compute_infer": {"count": 3, "ns": 300},
            "compute_output": {"count": 3, "ns": 3}, "cache_hit": {"count": 0, "ns": 0}, "cache_miss": {"count": 0, "ns": 0},
        },
        "response_stats": {},
        "batch_stats": [{
            "batch_size": 4, "compute_input": {"count": 3, "ns": 30}, "compute_infer": {"count": 3, "ns": 300},
            "compute_output": {"count": 3, "ns": 3},
        }],
        "memory_usage": [{"type": "CPU", "id": 0, "byte_size": 4096}],
    });
    assert_eq!(app.get("/v2/models/m/versions/2/stats").await.json(), json!({"model_stats": [counted]}));
    for path in ["/v2/models/stats", "/v2/models/m/stats"] {
        let all = app.get(path).await.json();
        assert_eq!(all["model_stats"].as_array().unwrap().len(), 2, "{path}");
        assert_eq!(all["model_stats"][1], counted);
        // A model that has served nobody has all the same fields.
        assert_eq!(all["model_stats"][0]["last_inference"], 0);
        assert_eq!(all["model_stats"][0]["inference_stats"].as_object().unwrap().len(), 8);
    }
    for path in ["/v2/models/n/stats", "/v2/models/m/versions/3/stats"] {
        assert_eq!(app.get(path).await.error().1, "model_not_found");
    }
}

#[tokio::test]
async fn the_classes_of_an_output_come_in_both_forms() {
    let mut model = echo("m", vec![tensor("x", DataType::Fp32)]);
    let lines = ["cat", "dog"].map(str::to_owned).into();
    model.settings.labels.insert("x".to_owned(), Labels { file: "labels.txt".to_owned(), lines });
    let app = app_answering(vec![model], give_back);
    let body = |parameters: &str| {
        format!(
            r#"{{"inputs":[{{"name":"x","shape":[2,3],"datatype":"FP32","data":[0.1,0.7,0.2,3,1,2]}}],
                "outputs":[{{"name":"x","parameters":{{{parameters}}}}}]}}"#
        )
    };
    let output = &app.infer(body(r#""classification":2"#)).await.json()["outputs"][0];
    assert_eq!((&output["datatype"], &output["shape"]), (&json!("BYTES"), &json!([2, 2])));
    assert_eq!(output["data"], json!(["0.700000:1:dog", "0.200000:2", "3.000000:0:cat", "2.000000:2"]));
    let reply = app.infer(body(r#""classification":1,"binary_data":true"#)).await;
    assert!(reply.body.ends_with(b"\x0e\0\0\x000.700000:1:dog\x0e\0\0\x003.000000:0:cat"));
    // Zero asks for nothing special.
    assert_eq!(app.infer(body(r#""classification":0"#)).await.json()["outputs"][0]["datatype"], "FP32");
    assert_eq!(app.infer(body(r#""classification":-1"#)).await.status, 400);
    let texts = echo_app(vec![tensor("x", DataType::Bytes)]);
    let reply = texts
        .infer(
            r#"{"inputs":[{"name":"x","shape":[1,1],"datatype":"BYTES","data":["a"]}],
                "outputs":[{"name":"x","parameters":{"classification":1}}]}"#,
        )
        .await;
    assert_eq!((reply.status.as_u16(), reply.error().0.contains("output 'x' has datatype BYTES")), (400, true));
}

#[tokio::test]
async fn extensions_that_are_not_there_answer_as_clients_expect() {
    let app = app_with_jobs(vec![echo("m", vec![tensor("x", DataType::Fp32)])], 1).0;
    for kind in ["systemsharedmemory", "cudasharedmemory"] {
        assert_eq!(app.get(&format!("/v2/{kind}/status")).await.json(), json!([]));
        let reply = app.get(&format!("/v2/{kind}/region/r/status")).await;
        assert_eq!((reply.status.as_u16(), reply.error().0.contains("'r'")), (404, true));
        for path in ["region/r/register", "region/r/unregister", "unregister"] {
            let reply = post(&app, &format!("/v2/{kind}/{path}"), "{}").await;
            assert_eq!((reply.status.as_u16(), &*reply.error().1), (501, "unsupported"), "{kind}/{path}");
        }
    }
    for path in ["/v2/trace/setting", "/v2/models/m/trace/setting"] {
        assert_eq!(app.get(path).await.error().1, "unsupported");
        assert_eq!(post(&app, path, "{}").await.status, 501);
    }
    for path in ["r/index", "r/models/m/load", "r/models/m/unload"] {
        assert_eq!(post(&app, &format!("/v2/repository/{path}"), "").await.status, 501, "{path}");
    }
    assert_eq!(app.get("/v2/logging").await.json(), json!({"log_info": true}));
    for (body, status) in [
        (r#"{"log_info":true,"other":1}"#, 200),
        ("{\"log_info\":null}", 200),
        (r#"{"log_info":false}"#, 501),
        ("[]", 400),
    ] {
        assert_eq!(post(&app, "/v2/logging", body).await.status, status, "{body}");
    }
}

#[tokio::test]
async fn loading_and_unloading_need_a_server_with_an_admin_token() {
    let app = app_with_jobs(vec![], 1).0;
    for path in ["/v2/repository/models/m/load", "/v2/repository/models/m/unload"] {
        let reply = post(&app, path, "").await;
        assert_eq!((reply.status.as_u16(), &*reply.error().1), (403, "forbidden"), "{path}");
        assert!(reply.error().0.contains("admin.token"));
    }
}
