//! A collector: it takes spans by OTLP over gRPC and keeps what tests look at.

use axum::Router;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1 as wire;
use std::fmt::Write as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

/// Messages that may wait for the test to look.
const MOST: usize = 1000;

/// One span, with ids in hexadecimal digits and times in nanoseconds.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) service: String,
    pub(crate) trace: String,
    pub(crate) id: String,
    pub(crate) parent: String,
    pub(crate) state: String,
    pub(crate) name: String,
    /// 1 is internal, 2 a server's.
    pub(crate) kind: i32,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    pub(crate) failed: bool,
    pub(crate) links: Vec<(String, String)>,
    attributes: Vec<(String, String)>,
}

impl Span {
    pub(crate) fn attribute(&self, key: &str) -> Option<&str> {
        self.attributes.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }
}

/// One that listens until the test is over.
pub(crate) struct Collector {
    pub(crate) endpoint: String,
    requests: mpsc::Receiver<ExportTraceServiceRequest>,
}

struct Inlet(mpsc::Sender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Inlet {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        self.0.try_send(request.into_inner()).unwrap();
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let (sender, requests) = mpsc::channel(MOST);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let service = TraceServiceServer::new(Inlet(sender));
        let router =
            Router::new().route_service("/opentelemetry.proto.collector.trace.v1.TraceService/Export", service);
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { endpoint, requests }
    }

    /// Everything that has come.
    pub(crate) fn all(&mut self) -> Vec<Span> {
        let mut found = Vec::new();
        while let Ok(request) = self.requests.try_recv() {
            for resource in request.resource_spans {
                let attributes = resource.resource.unwrap().attributes.into_iter().map(pair).collect::<Vec<_>>();
                let service = attributes.iter().find(|(key, _)| key == "service.name").unwrap().1.clone();
                let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
                found.extend(spans.map(|span| taken(&service, span)));
            }
        }
        found
    }
}

fn taken(service: &str, span: wire::Span) -> Span {
    Span {
        service: service.to_owned(),
        trace: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        state: span.trace_state,
        name: span.name,
        kind: span.kind,
        begin: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        failed: span.status.is_some_and(|status| status.code == wire::status::StatusCode::Error as i32),
        links: span.links.iter().map(|link| (hex(&link.trace_id), hex(&link.span_id))).collect(),
        attributes: span.attributes.into_iter().map(pair).collect(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn pair(pair: KeyValue) -> (String, String) {
    let value = match pair.value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    (pair.key, value)
}
