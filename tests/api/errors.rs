//! Inference that fails: every way has its status, its code and a text that names the field.

use crate::support::{App, BODY_LIMIT, app_answering, app_with_jobs, echo, echo_app, give_back, tensor};
use axum::body::{Body, Bytes};
use axum::http::{Request, StatusCode};
use concertina::batcher::{InferError, Rejection};
use concertina::http::Code;
use concertina::model::{InferResponse, ModelState, OutputTensor, Table};
use concertina::tensor::{DataType, Tensor};
use http_body::Frame;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

fn app() -> App {
    echo_app(vec![tensor("x", DataType::Uint8)])
}

async fn refused(app: &App, body: &str, expected: &str) {
    let reply = app.infer(body.to_owned()).await;
    assert_eq!(reply.status, 400, "{body}: {}", reply.text());
    let (text, code) = reply.error();
    assert_eq!(code, "invalid_request");
    assert!(text.contains(expected), "{body}: {text:?} lacks {expected:?}");
}

#[tokio::test]
async fn malformed_requests_name_the_field() {
    let table = [
        ("", "the request: malformed JSON at line 1 column 1"),
        ("[]", "the request must be an object"),
        ("{", "malformed JSON"),
        (r#"{"inputs":[]} x"#, "trailing characters"),
        ("{}", "inputs is missing"),
        (r#"{"inputs":null}"#, "inputs must be an array"),
        (r#"{"inputs":{}}"#, "inputs must be an array"),
        (r#"{"inputs":[1]}"#, "inputs[0] must be an object"),
        (r#"{"id":5,"inputs":[]}"#, "id must be a string"),
        (r#"{"inputs":[],"inputs":[]}"#, "inputs is given twice"),
        (r#"{"parameters":1,"inputs":[]}"#, "parameters must be an object"),
        (r#"{"parameters":{"priority":-1}}"#, "parameters.priority must be an integer"),
        (r#"{"parameters":{"timeout":1.0}}"#, "parameters.timeout must be an integer"),
        (r#"{"parameters":{"binary_data_output":1}}"#, "parameters.binary_data_output must be true or false"),
        (r#"{"outputs":[{}]}"#, "outputs[0].name is missing"),
        (r#"{"outputs":[{"name":1}]}"#, "outputs[0].name must be a string"),
        (r#"{"outputs":[{"name":"x","parameters":{"binary_data":0}}]}"#, "outputs[0].parameters.binary_data must be"),
        (r#"{"inputs":[]}"#, "model 'm' needs 1 input but got 0: add 'x'"),
    ];
    for (body, expected) in table {
        refused(&app(), body, expected).await;
    }
}

#[tokio::test]
async fn malformed_inputs_name_the_field() {
    let deep = format!(r#""name":"x","shape":[1,1],"datatype":"UINT8","data":{}1{}"#, "[".repeat(101), "]".repeat(101));
    let rank = format!(r#""name":"x","datatype":"UINT8","data":[1],"shape":[{}1]"#, "1,".repeat(32));
    let table = [
        (r#""shape":[1,1],"datatype":"UINT8","data":[1]"#, "inputs[0].name is missing"),
        (r#""name":"x","datatype":"UINT8","data":[1]"#, "inputs[0].shape is missing"),
        (r#""name":"x","shape":[1,1],"data":[1]"#, "inputs[0].datatype is missing"),
        (r#""name":"x","shape":[1,1],"datatype":"UINT8""#, "inputs[0] has no data"),
        (r#""name":"x","name":"x""#, "inputs[0].name is given twice"),
        (r#""name":"x","shape":"1""#, "inputs[0].shape must be an array"),
        (r#""name":"x","shape":[1,-1]"#, "inputs[0].shape[1] must be an integer from 0"),
        (r#""name":"x","shape":[1.0]"#, "inputs[0].shape[0] must be an integer"),
        (r#""name":"x","datatype":"uint8""#, "inputs[0].datatype must be one of BOOL"),
        (r#""name":"x","datatype":8"#, "inputs[0].datatype must be a string"),
        (
            r#""name":"x","shape":[1,2],"datatype":"UINT8","data":[1]"#,
            "inputs[0].data has 1 elements, but its shape needs 2",
        ),
        (
            r#""name":"x","shape":[1,2],"datatype":"UINT8","data":[1,2,3]"#,
            "inputs[0].data has more than the 2 elements",
        ),
        (r#""name":"x","shape":[1,2],"datatype":"UINT8","data":5"#, "inputs[0].data must be an array"),
        (
            r#""name":"x","data":[1,2,"a"],"shape":[1,3],"datatype":"UINT8""#,
            "inputs[0].data[2] must be an integer from 0 to 255",
        ),
        (r#""name":"x","shape":[9999999999,9999999999],"datatype":"UINT8","data":[]"#, "inputs[0].shape has too many"),
        (
            r#""name":"x","shape":[1,1],"datatype":"UINT8","data":[1],"parameters":{"binary_data_size":1}"#,
            "has both data and",
        ),
        (r#""name":"x","shape":[1,1],"datatype":"UINT8","parameters":{"binary_data_size":1}"#, "only 0 bytes follow"),
        (
            r#""name":"x","shape":[1,1],"datatype":"UINT8","parameters":{"binary_data_size":-1}"#,
            "binary_data_size must be",
        ),
        (r#""name":"x","shape":[1,1],"datatype":"UINT8","data":[1,]"#, "malformed JSON"),
        (r#""name":"x","shape":[1,1],"datatype":"UINT8","data":[1"#, "malformed JSON"),
        (&deep, "nested deeper than 100"),
        (&rank, "inputs[0].shape has more than 32 dimensions"),
        (
            r#""name":"x","shape":[1,1],"datatype":"INT8","data":[1]"#,
            "input 'x' has datatype INT8, but model 'm' expects",
        ),
        (
            r#""name":"x","shape":[1],"datatype":"UINT8","data":[1]"#,
            "input 'x' has shape [1], but model 'm' expects [-1, -1]",
        ),
        (r#""name":"x","shape":[0,1],"datatype":"UINT8","data":[]"#, "has no rows; send at least 1"),
        (r#""name":"x","shape":[1001,0],"datatype":"UINT8","data":[]"#, "has 1001 rows; send at most 1000"),
    ];
    for (input, expected) in table {
        refused(&app(), &format!(r#"{{"inputs":[{{{input}}}]}}"#), expected).await;
    }
}

#[tokio::test]
async fn elements_are_exact_or_refused() {
    let table = [
        (DataType::Bool, "true,false", "1"),
        (DataType::Bool, "false", "\"true\""),
        (DataType::Uint8, "0,255", "256"),
        (DataType::Uint8, "-0", "-1"),
        (DataType::Int8, "-128,127", "128"),
        (DataType::Uint16, "65535", "65536"),
        (DataType::Int16, "-32768", "-32769"),
        (DataType::Uint32, "4294967295", "4294967296"),
        (DataType::Int32, "-2147483648", "2147483648"),
        (DataType::Uint64, "18446744073709551615,999999999999999999", "18446744073709551616"),
        (DataType::Int64, "-9223372036854775808,9223372036854775807", "9223372036854775808"),
        (DataType::Int64, "1", "1.0"),
        (DataType::Int64, "1", "1e3"),
        (DataType::Int64, "1", "NaN"),
        (DataType::Int64, "1", "123456789012345678901234567890"),
        (DataType::Int64, "1", "123456789012345678901.5"),
        (DataType::Int64, "1", "null"),
        (DataType::Fp32, "1,1e3,-2.5E-3,NaN", "\"1\""),
        (DataType::Fp64, "1.7976931348623157e308", "true"),
        (DataType::Fp16, "1.5", "{}"),
        (DataType::Bf16, "1.5", "null"),
        (DataType::Bytes, r#""","é\u00e9\n""#, "1"),
    ];
    for (datatype, good, bad) in table {
        let app = echo_app(vec![tensor("x", datatype)]);
        let body = |data: &str| {
            let count = data.split(',').count();
            format!(r#"{{"inputs":[{{"name":"x","shape":[1,{count}],"datatype":"{datatype}","data":[{data}]}}]}}"#)
        };
        let reply = app.infer(body(good)).await;
        assert_eq!(reply.status, 200, "{datatype} {good}: {}", reply.text());
        refused(&app, &body(bad), "inputs[0].data[0] must be").await;
    }
}

#[tokio::test]
async fn framing_faults() {
    let app = app();
    let json = r#"{"inputs":[{"name":"x","shape":[1,2],"datatype":"UINT8","parameters":{"binary_data_size":2}}]}"#;
    let right = json.len().to_string();
    for (header, tail, expected) in [
        ("x", "ab", "Inference-Header-Content-Length must be"),
        ("-1", "ab", "Inference-Header-Content-Length must be"),
        ("+5", "ab", "Inference-Header-Content-Length must be"),
        ("99999", "ab", "Inference-Header-Content-Length must be"),
        ("99999999999999999999999", "ab", "Inference-Header-Content-Length must be"),
        ("", "ab", "Inference-Header-Content-Length must be"),
        (&right, "abc", "1 bytes are left after the last binary tensor"),
        (&right, "a", "binary_data_size is 2, but only 1 bytes follow"),
        ("5", "ab", "malformed JSON"),
    ] {
        let reply = app.infer_binary(Some(header), [json, tail].concat()).await;
        assert_eq!(reply.status, 400, "{header}");
        assert!(reply.error().0.contains(expected), "{header}: {}", reply.text());
    }
    let wrong_size = json.replace("[1,2]", "[1,3]");
    let reply = app.infer_mixed(&wrong_size, b"ab").await;
    assert!(reply.error().0.contains("has 2 bytes of data, but shape [1, 3] of UINT8 needs 3"), "{}", reply.text());
}

#[tokio::test]
async fn features_that_are_missing_say_so() {
    let app = app();
    let input = r#""inputs":[{"name":"x","shape":[1,1],"datatype":"UINT8","data":[1]}]"#;
    let region = r#""parameters":{"shared_memory_region":"r"}"#;
    for body in [
        format!(r#"{{{input},"outputs":[{{"name":"x",{region}}}]}}"#),
        format!(r#"{{"inputs":[{{"name":"x",{region}}}]}}"#),
    ] {
        let reply = app.infer(body).await;
        assert_eq!(reply.status, 404);
        assert!(reply.error().0.contains("shared memory region 'r'"));
    }
    let request = Request::post("/v2/models/m/infer").header("content-encoding", "br").body(Body::from("x")).unwrap();
    let reply = app.send(request).await;
    assert_eq!((reply.status.as_u16(), reply.header("accept-encoding")), (415, Some("gzip, deflate")));
}

#[tokio::test]
async fn models_that_cannot_answer() {
    let app = app();
    let infer = async |path: &str| app.send(Request::post(path).body(Body::from("{}")).unwrap()).await;
    let reply = infer("/v2/models/n/infer").await;
    assert_eq!((reply.status.as_u16(), reply.error().1.as_str()), (404, "model_not_found"));
    assert!(reply.outcome.unwrap().model.is_none());
    assert_eq!(infer("/v2/models/m/versions/9/infer").await.status, 404);
    let models = BTreeMap::from([("m".to_owned(), BTreeMap::from([(1, ModelState::Loading)]))]);
    app.models.store(Arc::new(Table { models, scanned: true, ..Table::default() }));
    let reply = infer("/v2/models/m/infer").await;
    assert_eq!((reply.status.as_u16(), reply.error().1.as_str()), (503, "unavailable"));
    assert!(reply.header("retry-after").is_some());
}

const GOOD: &str = r#"{"inputs":[{"name":"x","shape":[3,1],"datatype":"UINT8","data":[1,2,3]}]}"#;

#[tokio::test]
async fn what_the_batcher_refuses_keeps_its_kind_and_rows() {
    let model = || vec![echo("m", vec![tensor("x", DataType::Uint8)])];
    let app = app_answering(model(), |_| Err(InferError::Rejected(Rejection::Draining)));
    let reply = app.infer(GOOD).await;
    assert_eq!((reply.status.as_u16(), reply.header("connection")), (503, Some("close")));
    let outcome = reply.outcome.unwrap();
    assert_eq!((outcome.failure, outcome.rows), (Some(Code::Unavailable), 3));
    let app = app_answering(model(), |_| Err(InferError::Model("no such axis".to_owned())));
    let reply = app.infer(GOOD).await;
    assert_eq!((reply.status.as_u16(), reply.error().0.as_str()), (500, "the model failed: no such axis"));
}

#[tokio::test]
async fn a_full_or_closed_batcher_is_told_at_once() {
    let (app, jobs) = app_with_jobs(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 1);
    let waiting = app.infer(GOOD);
    tokio::pin!(waiting);
    assert!(poll_once(waiting.as_mut()).await.is_none(), "it waits in the channel");
    let reply = app.infer(GOOD).await;
    assert_eq!((reply.status.as_u16(), reply.error().1.as_str()), (503, "overloaded"));
    drop(jobs);
    assert_eq!(app.infer(GOOD).await.status, 503);
    assert_eq!(waiting.await.error().1, "unavailable");
}

/// Polls once, without waiting.
async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

#[tokio::test]
async fn bytes_that_are_not_text_have_no_json_form() {
    let app = echo_app(vec![tensor("x", DataType::Bytes)]);
    let json = r#"{"inputs":[{"name":"x","shape":[1,2],"datatype":"BYTES","parameters":{"binary_data_size":9}}]}"#;
    let reply = app.infer_mixed(json, b"\0\0\0\0\x01\0\0\0\xff").await;
    assert_eq!(reply.status, 400);
    assert!(reply.error().0.contains("element 1 of output 'x' is not valid UTF-8"), "{}", reply.text());
    assert!(reply.error().0.contains("binary_data"));
}

#[tokio::test(start_paused = true)]
async fn bodies_inside_the_server_are_bounded_together() {
    let (app, mut jobs) = app_with_jobs(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 16);
    let sized = |bytes: usize| Body::from(format!("{GOOD}{}", " ".repeat(bytes - GOOD.len())));
    let (mut first, mut second) = (Box::pin(app.infer(sized(BODY_LIMIT))), Box::pin(app.infer(sized(BODY_LIMIT))));
    assert!(poll_once(first.as_mut()).await.is_none() && poll_once(second.as_mut()).await.is_none());
    // The second has no end, and is read no further than there is room.
    let endless = Frames(Poll::Ready(Bytes::from_static(&[b' '; 1024])));
    for body in [Body::from(GOOD), Body::new(endless)] {
        let reply = tokio::time::timeout(Duration::from_secs(60), app.infer(body)).await.expect("refused, not queued");
        assert_eq!((reply.status.as_u16(), reply.error().1.as_str()), (503, "overloaded"));
        assert!(reply.header("retry-after").is_some());
        assert_eq!(reply.outcome.unwrap().failure, Some(Code::Overloaded));
    }
    let job = jobs.recv().await.unwrap();
    job.reply.send(give_back(&job.request)).unwrap();
    assert_eq!(first.await.status, 200);
    // The room of the first is free again, and a body whose length was not known keeps no more of it than it needs.
    let mut waiting = [Body::new(Once(Some(GOOD))), sized(BODY_LIMIT - 1024)].map(|body| Box::pin(app.infer(body)));
    for request in &mut waiting {
        assert!(poll_once(request.as_mut()).await.is_none());
    }
    for _ in 0..3 {
        let job = jobs.recv().await.expect("the second and these two wait");
        let _ = job.reply.send(give_back(&job.request));
    }
    for request in waiting {
        assert_eq!(request.await.status, 200);
    }
    assert_eq!(second.await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_announced_but_does_not_come_takes_no_room() {
    let app = echo_app(vec![tensor("x", DataType::Uint8)]);
    let mut silent: Vec<_> = (0..64).map(|_| Box::pin(app.infer(Body::new(Frames(Poll::Pending))))).collect();
    for request in &mut silent {
        assert!(poll_once(request.as_mut()).await.is_none());
    }
    assert_eq!(app.infer(GOOD).await.status, 200);
    for request in silent {
        assert_eq!(request.await.status, 408);
    }
}

/// A body without an end, of the same frame again and again, or of none.
struct Frames(Poll<Bytes>);

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.clone().map(|data| Some(Ok(Frame::data(data))))
    }
}

/// A body of one frame that does not announce its length.
struct Once(Option<&'static str>);

impl http_body::Body for Once {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|text| Ok(Frame::data(Bytes::from(text)))))
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_not_read_to_its_end() {
    let app = app();
    assert_eq!(app.infer(vec![b' '; BODY_LIMIT]).await.status, 400, "at the limit it is read");
    let reply = app.infer(vec![b' '; BODY_LIMIT + 1]).await;
    assert_eq!((reply.status, reply.error().1.as_str()), (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"));
    // Without an announced length, and without an end.
    assert_eq!(app.infer(Body::new(Frames(Poll::Ready(Bytes::from_static(&[b' '; 1000]))))).await.status, 413);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_times_out() {
    let reply = app().infer(Body::new(Frames(Poll::Pending))).await;
    assert_eq!((reply.status.as_u16(), reply.error().1.as_str()), (408, "body_timeout"));
}

#[tokio::test]
async fn a_broken_answer_is_a_bug() {
    let app = app_answering(vec![echo("m", vec![tensor("x", DataType::Uint8)])], |request| {
        let mut answer = give_back(request)?;
        // BYTES data that breaks off: encoding finds out.
        let tensor = Tensor { datatype: DataType::Bytes, shape: [1][..].into(), data: vec![9].into() };
        answer.outputs = vec![OutputTensor { index: 0, tensor }];
        Ok::<InferResponse, InferError>(answer)
    });
    let reply = app.infer(GOOD).await;
    assert_eq!((reply.status.as_u16(), reply.error()), (500, ("internal error".to_owned(), "internal".to_owned())));
}
