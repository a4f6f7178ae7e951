//! Inference that succeeds: forms in and out, framing, outcomes.

use crate::support::{App, app_answering, app_with_jobs, echo, echo_app, give_back, tensor};
use axum::body::Body;
use concertina::batcher::InferError;
use concertina::model::{Dim, InferResponse, OutputTensor, TensorSpec, ValidRequest};
use concertina::tensor::{Chunks, DataType, Tensor};
use serde_json::{Value, json};
use std::time::Duration;

fn fp32() -> App {
    echo_app(vec![tensor("x", DataType::Fp32)])
}

/// An FP32 output of two elements, as in the example of the protocol.
fn half_and_minus_two(_: &ValidRequest) -> Result<InferResponse, InferError> {
    let data = vec![0, 0, 0, 0x3f, 0, 0, 0, 0xc0].into();
    let tensor = Tensor { datatype: DataType::Fp32, shape: [1, 2][..].into(), data };
    Ok(InferResponse { outputs: vec![OutputTensor { index: 0, tensor }] })
}

#[tokio::test]
async fn the_worked_example_of_the_protocol_byte_by_byte() {
    let mut model = echo("m", vec![tensor("IDS", DataType::Int64)]);
    model.inputs.push(TensorSpec { name: "TXT".to_owned(), datatype: DataType::Bytes, shape: vec![Dim::Any] });
    model.outputs[0] = tensor("Y", DataType::Fp32);
    model.batch_axis = None;
    let app = app_answering(vec![model], |request| {
        assert_eq!(request.inputs[0].data, Chunks::from([7i64.to_le_bytes(), (-1i64).to_le_bytes()].concat()));
        assert_eq!(request.inputs[1].data, Chunks::from(b"\x03\0\0\0abc\0\0\0\0".to_vec()));
        half_and_minus_two(request)
    });
    let json = concat!(
        r#"{"id":"a1","inputs":[{"name":"IDS","shape":[1,2],"datatype":"INT64","parameters":{"binary_data_size":16}},"#,
        r#"{"name":"TXT","shape":[2],"datatype":"BYTES","parameters":{"binary_data_size":11}}],"#,
        r#""outputs":[{"name":"Y","parameters":{"binary_data":true}}]}"#,
    );
    assert_eq!(json.len(), 249);
    let tail = [&7i64.to_le_bytes()[..], &(-1i64).to_le_bytes(), b"\x03\0\0\0abc\0\0\0\0"].concat();
    let reply = app.infer_mixed(json, &tail).await;
    let head = concat!(
        r#"{"id":"a1","model_name":"m","model_version":"1","outputs":[{"name":"Y","datatype":"FP32","shape":[1,2],"#,
        r#""parameters":{"binary_data_size":8}}]}"#,
    );
    assert_eq!(reply.body, [head.as_bytes(), &[0, 0, 0, 0x3f, 0, 0, 0, 0xc0]].concat());
    assert_eq!(reply.header("inference-header-content-length"), Some("141"));
    assert_eq!(reply.header("content-length"), Some("149"));
    assert_eq!(reply.header("content-type"), Some("application/octet-stream"));
}

#[tokio::test]
async fn json_in_and_out() {
    let body = r#"{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[[1,2.5],[-0.1,1e10]]}]}"#;
    let reply = fp32().infer(body).await;
    let expected = concat!(
        r#"{"model_name":"m","model_version":"1","outputs":"#,
        r#"[{"name":"x","datatype":"FP32","shape":[2,2],"data":[1.0,2.5,-0.1,10000000000.0]}]}"#,
    );
    assert_eq!((reply.status.as_u16(), reply.text()), (200, expected));
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(reply.header("inference-header-content-length"), None);
}

#[tokio::test]
async fn keys_may_come_in_any_order_and_unknown_ones_are_ignored() {
    let body = r#" {"model_name":"q","zz":[{"a":[NaN]}],"parameters":{"headers":{"a":1},"content_type":null,"n":1.5},
        "outputs":[{"parameters":{"x":[]},"name":"x","zz":1}],
        "inputs":[{"data":[[1],[[2]]],"parameters":{"content_type":"np"},"datatype":"FP32","zz":{},"shape":[2,1],"name":"x"}],
        "id":"é\n\"\u0001\\"} "#;
    let body = body.replace("é\n", "é\\n");
    let reply = fp32().infer(body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json()["id"], "é\n\"\u{1}\\");
    assert_eq!(reply.json()["outputs"][0]["data"], json!([1.0, 2.0]));
    assert!(reply.json()["outputs"][0].get("parameters").is_none());
}

#[tokio::test]
async fn nulls_stand_for_absent_optional_fields() {
    let body = r#"{"id":null,"parameters":null,"outputs":null,
        "inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","parameters":null,"data":[3]}]}"#;
    let reply = fp32().infer(body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.json().get("id").is_none());
}

#[tokio::test]
async fn an_empty_id_is_not_echoed() {
    let body = r#"{"id":"","inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[3]}]}"#;
    assert!(fp32().infer(body).await.json().get("id").is_none());
}

#[tokio::test]
async fn numbers_that_json_lacks_go_both_ways() {
    let body = r#"{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[NaN,Infinity,-Infinity,-0.0]}]}"#;
    let reply = fp32().infer(body).await;
    assert!(reply.text().ends_with(r#""data":[NaN,Infinity,-Infinity,-0.0]}]}"#), "{}", reply.text());
}

#[tokio::test]
async fn short_infinities_are_infinities_wherever_a_number_may_stand() {
    let app = fp32();
    for input in [
        r#""shape":[1,3],"datatype":"FP32","data":[Inf,-Inf,1]"#,
        r#""data":[[Inf, -Inf],[ 1 ]],"shape":[1,3],"datatype":"FP32""#,
    ] {
        let reply = app.infer(format!(r#"{{"id":"Inf","inputs":[{{"name":"x",{input}}}]}}"#)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(reply.text().ends_with(r#""data":[Infinity,-Infinity,1.0]}]}"#), "{}", reply.text());
        assert!(reply.text().contains(r#""id":"Inf""#), "{}", reply.text());
    }
    for bad in ["Infx", "+Inf", "inf", "1Inf"] {
        let input = format!(r#""name":"x","shape":[1,1],"datatype":"FP32","data":[{bad}]"#);
        assert_eq!(app.infer(format!(r#"{{"inputs":[{{{input}}}]}}"#)).await.status, 400, "{bad}");
    }
}

#[tokio::test]
async fn tensors_without_elements() {
    for input in [
        r#"{"name":"x","shape":[1,0],"datatype":"FP32","data":[]}"#,
        r#"{"name":"x","shape":[1,0],"datatype":"FP32","data":[[]]}"#,
        r#"{"name":"x","shape":[1,0],"datatype":"FP32","parameters":{"binary_data_size":0}}"#,
    ] {
        let reply = fp32().infer(format!(r#"{{"inputs":[{input}]}}"#)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["outputs"][0]["data"], json!([]));
    }
    let json = r#"{"inputs":[{"name":"x","shape":[1,0],"datatype":"FP32","data":[]}],"parameters":{"binary_data_output":true}}"#;
    let reply = fp32().infer(json).await;
    assert_eq!(reply.header("inference-header-content-length"), Some(&*reply.body.len().to_string()));
}

/// Each row: request-level parameters, listed outputs, and the names of those that come back binary.
#[tokio::test]
async fn the_form_of_each_output() {
    let app = echo_app(vec![tensor("x", DataType::Uint8), tensor("y", DataType::Uint8)]);
    let binary = r#"{"name":"x","parameters":{"binary_data":true}}"#;
    let not = r#"{"name":"x","parameters":{"binary_data":false}}"#;
    let table: &[(&str, &str, &[(&str, bool)])] = &[
        ("", "", &[("x", false), ("y", false)]),
        (r#""binary_data_output":true"#, "", &[("x", true), ("y", true)]),
        (r#""binary_data_output":false"#, "", &[("x", false), ("y", false)]),
        (r#""binary_data_output":true"#, r#"{"name":"y"}"#, &[("y", false)]),
        (r#""binary_data_output":true"#, not, &[("x", false)]),
        ("", binary, &[("x", true)]),
        ("", r#"{"name":"y"},{"name":"x","parameters":{"binary_data":true}}"#, &[("y", false), ("x", true)]),
    ];
    for (parameters, outputs, expected) in table {
        let json = format!(
            r#"{{"parameters":{{{parameters}}},"outputs":[{outputs}],"inputs":[
                {{"name":"x","shape":[1,2],"datatype":"UINT8","data":[1,2]}},
                {{"name":"y","shape":[1,1],"datatype":"UINT8","data":[3]}}]}}"#
        );
        let reply = app.infer(json).await;
        let length = reply.header("inference-header-content-length").map(|text| text.parse::<usize>().unwrap());
        let (head, tail) = reply.body.split_at(length.unwrap_or(reply.body.len()));
        let head: Value = serde_json::from_slice(head).unwrap();
        let outputs = head["outputs"].as_array().unwrap();
        let mut binary = Vec::new();
        assert_eq!(outputs.len(), expected.len());
        for (output, (name, is_binary)) in outputs.iter().zip(*expected) {
            let data: &[u8] = if *name == "x" { &[1, 2] } else { &[3] };
            assert_eq!(output["name"], *name);
            if *is_binary {
                assert_eq!(output["parameters"], json!({"binary_data_size": data.len()}));
                binary.extend_from_slice(data);
            } else {
                assert!(output.get("parameters").is_none(), "clients stumble over other parameters");
                assert_eq!(output["data"], json!(data));
            }
        }
        assert_eq!(tail, binary);
        assert_eq!(length.is_some(), expected.iter().any(|(_, binary)| *binary));
    }
}

#[tokio::test]
async fn a_header_as_long_as_the_body_means_json() {
    let json = r#"{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[3]}]}"#;
    assert_eq!(fp32().infer_mixed(json, b"").await.status, 200);
}

#[tokio::test]
async fn json_and_binary_inputs_mix() {
    let app = echo_app(vec![tensor("a", DataType::Int16), tensor("b", DataType::Int16), tensor("c", DataType::Int16)]);
    let json = r#"{"inputs":[
        {"name":"c","shape":[1,1],"datatype":"INT16","parameters":{"binary_data_size":2}},
        {"name":"b","shape":[1,1],"datatype":"INT16","data":[-5]},
        {"name":"a","shape":[1,2],"datatype":"INT16","parameters":{"binary_data_size":4}}]}"#;
    let reply = app.infer_mixed(json, &[1, 0, 2, 0, 0, 1]).await;
    let data = |index: usize| reply.json()["outputs"][index]["data"].clone();
    assert_eq!((data(0), data(1), data(2)), (json!([2, 256]), json!([-5]), json!([1])));
}

#[tokio::test]
async fn raw_binary_requests() {
    let shape = |dims: &[Dim]| [vec![Dim::Any], dims.to_vec()].concat();
    let table: &[(DataType, Vec<Dim>, &[u8], Option<(Value, &[u8])>)] = &[
        (DataType::Uint8, shape(&[Dim::Any]), b"abc", Some((json!([1, 3]), b"abc"))),
        (DataType::Uint16, shape(&[Dim::Any, Dim::Fixed(2)]), b"abcdefgh", Some((json!([1, 2, 2]), b"abcdefgh"))),
        (DataType::Uint16, shape(&[Dim::Fixed(2)]), b"abcd", Some((json!([1, 2]), b"abcd"))),
        (DataType::Uint16, shape(&[Dim::Fixed(2)]), b"abcde", None),
        (DataType::Uint16, shape(&[Dim::Any, Dim::Fixed(2)]), b"abcde", None),
        (DataType::Uint8, shape(&[Dim::Any, Dim::Any]), b"abcd", None),
        (DataType::Uint8, shape(&[Dim::Any]), b"", Some((json!([1, 0]), b""))),
        (DataType::Bytes, shape(&[Dim::Any]), b"abc", Some((json!([1, 1]), b"\x03\0\0\0abc"))),
        (DataType::Bytes, shape(&[Dim::Fixed(1)]), b"", Some((json!([1, 1]), b"\0\0\0\0"))),
        (DataType::Bytes, shape(&[Dim::Fixed(2)]), b"abc", None),
    ];
    for (datatype, shape, body, expected) in table {
        let mut spec = tensor("x", *datatype);
        spec.shape.clone_from(shape);
        let reply = echo_app(vec![spec]).infer_binary(Some("0"), *body).await;
        let Some((shape, data)) = expected else {
            assert_eq!(reply.status, 400, "{datatype} {shape:?}");
            continue;
        };
        assert_eq!(reply.status, 200, "{}", reply.text());
        let length: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
        let head: Value = serde_json::from_slice(&reply.body[..length]).unwrap();
        assert_eq!((&head["outputs"][0]["shape"], &reply.body[length..]), (shape, *data));
    }
    let two = echo_app(vec![tensor("x", DataType::Uint8), tensor("y", DataType::Uint8)]);
    assert_eq!(two.infer_binary(Some("0"), "abc").await.status, 400);
}

#[tokio::test]
async fn binary_bools_are_zero_or_one() {
    let app = echo_app(vec![tensor("x", DataType::Bool)]);
    let reply = app.infer_binary(Some("0"), &[0u8, 1, 2, 255][..]).await;
    assert!(reply.body.ends_with(&[0, 1, 1, 1]));
}

#[tokio::test]
async fn priority_timeout_and_rows_reach_the_batcher() {
    let (app, mut jobs) = app_with_jobs(vec![echo("m", vec![tensor("x", DataType::Fp32)])], 1);
    let body = r#"{"parameters":{"priority":2,"timeout":1500},
        "inputs":[{"name":"x","shape":[20,1],"datatype":"FP32","parameters":{"binary_data_size":80}}]}"#;
    let answer = async {
        let job = jobs.recv().await.unwrap();
        assert_eq!((job.request.priority, job.request.timeout), (2, Some(Duration::from_micros(1500))));
        assert_eq!(job.request.rows, 20, "more than max_batch_size: the scheduler splits them");
        job.reply.send(give_back(&job.request)).unwrap();
    };
    let (reply, ()) = tokio::join!(app.infer_mixed(body, &[0; 80]), answer);
    let outcome = reply.outcome.unwrap();
    assert_eq!((outcome.failure, outcome.rows), (None, 20));
    assert_eq!(outcome.model.unwrap().name, "m");
}

#[tokio::test]
async fn a_named_version_is_asked() {
    let mut second = echo("m", vec![tensor("x", DataType::Fp32)]);
    second.version = 12;
    let app = app_answering(vec![echo("m", vec![tensor("x", DataType::Fp32)]), second], give_back);
    let json = r#"{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[3]}]}"#;
    for (path, version) in [("/v2/models/m/infer", "12"), ("/v2/models/m/versions/1/infer", "1")] {
        let request = axum::http::Request::post(path).body(Body::from(json)).unwrap();
        assert_eq!(app.send(request).await.json()["model_version"], version);
    }
}
