//! Tracing from end to end: the built server, and a collector that it sends its spans to.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod collector;
mod server;

use collector::{Collector, Span};
use concertina::grpc::proto::ModelInferRequest;
use concertina::grpc::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use concertina::grpc::proto::model_infer_request::InferInputTensor;
use server::{Answer, Server};
use std::collections::BTreeSet;
use tokio::net::TcpListener;

/// Requests at a time: more than the model takes at once.
const REQUESTS: u64 = 24;
const INFER: &str = "/v2/models/slow/infer";
const BODY: &str = r#"{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[7]}]}"#;

fn parent(trace: u64, flags: &str) -> String {
    format!("traceparent: 00-{trace:032x}-{:016x}-{flags}\r\ntracestate: shop=basket{trace}\r\n", trace + 1000)
}

/// Requests in traces 1 and on.
async fn all_at_once(server: &Server) -> Vec<Answer> {
    let ask = async |trace| server.post(INFER, &parent(trace, "01"), BODY).await;
    futures_util::future::join_all((1..=REQUESTS).map(ask)).await
}

/// The one span with this name in a trace.
fn only<'a>(spans: &'a [Span], trace: &str, name: &str) -> &'a Span {
    let mut found = spans.iter().filter(|span| span.trace == trace && span.name == name);
    let span = found.next().unwrap_or_else(|| panic!("no {name} in {trace}"));
    assert!(found.next().is_none(), "two of {name} in {trace}");
    span
}

/// Whether the stages of a request lie below its span, one after the other.
fn check_stages(spans: &[Span], request: &Span) {
    let names = ["decode", "queue", "gather", "compute", "scatter", "encode"];
    let mut before = request.begin;
    for name in names {
        let stage = only(spans, &request.trace, name);
        assert_eq!((&stage.parent, stage.kind), (&request.id, 1), "{name}");
        assert!(before <= stage.begin && stage.begin <= stage.end, "{name} does not follow: {stage:?} after {before}");
        before = stage.end;
    }
    assert!(before <= request.end, "the answer was written after the request's end");
    assert_eq!(spans.iter().filter(|span| span.trace == request.trace).count(), 1 + names.len());
}

/// Whether the batch that a request ran in says so, and holds as many rows as the requests that it names.
fn check_batch(spans: &[Span], request: &Span) {
    let compute = only(spans, &request.trace, "compute");
    assert_eq!(compute.links.len(), 1, "{compute:?}");
    let (trace, id) = &compute.links[0];
    let batch = only(spans, trace, "batch");
    assert!(batch.id == *id && batch.parent.is_empty(), "{batch:?}");
    assert!(batch.links.contains(&(request.trace.clone(), request.id.clone())), "{batch:?}");
    assert!(batch.begin <= compute.begin && compute.end <= batch.end, "{batch:?} {compute:?}");
    assert_eq!(batch.attribute("concertina.batch.rows"), Some(batch.links.len().to_string().as_str()));
    assert_eq!(batch.attribute("concertina.model.name"), Some("slow"));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_traces_of_stages_and_batches_link_to_them() {
    let mut collector = Collector::start().await;
    let server =
        Server::start(&["--tracing-endpoint", &collector.endpoint, "--set", "tracing.service_name=shop"]).await;
    let answers = all_at_once(&server).await;
    for (trace, answer) in (1..).zip(&answers) {
        let said = answer.header("traceresponse").unwrap();
        assert!(
            answer.status == 200 && said.starts_with(&format!("00-{trace:032x}-")) && said.ends_with("-01"),
            "{answer:?}"
        );
    }
    let alone = server.post(INFER, "", BODY).await;
    let unwanted = server.post(INFER, &parent(7000, "00"), BODY).await;
    assert_eq!(unwanted.header("traceresponse").unwrap().get(..36), Some(&*format!("00-{:032x}-", 7000)));
    let rows = server.post("/v1/models/slow:predict", &parent(7001, "01"), r#"{"instances":[[1.0]]}"#).await;
    let wrong = server.post(INFER, &parent(7002, "01"), "{}").await;
    assert_eq!((alone.status, unwanted.status, rows.status, wrong.status), (200, 200, 200, 400));
    let called = call(&server, 7003).await;
    let log = server.end().await;
    assert!(log.iter().all(|line| !line.contains("spans cannot be sent")), "{log:?}");

    let spans = collector.all();
    assert!(spans.iter().all(|span| span.service == "shop"));
    let ids: BTreeSet<_> = spans.iter().map(|span| &span.id).collect();
    assert_eq!(ids.len(), spans.len(), "every span has an id of its own");
    for trace in 1..=REQUESTS {
        let request = only(&spans, &format!("{trace:032x}"), "POST /v2/models/{model}/infer");
        assert_eq!((request.parent.clone(), request.kind), (format!("{:016x}", trace + 1000), 2));
        assert_eq!(request.state, format!("shop=basket{trace}"));
        assert_eq!(request.attribute("http.response.status_code"), Some("200"));
        assert_eq!(request.attribute("concertina.rows"), Some("1"));
        check_stages(&spans, request);
        check_batch(&spans, request);
    }
    let shared = spans.iter().filter(|span| span.name == "batch" && span.links.len() > 1).count();
    assert!(shared > 0, "no batch held two of {REQUESTS} requests");
    let id = &alone.header("traceresponse").unwrap()[3..35];
    let request = only(&spans, id, "POST /v2/models/{model}/infer");
    assert!(request.parent.is_empty(), "{request:?}");
    check_stages(&spans, request);
    let unwanted = format!("{:032x}", 7000);
    assert!(spans.iter().all(|span| span.trace != unwanted && span.links.iter().all(|(trace, _)| *trace != unwanted)));
    check_stages(&spans, only(&spans, &format!("{:032x}", 7001), "POST /v1/models/{model}"));
    let wrong = only(&spans, &format!("{:032x}", 7002), "POST /v2/models/{model}/infer");
    assert_eq!((wrong.attribute("error.type"), wrong.failed), (Some("invalid_request"), false), "{wrong:?}");
    let request = only(&spans, &format!("{:032x}", 7003), "inference.GRPCInferenceService/ModelInfer");
    assert!(called.contains(&format!("{:032x}-{}-01", 7003, request.id)), "{called}");
    assert_eq!(
        (request.parent.clone(), request.attribute("rpc.grpc.status_code")),
        (format!("{:016x}", 8003), Some("0"))
    );
    check_stages(&spans, request);
    check_batch(&spans, request);
}

/// One request by gRPC; the trace that its answer names.
async fn call(server: &Server, trace: u64) -> String {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap();
    let mut client = GrpcInferenceServiceClient::new(channel.connect().await.unwrap());
    let (name, datatype) = ("x".to_owned(), "FP32".to_owned());
    let input = InferInputTensor { name, datatype, shape: vec![1, 1], ..InferInputTensor::default() };
    let mut request = tonic::Request::new(ModelInferRequest {
        model_name: "slow".to_owned(),
        inputs: vec![input],
        raw_input_contents: vec![1.0f32.to_le_bytes().to_vec().into()],
        ..ModelInferRequest::default()
    });
    let parent = format!("00-{trace:032x}-{:016x}-01", trace + 1000);
    request.metadata_mut().insert("traceparent", parent.parse().unwrap());
    let answer = client.model_infer(request).await.unwrap();
    answer.metadata().get("traceresponse").unwrap().to_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_away_or_silent_costs_no_request_and_no_end() {
    // One refuses connections, since nobody listens there any more; the other takes them and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for address in [gone, silent.local_addr().unwrap()] {
        let endpoint = format!("http://{address}");
        let server = Server::start(&["--tracing-endpoint", &endpoint, "--set", "tracing.max_queue_spans=20"]).await;
        let answers = all_at_once(&server).await;
        assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
        let metrics = server.get("/metrics").await.body;
        let dropped =
            metrics.lines().find_map(|line| line.strip_prefix("concertina_trace_spans_total{outcome=\"dropped\"} "));
        // Seven spans of each request and one of each batch, of which twenty may wait and some have been given up.
        assert!(dropped.unwrap().parse::<u64>().unwrap() > REQUESTS, "{metrics}");
        server.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_off_sends_nothing_and_says_nothing() {
    let mut collector = Collector::start().await;
    let off = Server::start(&[]).await;
    let answer = off.post(INFER, &parent(1, "01"), BODY).await;
    assert_eq!((answer.status, answer.header("traceresponse")), (200, None));
    off.end().await;
    let never =
        Server::start(&["--tracing-endpoint", &collector.endpoint, "--set", "tracing.sampler=always_off"]).await;
    let answer = never.post(INFER, &parent(2, "01"), BODY).await;
    assert!(answer.status == 200 && answer.header("traceresponse").unwrap().ends_with("-00"), "{answer:?}");
    never.end().await;
    assert!(collector.all().is_empty());
}
