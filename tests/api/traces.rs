//! Traces: what requests of each kind of route leave behind, and what they say.

use crate::support::{App, echo, give_back, state, tensor};
use axum::body::Body;
use axum::http::Request;
use concertina::clock::Clock;
use concertina::http::router;
use concertina::metrics::Metrics;
use concertina::model::ModelSpec;
use concertina::tensor::DataType;
use concertina::trace::{Exporter, Sampler, Settings, Tracer};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use std::future::Future as _;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tower::ServiceExt as _;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[derive(Clone, Debug, Default)]
struct Kept(Arc<Mutex<Vec<SpanData>>>);

impl SpanExporter for Kept {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().unwrap().extend(batch);
        Ok(())
    }
}

/// A server whose spans are kept.
struct Traced {
    app: App,
    kept: Kept,
    stop: oneshot::Sender<()>,
    exporting: JoinHandle<()>,
}

fn traced(specs: Vec<ModelSpec>, answer: crate::support::Answer) -> Traced {
    let (mut state, server, mut jobs) = state(specs, 16, None);
    let settings = Settings {
        endpoint: None,
        service_name: "s".to_owned(),
        sampler: Sampler::ParentOrRatio,
        ratio: 1.0,
        max_queue_spans: NonZeroUsize::new(100).unwrap(),
    };
    let (tracer, recorded) = Tracer::new(&settings, Clock::start(), Metrics::new().spans());
    state.tracer = Some(tracer);
    tokio::spawn(async move {
        while let Some(job) = jobs.recv().await {
            let _gone = job.reply.send(answer(&job.request));
        }
    });
    let kept = Kept::default();
    let (stop, stopped) = oneshot::channel();
    let exporting = tokio::spawn(Exporter::new(kept.clone(), recorded).run(stopped));
    let app = App { router: router(Arc::new(state)), models: server.models, phase: server.phase };
    Traced { app, kept, stop, exporting }
}

impl Traced {
    async fn spans(self) -> Vec<SpanData> {
        self.stop.send(()).unwrap();
        self.exporting.await.unwrap();
        std::mem::take(&mut *self.kept.0.lock().unwrap())
    }
}

fn post(path: &str, body: &str) -> Request<Body> {
    Request::post(path).header("traceparent", PARENT).body(Body::from(body.to_owned())).unwrap()
}

#[tokio::test]
async fn text_routes_are_traced_with_their_tokens_and_their_writing() {
    for (path, body, route) in [
        ("/v1/embeddings", r#"{"model":"m","input":["alpha","beta"]}"#, "POST /v1/embeddings"),
        ("/embed", r#"{"inputs":"alpha"}"#, "POST /embed"),
        (
            "/tei/m/similarity",
            r#"{"inputs":{"source_sentence":"alpha","sentences":["beta"]}}"#,
            "POST /tei/{model}/similarity",
        ),
    ] {
        let traced = traced(vec![crate::text::embedder("")], crate::text::mean_and_count);
        let reply = traced.app.send(post(path, body)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let said = reply.header("traceresponse").unwrap().to_owned();
        let spans = traced.spans().await;
        let request = spans.iter().find(|span| span.name == route).unwrap();
        assert_eq!(said, format!("{}{}-01", &PARENT[..36], request.span_context.span_id()));
        assert_eq!(request.parent_span_id.to_string(), &PARENT[36..52]);
        for stage in ["decode", "encode"] {
            let span = spans.iter().find(|span| span.name == stage).unwrap();
            assert_eq!(span.parent_span_id, request.span_context.span_id(), "{path} {stage}");
            assert!(request.start_time <= span.start_time && span.end_time <= request.end_time, "{path} {stage}");
        }
        assert_eq!(spans.len(), 3, "{path}: {spans:?}");
    }
}

#[tokio::test]
async fn looking_leaves_no_trace() {
    let traced = traced(vec![echo("m", vec![tensor("x", DataType::Uint8)])], give_back);
    for path in ["/", "/metrics", "/v2/health/ready", "/v2/models/m", "/nothing"] {
        assert_eq!(traced.app.get(path).await.header("traceresponse"), None, "{path}");
    }
    assert!(traced.spans().await.is_empty());
}

#[tokio::test]
async fn a_client_that_goes_leaves_a_cancelled_request() {
    let body = r#"{"inputs":[{"name":"x","shape":[1,1],"datatype":"UINT8","data":[7]}]}"#;
    let traced = traced(vec![echo("m", vec![tensor("x", DataType::Uint8)])], give_back);
    let mut answer = Box::pin(traced.app.router.clone().oneshot(post("/v2/models/m/infer", body)));
    // One look, before anybody has answered, and gone.
    assert!(answer.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(answer);
    let spans = traced.spans().await;
    let request = spans.iter().find(|span| span.name == "POST /v2/models/{model}/infer").unwrap();
    assert_eq!(request.status, opentelemetry::trace::Status::error("cancelled"));
    assert_eq!(spans.iter().filter(|span| span.name == "encode").count(), 0);
}
